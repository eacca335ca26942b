"""What overlayfs shows for a stack of trees, without mounting it. Trees are given bottom first.

The kernel's rules (fs/overlayfs/namei.c ovl_lookup, readdir.c; each tried on 6.18): at a name, the topmost tree that
has one decides; a directory merges with those below it down to the first that is opaque, or to the first tree that
has something else there. Attributes are the topmost directory's. The root always merges: an opaque root hides
nothing. Whiteouts are left out of a listing only where at least two directories merge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

from layerstore.tree.difference import type_of
from layerstore.tree.inode import Directory, Inode, Whiteout

Provider = tuple[int, Directory]
"""A directory and the index of the tree that it is from."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """A path that more than one tree has something to say about.

    ``layers`` are the indexes of the trees that provide it, lowest first; ``winner`` is the one whose word counts.
    Kinds:

    * file-over-file: the same type of non-directory in each; the winner's shows.
    * type-change: their types differ; the winner's shows.
    * whiteout-hides: the winner has a whiteout; nothing shows.
    * opaque-hides: directories, of which the winner's hides what those below it hold.
    """

    path: bytes
    layers: tuple[int, ...]
    winner: int
    kind: Literal["file-over-file", "type-change", "whiteout-hides", "opaque-hides"]


@dataclass(slots=True)
class _Merged:
    """A directory of the union: what it is made of, topmost first, and what it shows."""

    providers: list[Provider]
    result: Directory
    parent: _Merged | None
    name: bytes
    same: bool = True


def merge_overlay(layers: Sequence[Directory]) -> Directory:
    """The whole tree that the stack shows. It shares inodes with the layers, and directories where nothing differs.

    What can't be read in a layer raises here whatever its reader raises; it never counts as absent.
    """
    top = _open(_roots(layers), None, b"")
    order: list[_Merged] = []
    stack = [top]
    while stack:
        merged = stack.pop()
        order.append(merged)
        for name, entries in _entries(merged.providers):
            shown = entries[0][1]
            if isinstance(shown, Directory):
                child = _open(_merging(entries), merged, name)
                merged.result.entries[name] = child.result
                stack.append(child)
            elif not isinstance(shown, Whiteout):
                type_of(shown)
                merged.result.entries[name] = shown
            else:
                merged.same = False
    for merged in reversed(order):
        parent, original = merged.parent, merged.providers[0][1]
        if parent is None:
            continue
        if merged.same and len(merged.providers) == 1 and not original.opaque:
            parent.result.entries[merged.name] = original
        else:
            parent.same = False
    return top.result


def conflicts(layers: Sequence[Directory]) -> Iterator[Conflict]:
    """Every path that several trees provide or take away, parents first, names in byte order.

    Directories that merge are none, and neither is what lies inside something hidden: its hidden parent stands for it.
    """
    for path, entries, _ in _walk(layers, least=2):
        yield from _conflict(path, entries)


def listed_whiteouts(layers: Sequence[Directory]) -> Iterator[tuple[bytes, int]]:
    """Whiteouts, with the index of their tree, that a listing of the mounted stack would show as broken devices.

    They are those in a directory that merges with no other, because no other tree has it, or only hidden.
    """
    for path, entries, merging in _walk(layers, least=1):
        layer, shown = entries[0]
        if isinstance(shown, Whiteout) and merging == 1:
            yield path, layer


def _walk(layers: Sequence[Directory], *, least: int) -> Iterator[tuple[bytes, list[tuple[int, Inode]], int]]:
    """Every name of the directories that show and merge at least so many, in walk order.

    Yields its path, what the trees have there, topmost first, and the number of directories that were looked in.
    """
    stack: list[tuple[bytes, list[tuple[int, Inode]], int]] = []

    def push(prefix: bytes, providers: list[Provider]) -> None:
        if len(providers) < least:
            return
        for name, entries in sorted(_entries(providers), key=itemgetter(0), reverse=True):
            stack.append((prefix + name, entries, len(providers)))

    push(b"", _roots(layers))
    while stack:
        path, entries, merging = stack.pop()
        yield path, entries, merging
        push(path + b"/", _merging(entries))


def _conflict(path: bytes, entries: list[tuple[int, Inode]]) -> Iterator[Conflict]:
    """At most one: about the topmost directories that merge, or about what is not a directory."""
    winner, top = entries[0]
    provided = [(layer, inode) for layer, inode in entries if not isinstance(inode, Whiteout)]
    layers = tuple(layer for layer, _ in reversed(provided))
    if isinstance(top, Whiteout):
        if provided:
            yield Conflict(path, layers, winner, "whiteout-hides")
    elif len({_type(inode) for _, inode in provided}) > 1:
        yield Conflict(path, layers, winner, "type-change")
    elif not isinstance(top, Directory):
        if len(provided) > 1:
            yield Conflict(path, layers, winner, "file-over-file")
    else:
        last = len(_merging(entries)) - 1
        hider = entries[last]
        if isinstance(hider[1], Directory) and hider[1].opaque and any(layer < hider[0] for layer in layers):
            yield Conflict(path, layers, hider[0], "opaque-hides")


def _type(inode: Inode) -> tuple[type[Inode], int]:
    return type_of(inode), inode.kind


def _roots(layers: Sequence[Directory]) -> list[Provider]:
    assert layers, "a stack has at least one tree"
    return [(index, layers[index]) for index in reversed(range(len(layers)))]


def _open(providers: list[Provider], parent: _Merged | None, name: bytes) -> _Merged:
    return _Merged(providers, Directory(providers[0][1].attrs), parent, name)


def _entries(providers: list[Provider]) -> Iterator[tuple[bytes, list[tuple[int, Inode]]]]:
    """Each name in any of these directories, with what they have under it, topmost first."""
    if len(providers) == 1:
        layer, directory = providers[0]
        for name, inode in directory.entries.items():
            yield name, [(layer, inode)]
        return
    names: dict[bytes, list[tuple[int, Inode]]] = {}
    for layer, directory in providers:
        for name, inode in directory.entries.items():
            names.setdefault(name, []).append((layer, inode))
    yield from names.items()


def _merging(entries: list[tuple[int, Inode]]) -> list[Provider]:
    """The directories, topmost first, whose content shows under one name; none if the topmost is no directory."""
    merging: list[Provider] = []
    for layer, inode in entries:
        if not isinstance(inode, Directory):
            break
        merging.append((layer, inode))
        if inode.opaque:
            break
    return merging
