"""Symlinks followed inside a tree: the image root is ``/``, and ``..`` there is the root again."""

from __future__ import annotations

from collections.abc import Sequence

from layerstore.errors import MalformedError, NotFoundError, printable
from layerstore.tree.inode import Directory, Inode, Symlink
from layerstore.tree.path import clean, shortened, steps

MAX_SYMLINKS = 40
"""Symlinks followed for one path before it counts as a loop (MAXSYMLINKS, linux/namei.h)."""

Trail = list[tuple[bytes, Inode | None]]
"""The components of a path without symlinks, each with what is there: None from the first that is missing."""


def trace(root: Directory, parts: Sequence[bytes]) -> Trail:
    """Where ``parts`` leads once every symlink on the way, the last component included, is followed.

    Below something missing, or something that is neither directory nor symlink, components stand for themselves.

    Raises:
        MalformedError: more than 40 symlinks.
    """
    trail: Trail = []
    pending = list(reversed(parts))
    links = 0
    while pending:
        part = pending.pop()
        if part == b"..":
            del trail[-1:]
            continue
        here = trail[-1][1] if trail else root
        found = here.entries.get(part) if isinstance(here, Directory) else None
        if not isinstance(found, Symlink):
            trail.append((part, found))
            continue
        links += 1
        if links > MAX_SYMLINKS:
            raise MalformedError(
                f"{shortened(b'/'.join(parts))}: more than {MAX_SYMLINKS} symlinks on the way, probably a loop"
            )
        if found.target.startswith(b"/"):
            trail.clear()
        pending.extend(reversed(steps(found.target)))
    return trail


def find(root: Directory, parts: Sequence[bytes]) -> Inode | None:
    """What is at ``parts``, symlinks followed but for the last component; None if nothing is.

    Raises:
        MalformedError: more than 40 symlinks.
    """
    if not parts:
        return root
    trail = trace(root, parts[:-1])
    here = trail[-1][1] if trail else root
    return here.entries.get(parts[-1]) if isinstance(here, Directory) else None


def lookup(root: Directory, path: bytes, *, follow: bool = True) -> Inode:
    """What ``path`` names for a process whose root directory is ``root``.

    Raises:
        NotFoundError: nothing, or the target of a symlink is missing.
        MalformedError: more than 40 symlinks.
    """
    parts = clean(path)
    if follow:
        trail = trace(root, parts)
        inode = trail[-1][1] if trail else root
    else:
        inode = find(root, parts)
    if inode is None:
        raise NotFoundError(f"{printable(path)}: not in the tree")
    return inode
