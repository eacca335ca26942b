"""The files of the cache that are neither metadata image nor raw pack.

``frames`` of a cached pack, little-endian, offsets and sizes in bytes::

    FramesHeader | FrameRecord for each frame (as in the pack's own frame index) | presence, one byte a frame: 0 or 1

The frame index is kept here so that a frame can be verified, and fetched from any store, with no manifest at hand.

The others are one JSON object each, with ``magic`` and ``version``, at most ``*_BYTES`` long:

====================  ================================================================================================
file                  further fields
====================  ================================================================================================
``<hex>.uses``        ``packs``: for each device in order ``[hex of the pack's sha256, [[first block, blocks], …]]``.
                      Beside a metadata image; can be made from it at any time
``origins``           ``origins``: newest first ``{"location": of the store, "pack": the pack's descriptor there}``.
                      Beside ``frames``; one that can't be read counts as none
``pins.json``         ``pins``: ``{name: [hex, …]}``, of packs and metadata images
``clean``             ``doubted``: hex of packs whose presence is to be verified nonetheless. Exists only while nobody
                      owns the cache and its last owner has closed it; one that can't be read counts as none
====================  ================================================================================================
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from layerstore.errors import MalformedError, UnsupportedError
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.document import dump, parse
from layerstore.pack.stored import StoredPack

MAGIC = b"imgframe"
VERSION = 1
INCOMPATIBLE = 0
"""Incompatible features that are understood: none yet."""

USES_MAGIC = "imgtool uses"
USES_VERSION = 1
"""One of another version is made anew, so a change costs a node one read of each metadata image."""
USES_BYTES = 256 << 20
"""Ten million runs: more than the file of a metadata image that can be handled here."""

ORIGINS_MAGIC = "imgtool origins"
ORIGINS_VERSION = 1
"""One of another version counts as none: a pack is fetched from where it is asked for next."""
ORIGINS_BYTES = 1 << 20
MAX_ORIGINS = 16
"""The oldest are forgotten."""

PINS_MAGIC = "imgtool pins"
PINS_VERSION = 1
"""One of another version is refused, since what it protects would be evicted."""
PINS_BYTES = 64 << 20

CLEAN_MAGIC = "imgtool clean"
CLEAN_VERSION = 1
"""One of another version counts as an unclean stop: everything is verified again."""
CLEAN_BYTES = 64 << 20

_HEX = re.compile("[0-9a-f]{64}")


def is_hex(text: object) -> bool:
    """Whether this is the hex of a sha256, and so a name in the cache."""
    return isinstance(text, str) and _HEX.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class FramesHeader:
    """Identity of the pack and of the blob that its frames were listed for, and the number of frames."""

    frames: int
    raw_size: int
    data_end: int
    pack_sha256: bytes
    blob_sha256: bytes
    incompatible: int = 0

    STRUCT: ClassVar[struct.Struct] = struct.Struct("<8sHxxIIxxxxQQ32s32s")

    def pack(self) -> bytes:
        return self.STRUCT.pack(
            MAGIC,
            VERSION,
            self.incompatible,
            self.frames,
            self.raw_size,
            self.data_end,
            self.pack_sha256,
            self.blob_sha256,
        )

    @classmethod
    def unpack(cls, data: bytes) -> FramesHeader:
        if len(data) < cls.STRUCT.size:
            raise MalformedError(f"frames file of {len(data)} bytes is shorter than its header")
        magic, version, incompatible, frames, raw_size, data_end, pack, blob = cls.STRUCT.unpack_from(data)
        if magic != MAGIC:
            raise MalformedError(f"not a frames file: magic {magic!r}")
        if version != VERSION or incompatible & ~INCOMPATIBLE:
            raise UnsupportedError(f"frames file of version {version} with features {incompatible:#x}")
        return cls(frames, raw_size, data_end, pack, blob, incompatible)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a pack can be had: a store's location, and the pack as a manifest there describes it."""

    location: str
    pack: StoredPack


def dump_origins(origins: Iterable[Origin]) -> bytes:
    listed = [{"location": origin.location, "pack": origin.pack.descriptor().to_json()} for origin in origins]
    return _dump(ORIGINS_MAGIC, ORIGINS_VERSION, {"origins": listed})


def parse_origins(data: bytes) -> list[Origin]:
    """Raises MalformedError or another ImgtoolError; the file can be done without."""
    listed = _parse(data, ORIGINS_MAGIC, ORIGINS_VERSION, ORIGINS_BYTES).get("origins")
    if not isinstance(listed, list):
        raise MalformedError("origins is not a list")
    origins = []
    for entry in listed[:MAX_ORIGINS]:
        if not isinstance(entry, dict) or not isinstance(entry.get("location"), str):
            raise MalformedError("an origin has no location")
        pack = StoredPack.from_descriptor(Descriptor.parse(entry.get("pack"), "origin"))
        origins.append(Origin(entry["location"], pack))
    return origins


def dump_pins(pins: Mapping[str, Iterable[str]]) -> bytes:
    return _dump(PINS_MAGIC, PINS_VERSION, {"pins": {name: list(hexes) for name, hexes in pins.items()}})


def parse_pins(data: bytes) -> dict[str, list[str]]:
    """Raises MalformedError, LimitError, UnsupportedError."""
    pins = _parse(data, PINS_MAGIC, PINS_VERSION, PINS_BYTES).get("pins")
    if not isinstance(pins, dict) or not all(
        isinstance(hexes, list) and all(map(is_hex, hexes)) for hexes in pins.values()
    ):
        raise MalformedError("pins are not lists of hex")
    return pins


def dump_clean(doubted: Iterable[str]) -> bytes:
    return _dump(CLEAN_MAGIC, CLEAN_VERSION, {"doubted": sorted(doubted)})


def parse_clean(data: bytes) -> set[str]:
    """Raises MalformedError or another ImgtoolError."""
    doubted = _parse(data, CLEAN_MAGIC, CLEAN_VERSION, CLEAN_BYTES).get("doubted")
    if not isinstance(doubted, list) or not all(map(is_hex, doubted)):
        raise MalformedError("doubted is not a list of hex")
    return set(doubted)


def _dump(magic: str, version: int, fields: Mapping[str, object]) -> bytes:
    return dump({"magic": magic, "version": version, **fields}) + b"\n"


def _parse(data: bytes, magic: str, version: int, limit: int) -> dict[str, object]:
    document = parse(data, magic, limit=limit)
    if document.get("magic") != magic or type(document.get("version")) is not int:
        raise MalformedError(f"not an {magic!r} document")
    if document["version"] != version:
        raise UnsupportedError(f"{magic!r} document of version {document['version']}; this release reads {version}")
    return document
