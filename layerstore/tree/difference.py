"""Two whole trees compared: what differs, and the overlay layer that makes one of the other."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from layerstore.tree.inode import Attrs, Directory, File, Inode, Special, Symlink, Whiteout
from layerstore.tree.links import changed_links, link_sets

SameContent = Callable[[File, File], bool]
"""Whether two files of equal size have equal bytes; called for no others."""

WHITEOUT = Whiteout(Attrs(stat.S_IFCHR, 0, 0, 0, 0))
"""The whiteout that deltas use under all names: one inode in an image, as overlayfs itself links its whiteouts."""


@dataclass(frozen=True, slots=True)
class Change:
    """A path that is in one tree only, or differs.

    ``what`` is empty unless changed; then it is one or more of type, mode, owner, mtime, xattrs, size, content,
    target, device, links. After "type" nothing else is compared.
    """

    path: bytes
    kind: Literal["added", "removed", "changed"]
    what: tuple[str, ...] = ()


def difference(old: Directory, new: Directory, same_content: SameContent) -> Iterator[Change]:
    """All changes, in the order of :func:`layerstore.tree.inode.walk`; every entry of an added or removed directory."""
    old_links, new_links = link_sets(old), link_sets(new)
    contents: dict[tuple[int, int], bool] = {}

    def compare(path: bytes, before: Inode, after: Inode) -> tuple[str, ...]:
        def same(one: File, two: File) -> bool:
            if path not in old_links and path not in new_links:
                return same_content(one, two)
            key = id(one), id(two)
            if key not in contents:
                contents[key] = same_content(one, two)
            return contents[key]

        what = differing(before, after, same)
        if old_links.get(path) != new_links.get(path) and "type" not in what:
            what += ("links",)
        return what

    stack: list[tuple[bytes, Inode | None, Inode | None]] = [(b"", old, new)]
    while stack:
        path, before, after = stack.pop()
        if before is None:
            yield Change(path, "added")
        elif after is None:
            yield Change(path, "removed")
        elif what := compare(path, before, after):
            yield Change(path, "changed", what)
        olds = before.entries if isinstance(before, Directory) else {}
        news = after.entries if isinstance(after, Directory) else {}
        prefix = path + b"/" if path else b""
        for name in sorted(olds.keys() | news.keys(), reverse=True):
            stack.append((prefix + name, olds.get(name), news.get(name)))


def differing(old: Inode, new: Inode, same_content: SameContent) -> tuple[str, ...]:
    """What differs between two inodes, entries and link sets aside."""
    if old is new:
        return ()
    if old.kind != new.kind or type_of(old) is not type_of(new):
        return ("type",)
    a, b = old.attrs, new.attrs
    found = {
        "mode": a.mode != b.mode,
        "owner": (a.uid, a.gid) != (b.uid, b.gid),
        "mtime": (a.mtime, a.nsec) != (b.mtime, b.nsec),
        "xattrs": a.xattrs != b.xattrs,
    }
    if isinstance(old, File) and isinstance(new, File):
        found["size"] = old.size != new.size
        found["content"] = not found["size"] and not same_content(old, new)
    elif isinstance(old, Symlink) and isinstance(new, Symlink):
        found["target"] = old.target != new.target
    elif isinstance(old, Special) and isinstance(new, Special):
        found["device"] = (old.major, old.minor) != (new.major, new.minor)
    return tuple(name for name, differs in found.items() if differs)


def type_of(inode: Inode) -> type[Inode]:
    """The class of inode.py that this one is of."""
    for kind in (Directory, File, Symlink, Special, Whiteout):
        if isinstance(inode, kind):
            return kind
    raise TypeError(f"not an inode of a tree: {inode!r}")


def delta(lower: Directory, upper: Directory, same_content: SameContent) -> Directory:
    """The overlay layer over ``lower`` that shows exactly ``upper``, link sets included.

    An inode whose set of names differs comes whole, under all of them. A directory of which nothing remains is
    opaque, instead of a whiteout for each name.
    """
    relinked = changed_links(lower, upper)

    def unchanged(old: Inode, new: Inode) -> bool:
        return id(new) not in relinked and not differing(old, new, same_content)

    return overlay_delta(lower, upper, unchanged=unchanged, replaced=lambda old, new: False, fold=True)


@dataclass(slots=True)
class _Pair:
    """A directory of both trees and what the delta holds for it; ``parent`` is None for the root."""

    old: Directory
    new: Directory
    result: Directory
    parent: _Pair | None
    name: bytes
    kept: bool = False


def overlay_delta(
    lower: Directory,
    upper: Directory,
    *,
    unchanged: Callable[[Inode, Inode], bool],
    replaced: Callable[[Directory, Directory], bool],
    fold: bool = False,
    lost: set[int] | None = None,
) -> Directory:
    """The layer to put over ``lower`` so that the names and inodes of ``upper`` show.

    The root is never opaque: the kernel merges the roots of all layers whatever their xattrs say (tried on 6.18), so
    there names are hidden one by one.

    Args:
        lower: a whole tree.
        upper: a whole tree. The result shares its inodes, and its directories where nothing of lower shows.
        unchanged: whether lower's non-directory may show for upper's.
        replaced: whether upper's directory hides all of lower's.
        fold: make a directory opaque when no name of lower's remains and some have to be hidden.
        lost: is given the ids of lower's non-directories that lose a name.
    """
    top = _Pair(lower, upper, Directory(upper.attrs), None, b"")
    pairs: list[_Pair] = []
    stack = [top]
    while stack:
        pair = stack.pop()
        pairs.append(pair)
        stack.extend(_compare(pair, unchanged, replaced, lost))
    for pair in reversed(pairs):
        result, parent = pair.result, pair.parent
        if parent is None:
            continue
        if fold and not pair.kept and any(isinstance(inode, Whiteout) for inode in result.entries.values()):
            result.entries = pair.new.entries.copy()
            result.opaque = True
            continue
        parent.kept = True
        if not result.entries and result.attrs == pair.old.attrs:
            del parent.result.entries[pair.name]
    return top.result


def _compare(
    pair: _Pair,
    unchanged: Callable[[Inode, Inode], bool],
    replaced: Callable[[Directory, Directory], bool],
    lost: set[int] | None,
) -> Iterator[_Pair]:
    """Fill in one directory of the delta; yields the subdirectories of both trees that merge."""
    old_entries, result = pair.old.entries, pair.result.entries
    for name, new in pair.new.entries.items():
        old = old_entries.get(name)
        if isinstance(new, Directory) and isinstance(old, Directory):
            if new is old:
                pair.kept = True
            elif replaced(old, new):
                shadow = result[name] = Directory(new.attrs)
                shadow.entries = new.entries.copy()
                shadow.opaque = True
                _lose(old, lost)
            else:
                merged = result[name] = Directory(new.attrs)
                yield _Pair(old, new, merged, pair, name)
        elif old is None or isinstance(old, Directory) or isinstance(new, Directory) or not unchanged(old, new):
            result[name] = new
            if old is not None:
                _lose(old, lost)
        else:
            pair.kept = True
    for name, old in old_entries.items():
        if name not in pair.new.entries:
            result[name] = WHITEOUT
            _lose(old, lost)


def _lose(old: Inode, lost: set[int] | None) -> None:
    if lost is None:
        return
    stack = [old]
    while stack:
        inode = stack.pop()
        if isinstance(inode, Directory):
            stack.extend(inode.entries.values())
        else:
            lost.add(id(inode))
