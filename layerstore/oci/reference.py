"""Names of images in registries, in Docker's grammar (distribution/reference): ``[HOST[:PORT]/]PATH[:TAG][@DIGEST]``.

The first component is a host only if a ``/`` follows it and it has a ``.``, a ``:`` or brackets, or is ``localhost``.
A name without a host is one on Docker Hub, where a path of one component belongs to ``library/``; ``docker.io/a``
spells that host out and means the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from layerstore.digest import Digest
from layerstore.errors import MalformedError, UnsupportedError, UsageError
from layerstore.oci.document import shown

DEFAULT_HOST = "docker.io"
DEFAULT_TAG = "latest"
NAME_LIMIT = 255
"""Characters of host and path together."""

_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:.]+\])(?::[0-9]{{1,5}})?")
_COMPONENT = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True, slots=True)
class DockerReference:
    """A parsed reference. With a digest the tag is only decoration: the digest decides what is read."""

    host: str
    path: str
    tag: str | None = None
    digest: Digest | None = None

    @classmethod
    def parse(cls, text: str) -> DockerReference:
        """Parse and complete a reference; the tag ``latest`` is added where there is neither tag nor digest.

        Raises:
            UsageError: it breaks the grammar; says where.
            UnsupportedError: a digest of an algorithm that can't be verified.
        """
        rest, at, digest_text = text.partition("@")
        digest = _digest(digest_text, text) if at else None
        first, slash, path = rest.partition("/")
        if slash and (any(mark in first for mark in ".:[") or first == "localhost"):
            host = first
        else:
            host, path = DEFAULT_HOST, rest
        if not _HOST.fullmatch(host):
            raise UsageError(f"not a registry host: {shown(host)} in {shown(text)}")
        path, colon, tag = path.partition(":")
        if colon and not _TAG.fullmatch(tag):
            raise UsageError(f"not a tag: {shown(tag)} in {shown(text)}")
        _check_path(path, text)
        if host in (DEFAULT_HOST, f"index.{DEFAULT_HOST}"):
            host = DEFAULT_HOST
            if "/" not in path:
                path = f"library/{path}"
        if len(host) + 1 + len(path) > NAME_LIMIT:
            raise UsageError(f"an image name has at most {NAME_LIMIT} characters: {shown(text)}")
        return cls(host, path, tag if colon else None if digest else DEFAULT_TAG, digest)

    @property
    def name(self) -> str:
        return f"{self.host}/{self.path}"

    @property
    def identifier(self) -> str:
        """What a registry is asked for: the digest where there is one, else the tag."""
        return str(self.digest) if self.digest else self.tag or DEFAULT_TAG

    def __str__(self) -> str:
        text = self.name
        if self.tag:
            text += f":{self.tag}"
        return f"{text}@{self.digest}" if self.digest else text


def _digest(text: str, whole: str) -> Digest:
    try:
        return Digest.parse(text)
    except MalformedError as error:
        raise UsageError(f"not a digest: {shown(text)} in {shown(whole)}") from error
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}, in {shown(whole)}") from error


def _check_path(path: str, whole: str) -> None:
    if all(_COMPONENT.fullmatch(component) for component in path.split("/")):
        return
    if path != path.lower():
        raise UsageError(f"repository names are lower case: {shown(path)} in {shown(whole)}")
    raise UsageError(f"not a repository name: {shown(path)} in {shown(whole)}")
