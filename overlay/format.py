"""``state.json``: what a sandbox is made of, written once when it stands and removed first when it goes.

One JSON object, UTF-8, at most 1 MiB::

    magic         "imgtool-sandbox"
    version       1; a reader refuses others
    features      names without which the rest is misunderstood; a reader refuses those it doesn't know
    id            the sandbox's name
    created       seconds since 1970
    boot          the kernel's boot id: mounts, and what volatile overlays hold, end with it
    mode          how data are reached (eager, lazy, direct)
    read_only     whether there is no upper
    scratch       bytes that upper and work may take, or null
    layers        hex of the metadata images' sha256, bottom first
    mounts        keys of the mounts they are taken from, in the same order (layerkey); absent: those of ``layers``
    chain         sha256 over the layers: an upper belongs to one chain and no other
    image         name and digests of the image, as the caller gave them
    receipt       what the caller wants to find again

To change a field costs every node that still has such sandboxes a restart of them; to add one costs nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from layerstore.errors import MalformedError, UnsupportedError
from overlay.layerkey import split_key

MAGIC = "imgtool-sandbox"
VERSION = 1
FEATURES: frozenset[str] = frozenset()
"""Features of a state that this release understands; it writes none."""
MAX_SIZE = 1 << 20
"""Bytes of a state.json."""

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


@dataclass(frozen=True, slots=True)
class SandboxState:
    """The fields above, but for magic, version and features."""

    id: str
    created: int
    boot: str
    mode: str
    read_only: bool
    scratch: int | None
    layers: tuple[str, ...]
    chain: str
    image: Mapping[str, object]
    receipt: Mapping[str, object]
    mounts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.mounts:
            object.__setattr__(self, "mounts", self.layers)

    def to_bytes(self) -> bytes:
        document = {
            "magic": MAGIC,
            "version": VERSION,
            "features": [],
            "id": self.id,
            "created": self.created,
            "boot": self.boot,
            "mode": self.mode,
            "read_only": self.read_only,
            "scratch": self.scratch,
            "layers": self.layers,
            "mounts": self.mounts,
            "chain": self.chain,
            "image": self.image,
            "receipt": self.receipt,
        }
        return _encode(document).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> SandboxState:
        """Parse and check.

        Raises:
            MalformedError: not such a document, or its chain is not that of its layers.
            UnsupportedError: a version or feature of another release.
        """
        if len(text) > MAX_SIZE:
            raise MalformedError(f"state of a sandbox: larger than {MAX_SIZE} bytes")
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise MalformedError(f"state of a sandbox: not JSON: {error}") from None
        if not isinstance(document, dict) or document.get("magic") != MAGIC:
            raise MalformedError(f"state of a sandbox: no magic {MAGIC!r}")
        if document.get("version") != VERSION:
            raise UnsupportedError(
                f"state of a sandbox: version {document.get('version')!r}; this release reads {VERSION}"
            )
        unknown = set(_list_of_str(document, "features")) - FEATURES
        if unknown:
            raise UnsupportedError(f"state of a sandbox: needs features {', '.join(sorted(unknown))}")
        scratch = document.get("scratch")
        if scratch is not None:
            scratch = _typed(document, "scratch", int)
        state = cls(
            id=_typed(document, "id", str),
            created=_typed(document, "created", int),
            boot=_typed(document, "boot", str),
            mode=_typed(document, "mode", str),
            read_only=_typed(document, "read_only", bool),
            scratch=scratch,
            layers=tuple(_list_of_str(document, "layers")),
            chain=_typed(document, "chain", str),
            image=_typed(document, "image", dict),
            receipt=_typed(document, "receipt", dict),
            mounts=tuple(_list_of_str(document, "mounts")) if "mounts" in document else (),
        )
        if state.chain != chain_of(state.layers):
            raise MalformedError("state of a sandbox: its chain is not that of its layers")
        if list(map(_layer_of, state.mounts)) != list(state.layers):
            raise MalformedError("state of a sandbox: its mounts are not those of its layers")
        return state


def chain_of(layers: Iterable[str]) -> str:
    """``sha256:…`` over the hex digests of the layers, bottom first, each ended by a newline."""
    return "sha256:" + hashlib.sha256("".join(f"{layer}\n" for layer in layers).encode()).hexdigest()


def _layer_of(mount: str) -> str | None:
    parts = split_key(mount)
    return parts and parts[0]


def _typed(document: dict[str, Any], key: str, kind: type) -> Any:
    value = document.get(key)
    if type(value) is not kind:
        raise MalformedError(f"state of a sandbox: {key} is not {kind.__name__}")
    return value


def _list_of_str(document: dict[str, Any], key: str) -> list[str]:
    value = document.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise MalformedError(f"state of a sandbox: {key} is not a list of strings")
    return value
