"""Hard links: the names that share an inode."""

from __future__ import annotations

from layerstore.tree.inode import Directory, Inode, walk

LinkSet = frozenset[bytes]


def link_sets(root: Directory) -> dict[bytes, LinkSet]:
    """For each path whose inode has several names, all of them. One set object per inode."""
    seen: set[int] = set()
    shared: dict[int, list[bytes]] = {}
    stack: list[Directory] = [root]
    while stack:
        for inode in stack.pop().entries.values():
            if isinstance(inode, Directory):
                stack.append(inode)
            elif id(inode) in seen:
                shared[id(inode)] = []
            else:
                seen.add(id(inode))
    if not shared:
        return {}
    del seen
    for path, inode in walk(root):
        if id(inode) in shared:
            shared[id(inode)].append(path)
    sets: dict[bytes, LinkSet] = {}
    for paths in shared.values():
        names = frozenset(paths)
        sets.update(dict.fromkeys(paths, names))
    return sets


def changed_links(lower: Directory, upper: Directory) -> set[int]:
    """The ids of the inodes of ``upper`` whose names are not those that share an inode in ``lower``."""
    before, after = link_sets(lower), link_sets(upper)
    changed: set[int] = set()
    if not before and not after:
        return changed
    for path, inode in walk(upper):
        if not isinstance(inode, Directory) and before.get(path) != after.get(path):
            changed.add(id(inode))
    return changed


def restore_names(delta: Directory, upper: Directory, ids: set[int]) -> None:
    """Give ``delta`` every name that these inodes have in ``upper``, the whole tree that it makes of its lower.

    A name that is missing in the delta means that lower's own is meant to show through; but then the inode would be
    two, one in each layer.
    """
    if not ids:
        return
    stack: list[tuple[Directory, tuple[bytes, ...]]] = [(upper, ())]
    while stack:
        directory, parts = stack.pop()
        for name, inode in directory.entries.items():
            if isinstance(inode, Directory):
                stack.append((inode, (*parts, name)))
            elif id(inode) in ids:
                _insert(delta, upper, parts, name, inode)


def _insert(delta: Directory, upper: Directory, parts: tuple[bytes, ...], name: bytes, inode: Inode) -> None:
    for part in parts:
        source = upper.entries[part]
        assert isinstance(source, Directory)
        child = delta.entries.get(part)
        if child is None:
            child = delta.entries[part] = Directory(source.attrs)
        assert isinstance(child, Directory)
        delta, upper = child, source
    delta.entries.setdefault(name, inode)
