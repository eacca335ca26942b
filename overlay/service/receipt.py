"""Receipts: what a sandbox was made of and how that was verified; and, when it has ended, what it read and wrote.

One JSON object, UTF-8, with a line feed behind it. It is the ``receipt`` of the sandbox's ``state.json`` for as long as
the sandbox stands, and one file for each that has ended: :mod:`overlay.service.receipts`. ``docs/formats.md`` has the
fields. A field that this release doesn't know is ignored; to change the meaning of one takes an incompatible feature.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import Any

import zstandard

from layerstore.errors import MalformedError, UnsupportedError, os_errors, printable
from layerstore.image import Layer
from layerstore.oci.document import kind_of, parse
from layerstore.staging import write_file
from layerstore.version import FORMAT_VERSION, VERSION
from overlay.service.written import Written

MAGIC = "imgtool receipt"
RECEIPT_VERSION = 1
FEATURES: frozenset[str] = frozenset()
"""Incompatible features of a receipt that this release understands; it writes none."""
MAX_SIZE = 1 << 20
"""Bytes of a receipt: it has to fit into a state.json."""


class Verification(StrEnum):
    """What is known about the bytes that a sandbox can read."""

    VERIFIED = "verified"
    AGAIN = "verified-again"
    IN_PLACE = "in-place"
    SUSPECT = "suspect"


MEANING: Mapping[Verification, str] = {
    Verification.VERIFIED: (
        "metadata by digest and structure before the mount; every frame of data by its sha256 before it can be read"
    ),
    Verification.AGAIN: (
        "as verified; and since the node's service had ended without closing its cache, every frame that was there "
        "already is compared with its sha256 again before its first use"
    ),
    Verification.IN_PLACE: (
        "metadata by digest and structure before the mount; data are read in place from raw packs of a shared file "
        "system, which the kernel does not verify"
    ),
    Verification.SUSPECT: (
        "as verified; but for some time nobody answered for data that had not been fetched, so what was read then may "
        "be zeros: discard what this sandbox made of it"
    ),
}


class Reason(StrEnum):
    """Why a sandbox ended."""

    DOWN = "down"
    RUN = "run"
    TTL = "ttl"
    STOP = "stop"
    LOST = "lost"
    FAILED = "failed"


REASONS: Mapping[Reason, str] = {
    Reason.DOWN: "somebody removed it",
    Reason.RUN: "its command ended",
    Reason.TTL: "its time was over",
    Reason.STOP: "the service was stopped by force",
    Reason.LOST: "its mounts were gone, after a restart of the machine for instance, and it was removed",
    Reason.FAILED: "it could not be made whole again, and was removed",
}


@dataclass(frozen=True, slots=True)
class Named:
    """An image as it was asked for: ``role`` is base, workspace or toolkit, or stack for one that is composed."""

    role: str
    name: str
    manifest: str

    def to_json(self) -> dict[str, object]:
        return {"role": self.role, "name": self.name, "manifest": self.manifest}


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One layer: digests of its metadata image and of its packs, in device order, all over raw bytes."""

    role: str
    layer: str
    packs: tuple[str, ...] = ()

    @classmethod
    def of(cls, layer: Layer) -> LayerRecord:
        return cls(str(layer.role), str(layer.metadata), tuple(str(pack.digest) for pack in layer.packs))

    def to_json(self) -> dict[str, object]:
        return {"role": self.role, "layer": self.layer, "packs": list(self.packs)}


@dataclass(frozen=True, slots=True)
class Host:
    """Where it ran: versions, and what the kernel says of its file systems.

    Attributes:
        kernel: its release.
        boot: the kernel's boot id.
        imgtool: the release.
        format_version: of layers.
        zstd: the library that decompressed the frames.
        erofs: features of the kernel's EROFS.
        overlay: parameters of the kernel's overlayfs; ours are given at each mount.
    """

    kernel: str
    boot: str
    imgtool: str = VERSION
    format_version: int = FORMAT_VERSION
    zstd: str = ".".join(map(str, zstandard.ZSTD_VERSION))
    erofs: tuple[str, ...] = ()
    overlay: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    @cache
    def here(cls) -> Host:
        """This machine; looked at once in the life of a process."""
        return cls(
            kernel=os.uname().release,
            boot=_content("/proc/sys/kernel/random/boot_id"),
            erofs=tuple(_names("/sys/fs/erofs/features")),
            overlay={
                name: _content(f"/sys/module/overlay/parameters/{name}")
                for name in _names("/sys/module/overlay/parameters")
            },
        )


@dataclass(frozen=True, slots=True)
class Read:
    """What a sandbox had to wait for: data that weren't on the node when it read them.

    Attributes:
        frames: fetched because of it.
        bytes: of these, raw.
        waited: seconds, over all of its readers.
        events: times that the kernel asked.
    """

    frames: int = 0
    bytes: int = 0
    waited: float = 0.0
    events: int = 0

    def to_json(self) -> dict[str, object]:
        return {"frames": self.frames, "bytes": self.bytes, "waited": round(self.waited, 6), "events": self.events}


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The plans that said what is fetched ahead, as they were known when the sandbox was made.

    Attributes:
        name: of the plan that was asked for; auto: the one for its layers.
        plans: name and digest of each that was found. Those that a store was still asked for then are not among them.
        planned_bytes: that they name, raw.
        matched_bytes: of these, those that the sandbox's packs have.
    """

    name: str
    plans: tuple[tuple[str, str], ...] = ()
    planned_bytes: int = 0
    matched_bytes: int = 0

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "plans": [{"name": name, "digest": digest} for name, digest in self.plans],
            "planned_bytes": self.planned_bytes,
            "matched_bytes": self.matched_bytes,
        }


@dataclass(frozen=True, slots=True)
class Ended:
    """How it ended. What isn't known is None.

    Attributes:
        ended: RFC 3339.
        reason: one of :class:`Reason`, or a later release's.
        read: of its layers.
        wrote: into its upper; None too where it is read-only.
        exit_code: of the command that it was made for.
        prefetch: what plans brought for it, as ``ps --json`` says it.
    """

    ended: str
    reason: str
    read: Read | None = None
    wrote: Written | None = None
    exit_code: int | None = None
    prefetch: Mapping[str, object] | None = None

    def to_json(self) -> dict[str, object]:
        return {
            "ended": self.ended,
            "reason": self.reason,
            "read": None if self.read is None else self.read.to_json(),
            "wrote": None if self.wrote is None else self.wrote.to_json(),
            "exit_code": self.exit_code,
            "prefetch": None if self.prefetch is None else dict(self.prefetch),
        }


@dataclass(frozen=True, slots=True)
class Receipt:
    """All of it. ``end`` is None as long as the sandbox stands.

    Attributes:
        id: of the sandbox.
        started: RFC 3339.
        images: as they were asked for, bottom first.
        layers: bottom first.
        chain: digest of the layers: what its upper belongs to.
        store: location that the images were looked up in.
        mode: eager, lazy or direct.
        backend: how data are reached.
        why: one line: how mode and backend were chosen.
        verification: state of what it reads.
        detail: what the state is about, such as the time in which nobody answered; may be empty.
        host: where it ran.
        isolation: container or none.
        read_only: whether it had no upper.
        scratch: bytes it could write, or None.
        ttl: seconds it was made for, or None.
        receipts: directory that gets a copy, or None.
        fetched_bytes: taken from the store before it stood, as stored.
        fetched_requests: in so many requests.
        plan: what was fetched ahead by plan; None: nothing.
        trace: name of the trace of what it read; None: it was made without one.
        carried: fields of its description that are not ours.
    """

    id: str
    started: str
    images: tuple[Named, ...]
    layers: tuple[LayerRecord, ...]
    chain: str
    store: str
    mode: str
    backend: str
    why: str
    verification: Verification
    host: Host
    detail: str = ""
    isolation: str = "container"
    read_only: bool = False
    scratch: int | None = None
    ttl: float | None = None
    receipts: str | None = None
    fetched_bytes: int = 0
    fetched_requests: int = 0
    plan: PlanRecord | None = None
    trace: str | None = None
    carried: Mapping[str, object] = field(default_factory=dict)
    end: Ended | None = None

    def ending(
        self,
        reason: str,
        *,
        read: Read | None = None,
        wrote: Written | None = None,
        exit_code: int | None = None,
        prefetch: Mapping[str, object] | None = None,
        at: float | None = None,
    ) -> Receipt:
        """The receipt of the sandbox when it has ended, by default now."""
        ended = rfc3339(time.time() if at is None else at)
        return replace(self, end=Ended(ended, str(reason), read, wrote, exit_code, prefetch))

    def doubted(self, detail: str) -> Receipt:
        """The receipt of a sandbox that may have read zeros; ``detail`` says when and of what."""
        return replace(self, verification=Verification.SUSPECT, detail=detail)

    def to_json(self) -> dict[str, object]:
        return {
            "magic": MAGIC,
            "version": RECEIPT_VERSION,
            "incompatible": [],
            "compatible": [],
            "id": self.id,
            "started": self.started,
            "images": [image.to_json() for image in self.images],
            "layers": [layer.to_json() for layer in self.layers],
            "chain": self.chain,
            "store": self.store,
            "mode": self.mode,
            "backend": self.backend,
            "why": self.why,
            "verification": {
                "state": str(self.verification),
                "meaning": MEANING[self.verification],
                "detail": self.detail,
            },
            "isolation": self.isolation,
            "read_only": self.read_only,
            "scratch": self.scratch,
            "ttl": self.ttl,
            "receipts": self.receipts,
            "fetched_bytes": self.fetched_bytes,
            "fetched_requests": self.fetched_requests,
            "plan": None if self.plan is None else self.plan.to_json(),
            "trace": self.trace,
            "kernel": self.host.kernel,
            "boot": self.host.boot,
            "imgtool": self.host.imgtool,
            "format_version": self.host.format_version,
            "zstd": self.host.zstd,
            "erofs": list(self.host.erofs),
            "overlay": dict(self.host.overlay),
            "carried": dict(self.carried),
            "not_ours": not_ours(self.carried),
            "end": None if self.end is None else self.end.to_json(),
        }

    @classmethod
    def from_json(cls, document: object) -> Receipt:
        """The receipt of an object that :meth:`to_json` made, of this release or another.

        Raises:
            MalformedError: no receipt, or a field is missing or of a wrong type.
            UnsupportedError: a version or feature of another release.
        """
        taken = _Taken(document)
        if taken.text("magic") != MAGIC:
            raise MalformedError(f"receipt: no magic {MAGIC!r}")
        if taken.whole("version") != RECEIPT_VERSION:
            raise UnsupportedError(f"receipt: version {taken.whole('version')}; this release reads {RECEIPT_VERSION}")
        unknown = set(taken.texts("incompatible")) - FEATURES
        if unknown:
            raise UnsupportedError(f"receipt: needs features {printable(', '.join(sorted(unknown)))}")
        verification = taken.object("verification")
        try:
            state = Verification(verification.text("state"))
        except ValueError:
            raise UnsupportedError("receipt: its verification state is of another release") from None
        overlay = taken.value("overlay", dict)
        return cls(
            id=taken.text("id"),
            started=taken.text("started"),
            images=tuple(
                Named(item.text("role"), item.text("name"), item.text("manifest")) for item in taken.objects("images")
            ),
            layers=tuple(
                LayerRecord(item.text("role"), item.text("layer"), item.texts("packs"))
                for item in taken.objects("layers")
            ),
            chain=taken.text("chain"),
            store=taken.text("store"),
            mode=taken.text("mode"),
            backend=taken.text("backend"),
            why=taken.text("why"),
            verification=state,
            detail=verification.text("detail"),
            host=Host(
                kernel=taken.text("kernel"),
                boot=taken.text("boot"),
                imgtool=taken.text("imgtool"),
                format_version=taken.whole("format_version"),
                zstd=taken.text("zstd"),
                erofs=taken.texts("erofs"),
                overlay={str(name): str(value) for name, value in overlay.items()},
            ),
            isolation=taken.text("isolation"),
            read_only=taken.value("read_only", bool),
            scratch=taken.optional("scratch", int),
            ttl=_float(taken.optional("ttl", int, float)),
            receipts=taken.optional("receipts", str),
            fetched_bytes=taken.whole("fetched_bytes"),
            fetched_requests=taken.whole("fetched_requests"),
            plan=None if taken.optional("plan", dict) is None else _plan(taken.object("plan")),
            trace=taken.optional("trace", str),
            carried=taken.value("carried", dict),
            end=None if taken.optional("end", dict) is None else _ended(taken.object("end")),
        )

    def to_bytes(self) -> bytes:
        """The file: indented, for people read it, too."""
        return json.dumps(self.to_json(), indent=1).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, what: str = "receipt") -> Receipt:
        """Raises as :meth:`from_json`, and LimitError where it is larger than MAX_SIZE."""
        return cls.from_json(parse(data, what, limit=MAX_SIZE))

    def write(self, directory: str) -> str:
        """Put a copy into ``directory``, which exists, as ``<id>.json``, durably; returns its path.

        Raises:
            NotFoundError: there is no such directory.
            NoSpaceError, PermissionError_, UnavailableError: it can't be written.
        """
        path = os.path.join(directory, f"{self.id}.json")
        with os_errors(f"write the receipt of sandbox {self.id}"):
            write_file(path, self.to_bytes())
        return path


def rfc3339(seconds: float) -> str:
    """A time as RFC 3339 has it, in UTC with milliseconds; ``seconds`` since 1970."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


PARTLY_OURS = ("resources",)
"""Sections of a description of which some fields are ours: the others are named one by one."""


def not_ours(carried: Mapping[str, object]) -> list[str]:
    """Where the fields stood that are carried and mean nothing to us: ``resources.cpu``, ``network``."""
    paths: list[str] = []
    for name, value in carried.items():
        if name in PARTLY_OURS and isinstance(value, dict):
            paths += [f"{name}.{below}" for below in value]
        else:
            paths.append(name)
    return paths


def _ended(taken: _Taken) -> Ended:
    return Ended(
        ended=taken.text("ended"),
        reason=taken.text("reason"),
        read=None if taken.optional("read", dict) is None else _read(taken.object("read")),
        wrote=None if taken.optional("wrote", dict) is None else _wrote(taken.object("wrote")),
        exit_code=taken.optional("exit_code", int),
        prefetch=taken.optional("prefetch", dict),
    )


def _plan(taken: _Taken) -> PlanRecord:
    plans = tuple((item.text("name"), item.text("digest")) for item in taken.objects("plans"))
    return PlanRecord(taken.text("name"), plans, taken.whole("planned_bytes"), taken.whole("matched_bytes"))


def _read(taken: _Taken) -> Read:
    waited = float(taken.value("waited", int, float))
    return Read(taken.whole("frames"), taken.whole("bytes"), waited, taken.whole("events"))


def _wrote(taken: _Taken) -> Written:
    return Written(
        taken.whole("files"),
        taken.whole("bytes"),
        taken.whole("directories"),
        taken.whole("deleted"),
        taken.value("complete", bool),
    )


class _Taken:
    """An object whose fields have to be there, with the right types."""

    def __init__(self, document: object, where: str = "receipt") -> None:
        if not isinstance(document, dict):
            raise MalformedError(f"{where} is {kind_of(document)} where an object belongs")
        self._document = document
        self._where = where

    def value(self, key: str, *kinds: type) -> Any:
        value = self._document.get(key)
        if type(value) not in kinds:
            missing = "is missing" if key not in self._document else f"is {kind_of(value)}"
            raise MalformedError(f"{self._where}: {key} {missing}, where {kinds[0].__name__} belongs")
        return value

    def optional(self, key: str, *kinds: type) -> Any:
        return None if self._document.get(key) is None else self.value(key, *kinds)

    def text(self, key: str) -> str:
        value: str = self.value(key, str)
        return value

    def whole(self, key: str) -> int:
        value: int = self.value(key, int)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        values = self.value(key, list)
        if not all(isinstance(item, str) for item in values):
            raise MalformedError(f"{self._where}: {key} is not an array of strings")
        return tuple(values)

    def object(self, key: str) -> _Taken:
        return _Taken(self.value(key, dict), f"{self._where}: {key}")

    def objects(self, key: str) -> Iterable[_Taken]:
        return [_Taken(item, f"{self._where}: {key}[{n}]") for n, item in enumerate(self.value(key, list))]


def _float(value: int | float | None) -> float | None:
    return None if value is None else float(value)


def _content(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as stream:
            return stream.read(4096).strip()
    except OSError:
        return ""


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []
