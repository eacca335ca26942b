"""A digest is a type, made at the edge and printed as ``algorithm:hex``.

Grammar and registered algorithms: OCI image-spec 1.1, descriptor.md. sha512 is accepted in what we read; everything
that we write uses sha256.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from layerstore.errors import CorruptError, MalformedError, UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_GRAMMAR = re.compile(r"[a-z0-9]+(?:[.+_-][a-z0-9]+)*:[a-zA-Z0-9=_-]+")
_HEX_LENGTH = {"sha256": 64, "sha512": 128}
_HEX = re.compile(r"[0-9a-f]+")


class Hasher(Protocol):
    """What hashlib's objects offer, as far as it is used here."""

    def update(self, data: Buffer, /) -> None: ...
    def digest(self) -> bytes: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True, order=True)
class Digest:
    """The name of some bytes. Values exist only for algorithms that can be verified here."""

    algorithm: str
    hex: str

    @classmethod
    def parse(cls, text: object) -> Digest:
        """Parse ``algorithm:hex``.

        Raises:
            MalformedError: not a string, or it breaks the grammar (upper-case hex, wrong length, path characters).
            UnsupportedError: well-formed, but of an algorithm that can't be verified here.
        """
        if not isinstance(text, str) or not _GRAMMAR.fullmatch(text):
            raise MalformedError(f"not a digest: {text!r}")
        algorithm, _, value = text.partition(":")
        length = _HEX_LENGTH.get(algorithm)
        if length is None:
            raise UnsupportedError(f"digest algorithm {algorithm!r} can't be verified; sha256 and sha512 can")
        if len(value) != length or not _HEX.fullmatch(value):
            raise MalformedError(f"not a {algorithm} digest, which has {length} lower-case hex digits: {text!r}")
        return cls(algorithm, value)

    @classmethod
    def of(cls, data: Buffer) -> Digest:
        return cls("sha256", hashlib.sha256(data).hexdigest())

    @classmethod
    def from_raw(cls, raw: bytes) -> Digest:
        """The sha256 digest with these 32 bytes."""
        assert len(raw) == 32
        return cls("sha256", raw.hex())

    @property
    def raw(self) -> bytes:
        return bytes.fromhex(self.hex)

    def hasher(self) -> Hasher:
        return hashlib.new(self.algorithm)

    def check(self, actual: Hasher, what: str) -> None:
        """Raise CorruptError, naming both digests, unless ``actual`` has come to this digest."""
        if actual.hexdigest() != self.hex:
            raise CorruptError(what, expected=str(self), actual=f"{self.algorithm}:{actual.hexdigest()}")

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.hex}"
