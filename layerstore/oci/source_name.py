"""Spellings of image sources, after skopeo's: ``TRANSPORT:REST``.

=====================================  ==========================================================
``oci:DIR[:TAG]``                      OCI layout directory
``oci-archive:FILE[:TAG]``             a tar of one, compressed or not
``docker-archive:FILE[:REFERENCE]``    what ``docker save`` writes, compressed or not
``tar:FILE``                           one layer; ``-`` is standard input
``tree:DIR``                           a directory tree
``docker://REFERENCE``                 an image in a registry
=====================================  ==========================================================

Instead of ``:TAG`` the first three take ``@N`` (or ``:@N``), the N-th image of the list in it, from 0, and
``@ALGORITHM:HEX``, the image with that digest.

Tags may have colons and slashes (``oci:dir:docker.io/library/debian:12``), and paths may have colons and ``@``. The
path ends, as in skopeo, at the first colon (or ``@`` that begins a position or a digest), provided that what is
before it exists and is of the right kind; else at the first later one, or the end of the text, where that holds. If
it holds nowhere it ends at the first, so that the error names what skopeo would look for. ``tar:`` and ``tree:`` have
no tags: all the rest is the path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from layerstore.digest import Digest
from layerstore.errors import ImgtoolError, UsageError, printable
from layerstore.oci.document import shown
from layerstore.oci.reference import DockerReference

IMAGE_TRANSPORTS = ("oci", "oci-archive", "docker-archive")
TRANSPORTS = (*IMAGE_TRANSPORTS, "tar", "tree", "docker")

_INDEX = re.compile(r"[0-9]{1,9}")

Exists = Callable[[str, str], bool]
"""Whether a path is something that a transport reads: ``exists(transport, path)``."""


def is_there(transport: str, path: str) -> bool:
    """A layout is a directory with an index.json or oci-layout; an archive is anything but a directory."""
    if transport == "oci":
        return any(os.path.lexists(os.path.join(path, name)) for name in ("index.json", "oci-layout"))
    return os.path.exists(path) and not os.path.isdir(path)


@dataclass(frozen=True, slots=True)
class SourceName:
    """Where an image is. At most one of tag, position and digest is set; ``reference`` is that of ``docker``."""

    transport: str
    path: str
    tag: str | None = None
    position: int | None = None
    digest: Digest | None = None
    reference: DockerReference | None = None

    @classmethod
    def parse(cls, text: str, *, exists: Exists = is_there) -> SourceName:
        """Parse a source as given on a command line.

        Raises:
            UsageError: no transport, an unknown one, or nothing after it.
            UnsupportedError: a docker reference with a digest that can't be verified.
        """
        try:
            os.fsencode(text)
        except UnicodeEncodeError as error:
            raise UsageError(f"not an image source, nor any text: {shown(text)}") from error
        transport, colon, rest = text.partition(":")
        if not colon or transport not in TRANSPORTS:
            known = ", ".join(f"{name}:" for name in TRANSPORTS[:-1])
            raise UsageError(f"not an image source: {shown(text)}; start it with {known} or docker://")
        if transport == "docker":
            if not rest.startswith("//"):
                raise UsageError(f"write docker://REFERENCE: {shown(text)}")
            return cls(transport, "", reference=DockerReference.parse(rest[2:]))
        if transport in ("tar", "tree"):
            if not rest or "\0" in rest:
                raise UsageError(f"{transport}: needs a path: {shown(text)}")
            return cls(transport, rest)
        name = cls._parse_image(transport, rest, exists)
        if not name.path or "\0" in name.path:
            raise UsageError(f"{transport}: needs a path: {shown(text)}")
        return name

    @classmethod
    def _parse_image(cls, transport: str, rest: str, exists: Exists) -> SourceName:
        first: SourceName | None = None
        for path, chosen in _splits(rest):
            name = cls._selected(transport, path, chosen)
            if name is None:
                continue
            if path and "\0" not in path and exists(transport, path):
                return name
            first = first or name
        assert first is not None  # the whole text as a path is always among the splits
        return first

    @classmethod
    def _selected(cls, transport: str, path: str, chosen: str) -> SourceName | None:
        """``chosen`` is what follows the path, separator included; None if it can't be meant as that."""
        if chosen in ("", ":"):
            return cls(transport, path)
        marked = chosen.removeprefix(":")
        if marked.startswith("@"):
            if _INDEX.fullmatch(marked[1:]):
                return cls(transport, path, position=int(marked[1:]))
            try:
                return cls(transport, path, digest=Digest.parse(marked[1:]))
            except ImgtoolError:
                if chosen.startswith("@"):
                    return None
        return cls(transport, path, tag=chosen[1:])

    def __str__(self) -> str:
        if self.reference is not None:
            return f"{self.transport}://{self.reference}"
        text = f"{self.transport}:{printable(self.path)}"
        if self.tag is not None:
            text += f":{printable(self.tag)}"
        elif self.position is not None:
            text += f"@{self.position}"
        elif self.digest is not None:
            text += f"@{self.digest}"
        return text


def _splits(rest: str) -> Iterator[tuple[str, str]]:
    """All ways to end the path, in the order in which they are tried."""
    for at, char in enumerate(rest):
        if char in ":@":
            yield rest[:at], rest[at:]
    yield rest, ""
