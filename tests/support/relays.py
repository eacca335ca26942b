"""Images laid out anew: which ranges their files have, what packs hold, and whether two images are one to look at.

::

    hot(site.store, layer, b"lib/a", (b"lib/b", 0, 4096))   # HotRanges of these files, in this order
    pack_bytes(site.store, pack)                            # a pack, raw
    same(site, "before", "after")                           # fails unless the trees are equal in all that is visible
"""

from __future__ import annotations

from collections.abc import Iterator

from layerstore.content import same_content
from layerstore.erofs.layout import HOLE, Chunked
from layerstore.hot import HotRange
from layerstore.image import Layer, load_image
from layerstore.opened import open_layer, open_tree
from layerstore.pack.format import BLOCK_SIZE
from layerstore.pack.reader import PackReader
from layerstore.pack.stored import StoredPack
from layerstore.store.protocol import Store
from layerstore.tree.difference import difference
from layerstore.tree.inode import File
from support.conversions import Site
from support.trees import at

Part = bytes | tuple[bytes, int, int]
"""A file, or some bytes of it by offset and length."""


def hot(store: Store, layer: Layer, *parts: Part) -> list[HotRange]:
    """The ranges of packs that hold these parts, chunk by chunk."""
    with open_layer(store, layer) as opened:
        tree = opened.tree()
        return [each for part in parts for each in _ranges(layer, at(tree, _path(part)), part)]


def _path(part: Part) -> bytes:
    return part if isinstance(part, bytes) else part[0]


def _ranges(layer: Layer, file: object, part: Part) -> Iterator[HotRange]:
    assert isinstance(file, File) and isinstance(file.chunks, Chunked), f"{part!r} has no chunks"
    first, length = (0, file.size) if isinstance(part, bytes) else part[1:]
    step = BLOCK_SIZE << file.chunks.bits
    for number, where in enumerate(file.chunks.addresses):
        start, end = number * step, min((number + 1) * step, file.size)
        if where != HOLE and start < first + length and end > first:
            size = -(-(end - start) // BLOCK_SIZE) * BLOCK_SIZE
            yield HotRange(layer.metadata, where >> 32, (where & 0xFFFF_FFFF) * BLOCK_SIZE, size)


def pack_bytes(store: Store, pack: StoredPack) -> bytes:
    with store.open(pack.blob) as blob:
        return PackReader(pack, blob).read_at(0, pack.raw_size)


def padded(data: bytes) -> bytes:
    """As a pack has it."""
    return data + bytes(-len(data) % BLOCK_SIZE)


def same(site: Site, before: str, after: str) -> None:
    """All that is visible of two images is equal: by the rows of their trees, and as ``imgtool diff`` compares."""
    assert site.rows(before) == site.rows(after)
    one, other = load_image(site.store, before), load_image(site.store, after)
    with open_tree(site.store, one) as old, open_tree(site.store, other) as new:
        assert list(difference(old, new, same_content)) == []
