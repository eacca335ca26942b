"""What is to be read first: said by ranges of packs for a published layer, by parts of files for one to be made.

Either only decides where bytes lie, never what a file holds: what names nothing is counted and left out.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from layerstore.digest import Digest
from layerstore.pack.chunks import ChunkedFile, ChunkTable, pieces
from layerstore.pack.format import BLOCK_SIZE, FRAME_SIZE
from layerstore.pack.reuse import Candidate
from layerstore.tree.inode import Directory, File, Inode

_FRAME_BLOCKS = FRAME_SIZE // BLOCK_SIZE


class HotRange(NamedTuple):
    """``length`` bytes at ``offset`` of the raw pack that is device ``device`` (from 1) of a published layer.

    ``layer`` is the digest of its metadata image. Whole chunks are taken, so any bytes will do.
    """

    layer: Digest
    device: int
    offset: int
    length: int


class HotFile(NamedTuple):
    """``length`` bytes at ``offset`` of a file.

    ``path`` is raw, has no leading slash, and leads through no link; empty where somebody doesn't know it.
    """

    path: bytes
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class HotChunks:
    """Chunks of a table, in the order in which they are wanted.

    Attributes:
        numbers: each once.
        matched: how many parts of files named some.
        unmatched: how many named none, by reason.
    """

    numbers: array[int]
    matched: int
    unmatched: Mapping[str, int]


def hot_chunks(tree: Directory, table: ChunkTable, parts: Iterable[HotFile]) -> HotChunks:
    """The chunks that hold these parts of files of ``tree``, each where it is wanted first."""
    parts = tuple(parts)
    found = {path: _at(tree, path) for path in {part.path for part in parts}}
    files = {id(inode) for inode in found.values() if isinstance(inode, File)}
    chunked = {id(each.file): each for each in table.files if id(each.file) in files}
    holding: dict[int, array[int]] = {}  # of a file, the numbers of its pieces that hold data
    numbers: dict[int, None] = {}
    unmatched: dict[str, int] = {}
    matched = 0
    for part in parts:
        inode = found[part.path]
        of = chunked.get(id(inode))
        if of is None:
            reason = "no such file" if part.path else "without a path"
            if isinstance(inode, File):
                reason = "in the metadata image"
        else:
            if id(inode) not in holding:
                holding[id(inode)] = array("I", pieces(of.file, of.bits))
            taken = _taken(of, holding[id(inode)], part)
            if taken:
                matched += 1
                numbers.update(dict.fromkeys(taken))
                continue
            reason = "beyond the file's data"
        unmatched[reason] = unmatched.get(reason, 0) + 1
    return HotChunks(array("I", numbers), matched, unmatched)


def _at(tree: Directory, path: bytes) -> Inode | None:
    inode: Inode | None = tree
    for name in path.split(b"/"):
        inode = inode.entries.get(name) if isinstance(inode, Directory) else None
    return inode


def _taken(of: ChunkedFile, holding: array[int], part: HotFile) -> array[int]:
    size = BLOCK_SIZE << of.bits
    first = bisect_left(holding, part.offset // size)
    last = bisect_right(holding, max(0, part.offset + part.length - 1) // size)
    return of.chunks[first:last]


def dense(hot: Sequence[int], blocks: Sequence[int], candidates: Iterable[Candidate]) -> Candidate | None:
    """A pack that has all hot chunks in hardly more frames than they need; of several, that of the lowest digest."""
    needed = -(-sum(blocks[number] for number in hot) // _FRAME_BLOCKS)
    found = [
        candidate
        for candidate in candidates
        if all(number in candidate.found for number in hot)
        and len(frames((candidate.found[number], blocks[number]) for number in hot)) <= needed + 1
    ]
    return min(found, key=lambda candidate: candidate.pack.digest.hex, default=None)


def withhold(hot: Sequence[int], blocks: Sequence[int], candidates: Sequence[Candidate]) -> int:
    """Have hot chunks referred to in no pack but a dense one, so that they are written anew where there is none.

    Returns:
        How many blocks some pack had that are written all the same.
    """
    kept = dense(hot, blocks, candidates)
    copied: set[int] = set()
    for candidate in candidates:
        if candidate is not kept:
            for number in hot:
                if candidate.found.pop(number, None) is not None:
                    copied.add(number)
    return 0 if kept else sum(blocks[number] for number in copied)


def frames(places: Iterable[tuple[int, int]]) -> set[int]:
    """The frames of a pack, as we cut them, that hold these runs of blocks: (first, count) each."""
    return {
        number
        for first, count in places
        for number in range(first // _FRAME_BLOCKS, (first + count - 1) // _FRAME_BLOCKS + 1)
    }
