"""The way to an entry, as a chain of names.

A path of each entry costs quadratic time in a tree as deep as a hostile image can make it; a link to the parent's
trail costs nothing, and only a message needs the whole.
"""

from __future__ import annotations

from typing import NamedTuple

from layerstore.errors import printable

_SHOWN = 32
"""Names at either end of a path that a message shows."""


class Trail(NamedTuple):
    """``name`` in the directory ``parent``; the root is None."""

    parent: Trail | None
    name: bytes


def show(trail: Trail | None) -> str:
    """The path for a message, from the root; the middle of a very deep one is left out."""
    names: list[bytes] = []
    while trail is not None:
        names.append(trail.name)
        trail = trail.parent
    names.reverse()
    if len(names) > 2 * _SHOWN:
        names[_SHOWN:-_SHOWN] = [b"..."]
    return printable(b"/" + b"/".join(names))
