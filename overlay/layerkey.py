"""Names of layer mounts: ``<hex>`` or ``<hex>.<variant>``.

``<hex>`` is the sha256 of the metadata image, in lower case. A *variant* says how its packs are reached where that is
not by the cache's own files: ``direct``, or ``fuse`` with a generation behind it. It is words of ``a-z0-9``, joined
by single dots and hyphens, at most 64 characters: a key is a file name, never a path and never hidden. One layer may
be mounted in several variants at once; they hold the same bytes.

A mount whose reads are recorded has one more word at the end of its variant: ``rec-`` or ``via-`` with twelve hex
digits of its sandbox, whose own it is. How its data are reached, who answers for what is missing, and which guards
watch it is told by the *plain* variant, without that word: ``fuse17.rec-0123456789ab`` is over what ``fuse17`` is over.
Behind ``via-`` reads go through a server of the recording, so that the mount needs this one, too.
"""

from __future__ import annotations

import re

_HEX = r"[0-9a-f]{64}"
_VARIANT = r"(?=.{1,64}\Z)[a-z0-9]+(?:[.-][a-z0-9]+)*"
_DIGEST = re.compile(_HEX)
_KEY = re.compile(rf"({_HEX})(?:\.({_VARIANT}))?")
_VARIANT_ALONE = re.compile(_VARIANT)
_RECORDED = re.compile(r"(?:\.|\A)(rec|via)-[0-9a-f]{12}\Z")


def is_digest(text: str) -> bool:
    """Whether it is the hex of a sha256."""
    return _DIGEST.fullmatch(text) is not None


def is_variant(text: str) -> bool:
    """Whether it may stand behind the digest; the empty one, local files, may too."""
    return not text or _VARIANT_ALONE.fullmatch(text) is not None


def is_key(text: str) -> bool:
    return _KEY.fullmatch(text) is not None


def join_key(digest: str, variant: str) -> str:
    return f"{digest}.{variant}" if variant else digest


def split_key(key: str) -> tuple[str, str] | None:
    """Digest and variant; None if it is no key."""
    found = _KEY.fullmatch(key)
    return (found[1], found[2] or "") if found else None


def known_key(key: str) -> tuple[str, str]:
    """Digest and variant of what is a key, as every state that was read has been checked to have."""
    found = split_key(key)
    assert found is not None, key
    return found


def recorded_variant(plain: str, word: str) -> str:
    """The variant of mounts whose reads are recorded; ``word`` is the recording's, and of one sandbox alone."""
    return f"{plain}.{word}" if plain else word


def plain_variant(variant: str) -> str:
    """How the data behind a mount are reached, whether or not its reads are recorded."""
    return _RECORDED.sub("", variant)


def plain_key(key: str) -> str:
    """The key that the same layer has where nobody records its reads."""
    digest, variant = known_key(key)
    return join_key(digest, plain_variant(variant))


def is_recorded(key: str) -> bool:
    """Whether reads of this mount are recorded, or were: it has one user, and nobody else may come to it."""
    return _RECORDED.search(known_key(key)[1]) is not None


def recorder_in_path(key: str) -> bool:
    """Whether this mount is read through the server of its recording."""
    found = _RECORDED.search(known_key(key)[1])
    return found is not None and found[1] == "via"
