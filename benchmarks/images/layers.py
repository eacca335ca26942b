"""What a layer holds: the difference between two trees, written by GNU tar."""

from __future__ import annotations

import filecmp
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.images.layout import Layer, Layout

EPOCH = 1_780_000_000
"""Seconds since 1970; no time in a layer is later. Another value gives every layer another digest."""


@dataclass(frozen=True)
class Difference:
    """Sorted names, relative to the root: what a layer adds or replaces, and what it removes."""

    members: tuple[bytes, ...]
    removed: tuple[bytes, ...] = ()
    opaque: tuple[bytes, ...] = ()
    """Directories whose lower content is hidden as a whole."""


def whole(tree: Path) -> Difference:
    return Difference(tuple(walk(tree)))


def difference(lower: Path, upper: Path, opaque: Iterable[bytes] = ()) -> Difference:
    """What turns ``lower`` into ``upper``; the directories ``opaque`` are stored in full behind an opaque mark.

    The parents of what changed are members too, as in the layers that docker and buildkit write.
    """
    hidden = tuple(sorted(opaque))
    before, after = list(walk(lower)), list(walk(upper))
    known, kept = set(before), set(after)

    def is_hidden(name: bytes) -> bool:
        return any(_within(name, top) for top in hidden)

    members = [
        name
        for name in after
        if is_hidden(name) or name not in known or not _same(_join(lower, name), _join(upper, name))
    ]
    removed: list[bytes] = []
    for name in before:
        if name in kept or is_hidden(name) or (removed and _within(name, removed[-1])):
            continue
        parent = os.path.dirname(name)
        if not parent or (parent in kept and stat.S_ISDIR(os.lstat(_join(upper, parent)).st_mode)):
            removed.append(name)  # else something above it is no directory any more, and that says enough
    touched = {parent for name in (*members, *removed) for parent in _parents(name)}
    return Difference(tuple(sorted({*members, *touched}, key=lambda name: name.split(b"/"))), tuple(removed), hidden)


def add_layer(layout: Layout, tree: Path, content: Difference, created_by: str) -> Layer:
    """Write ``content`` of ``tree`` as one more layer blob; whiteouts come first."""
    with tempfile.TemporaryDirectory(dir=layout.directory) as scratch:
        marks = Path(scratch) / "marks"
        names = [_whiteout(name) for name in content.removed]
        names += [name + b"/.wh..wh..opq" for name in content.opaque]
        for name in names:
            os.makedirs(os.path.dirname(_join(marks, name)), exist_ok=True)
            with open(_join(marks, name), "wb"):
                pass
        command = ["tar", "--create", "--sort=name", "--numeric-owner", "--xattrs", "--xattrs-include=*"]
        command += ["--format=posix", "--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime"]
        command += [f"--mtime=@{EPOCH}", "--clamp-mtime", "--no-recursion", "--null", "--verbatim-files-from"]
        for root, listed in ((marks, names), (tree, list(content.members))):
            if listed:
                list_file = Path(scratch) / f"{root.name}.list"
                list_file.write_bytes(b"".join(name + b"\0" for name in listed))
                command += ["-C", str(root.absolute()), f"--files-from={list_file.absolute()}"]
        return layout.add_layer(command, created_by)


def walk(tree: Path) -> Iterator[bytes]:
    """Every name below ``tree``, directories before what they hold, sorted."""

    def below(directory: bytes, prefix: bytes) -> Iterator[bytes]:
        with os.scandir(directory) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            yield prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from below(entry.path, prefix + entry.name + b"/")

    return below(os.fsencode(tree), b"")


def _join(tree: Path, name: bytes) -> bytes:
    return os.path.join(os.fsencode(tree), name)


def _within(name: bytes, top: bytes) -> bool:
    return name == top or name.startswith(top + b"/")


def _parents(name: bytes) -> Iterator[bytes]:
    while name := os.path.dirname(name):
        yield name


def _whiteout(name: bytes) -> bytes:
    parent, base = os.path.split(name)
    return os.path.join(parent, b".wh." + base)


def _same(lower: bytes, upper: bytes) -> bool:
    old, new = os.lstat(lower), os.lstat(upper)
    if _attributes(old) != _attributes(new) or _xattrs(lower) != _xattrs(upper):
        return False
    if stat.S_ISLNK(new.st_mode):
        return os.readlink(lower) == os.readlink(upper)
    if stat.S_ISREG(new.st_mode) and not os.path.samestat(old, new):
        return filecmp.cmp(lower, upper, shallow=False)
    return True


def _attributes(status: os.stat_result) -> tuple[int, ...]:
    size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return (status.st_mode, status.st_uid, status.st_gid, status.st_rdev, size, min(int(status.st_mtime), EPOCH))


def _xattrs(path: bytes) -> dict[str, bytes]:
    return {name: os.getxattr(path, name, follow_symlinks=False) for name in os.listxattr(path, follow_symlinks=False)}
