"""Which references: by globs over the names that a store lists."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from layerstore.attachment import attached_layer
from layerstore.errors import NotFoundError, UnavailableError, UnsupportedError, printable
from layerstore.store.names import check_name
from layerstore.store.protocol import Store

_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Selection:
    """References of a store.

    Attributes:
        names: sorted.
        listed: all names that the store has; None where it can't be listed.
    """

    names: tuple[str, ...]
    listed: frozenset[str] | None


def select(store: Store, patterns: Sequence[str] = (), excluded: Sequence[str] = ()) -> Selection:
    """The references that match one of ``patterns`` (all, if there is none) and none of ``excluded``.

    Globs are of the shell, but ``*`` matches slashes too. What belongs to layers, as plans do, is not selected: it goes
    with its images. From a store that can't be listed, or not now, images are selected by their names alone.

    Raises:
        NotFoundError: a pattern matches nothing.
        UnsupportedError, UnavailableError: the store can't be listed, and a pattern is no name.
        UsageError: a pattern is neither a glob nor a name.
    """
    for pattern in patterns:
        if not _GLOB.search(pattern):
            check_name(pattern)
    try:
        listed = list(store.names())
    except (UnsupportedError, UnavailableError):
        if not patterns or any(map(_GLOB.search, patterns)):
            raise
        return Selection(filtered(dict.fromkeys(sorted(patterns)), (), excluded), None)
    images = [name for name in listed if attached_layer(name) is None]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in images):
            raise NotFoundError(f"no image in {store.location} is named {printable(pattern)!r}: see imgtool ls")
    return Selection(filtered(images, patterns, excluded), frozenset(listed))


def filtered(names: Iterable[str], patterns: Sequence[str], excluded: Sequence[str]) -> tuple[str, ...]:
    """Those of the names that match one of ``patterns``, if there is any, and none of ``excluded``; in their order."""
    return tuple(name for name in names if (not patterns or _matches(name, patterns)) and not _matches(name, excluded))


def listed_names(store: Store) -> frozenset[str] | None:
    """All names of a store; None if it can't be listed."""
    try:
        return frozenset(store.names())
    except (UnsupportedError, UnavailableError):
        return None


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
