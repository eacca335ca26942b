"""The documents of a store: marker, reference, lease, and in buckets the collector's mark.

Each is one JSON object, at most ``*_BYTES`` long, with ``magic``, ``version``, and two sets of feature names:
``incompatible`` (who doesn't know one of these must not use the document) and ``compatible`` (may be ignored). Fields
that this release doesn't know are ignored: a change that old releases must not ignore needs a new incompatible
feature. A new VERSION makes every existing store unreadable to the new release, or every new one to the old.

===========  ==========================================  ====================================================
document     file                                        fields besides the common four
===========  ==========================================  ====================================================
marker       ``store.json``                              none
reference    ``refs/<encoded name>``                     ``name``, ``target`` (an OCI descriptor)
lease        ``leases/<identifier>``                     ``id``, ``expires``, ``pins`` (digests, sorted)
mark         ``collector``, in buckets alone             ``id``, ``collecting``, ``dooms`` and ``doubts`` (digests,
                                                         sorted), ``doubted_until``
===========  ==========================================  ====================================================

``expires`` and ``doubted_until`` are in whole seconds since 1970 by the store's clock; at that second the lease, or the
doubt, is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from layerstore.digest import Digest
from layerstore.errors import MalformedError, UnsupportedError, about
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.document import dump, parse

VERSION = 1
FEATURES: frozenset[str] = frozenset()
"""The incompatible features that this release knows."""

MARKER_BYTES = 64 << 10
REFERENCE_BYTES = 1 << 20
LEASE_BYTES = 64 << 20
"""Room for 800,000 pins."""

MARK_BYTES = 4 << 20
"""Room for 50,000 digests; a collector deletes fewer at a time."""

EXPIRES_LIMIT = 1 << 40
"""Later seconds than this are damage, not dates."""


@dataclass(frozen=True, slots=True)
class StoreMarker:
    """What makes a directory a store."""

    MAGIC: ClassVar[str] = "imgtool store"

    def to_bytes(self) -> bytes:
        return _dump(self.MAGIC, {})

    @classmethod
    def parse(cls, data: bytes, what: str) -> StoreMarker:
        """Raises MalformedError, or UnsupportedError that names the version or feature."""
        _parse(data, cls.MAGIC, what, MARKER_BYTES)
        return cls()


@dataclass(frozen=True, slots=True)
class ReferenceDocument:
    """A reference; it holds its own name, so that a renamed file is noticed."""

    MAGIC: ClassVar[str] = "imgtool reference"

    name: str
    target: Descriptor

    def to_bytes(self) -> bytes:
        return _dump(self.MAGIC, {"name": self.name, "target": self.target.to_json()})

    @classmethod
    def parse(cls, data: bytes, what: str) -> ReferenceDocument:
        """Raises MalformedError, or UnsupportedError that names the version or feature."""
        document = _parse(data, cls.MAGIC, what, REFERENCE_BYTES)
        name = document.get("name")
        if not isinstance(name, str):
            raise MalformedError(f"{what} has no name")
        return cls(name, Descriptor.parse(document.get("target"), f"{what}: target"))


@dataclass(frozen=True, slots=True)
class LeaseDocument:
    """A lease. ``expires`` is in seconds since 1970 by the store's clock."""

    MAGIC: ClassVar[str] = "imgtool lease"

    identifier: str
    expires: int
    pins: frozenset[Digest] = frozenset()

    def expired(self, now_ns: int) -> bool:
        return now_ns >= self.expires * 1_000_000_000

    def to_bytes(self) -> bytes:
        pins = [str(digest) for digest in sorted(self.pins)]
        return _dump(self.MAGIC, {"id": self.identifier, "expires": self.expires, "pins": pins})

    @classmethod
    def parse(cls, data: bytes, what: str) -> LeaseDocument:
        """Raises MalformedError, or UnsupportedError that names the version or feature."""
        document = _parse(data, cls.MAGIC, what, LEASE_BYTES)
        identifier, expires, pins = (document.get(field) for field in ("id", "expires", "pins"))
        if not isinstance(identifier, str):
            raise MalformedError(f"{what} has no id")
        if type(expires) is not int or not 0 <= expires < EXPIRES_LIMIT:
            raise MalformedError(f"{what} has no valid expiry")
        if not isinstance(pins, list):
            raise MalformedError(f"{what} has no list of pins")
        return cls(identifier, expires, frozenset(Digest.parse(pin) for pin in pins))


@dataclass(frozen=True, slots=True)
class CollectorDocument:
    """What a bucket's collectors say to publishers, and to each other (``collector.py``).

    Attributes:
        identifier: of this writing of it; no two have the same.
        collecting: somebody does.
        dooms: what that one may be deleting.
        doubts: what an earlier one may still be deleting, since it never said that it was done.
        doubted_until: seconds since 1970, by the store's clock.
    """

    MAGIC: ClassVar[str] = "imgtool collector"

    identifier: str
    collecting: bool
    dooms: frozenset[Digest] = frozenset()
    doubts: frozenset[Digest] = frozenset()
    doubted_until: int = 0

    def to_bytes(self) -> bytes:
        return _dump(
            self.MAGIC,
            {
                "id": self.identifier,
                "collecting": self.collecting,
                "dooms": [str(digest) for digest in sorted(self.dooms)],
                "doubts": [str(digest) for digest in sorted(self.doubts)],
                "doubted_until": self.doubted_until,
            },
        )

    @classmethod
    def parse(cls, data: bytes, what: str) -> CollectorDocument:
        """Raises MalformedError, or UnsupportedError that names the version or feature."""
        document = _parse(data, cls.MAGIC, what, MARK_BYTES)
        identifier, collecting, until = (document.get(field) for field in ("id", "collecting", "doubted_until"))
        if not isinstance(identifier, str) or type(collecting) is not bool:
            raise MalformedError(f"{what} has no id, or doesn't say whether anybody collects")
        if type(until) is not int or not 0 <= until < EXPIRES_LIMIT:
            raise MalformedError(f"{what} has no valid end of doubts")
        dooms, doubts = (document.get(field) for field in ("dooms", "doubts"))
        if not isinstance(dooms, list) or not isinstance(doubts, list):
            raise MalformedError(f"{what} has no lists of dooms and doubts")
        with about(what):
            doomed, doubted = (frozenset(map(Digest.parse, each)) for each in (dooms, doubts))
        return cls(identifier, collecting, doomed, doubted, until)


def _dump(magic: str, fields: Mapping[str, object]) -> bytes:
    common = {"magic": magic, "version": VERSION, "incompatible": [], "compatible": []}
    return dump({**common, **fields}) + b"\n"


def _parse(data: bytes, magic: str, what: str, limit: int) -> dict[str, object]:
    document = parse(data, what, limit=limit)
    if document.get("magic") != magic:
        raise MalformedError(f"{what} is not an {magic} document")
    version = document.get("version")
    if type(version) is not int:
        raise MalformedError(f"{what} has no version")
    if version != VERSION:
        raise UnsupportedError(
            f"{what} has version {version}, this release reads {VERSION}: use the release that made it"
        )
    unknown = _features(document, "incompatible", what) - FEATURES
    _features(document, "compatible", what)
    if unknown:
        listed = ", ".join(sorted(map(repr, unknown)))
        raise UnsupportedError(f"{what} needs the feature {listed}, which this release lacks: use a later release")
    return document


def _features(document: Mapping[str, object], field: str, what: str) -> set[str]:
    value = document.get(field)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise MalformedError(f"{what}: {field!r} is not a list of feature names")
    return set(value)
