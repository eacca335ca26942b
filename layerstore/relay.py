"""Layers laid out anew: what is read first lies together in a pack of its own, in the order in which it is wanted.

::

    published image ─▶ hot chunks (selected by pack ranges) ─▶ one new pack a layer
                           │                                        │
                           └─▶ the same trees, their files' ────────┴─▶ metadata images ─▶ config ─▶ manifest ─▶ name
                               chunks at new addresses

Cold chunks are referred to where they lie; packs that nothing refers to any more drop out of a layer's device table,
so that its other packs get other numbers. A layer of which nothing is hot stays the very layer that it was.

Nothing but addresses changes: names, attributes, links and contents are those of the image that was read. The result
depends on that image, the ranges and the zstd level, and is the image itself where it is laid out like that already.
"""

from __future__ import annotations

import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import IO, NamedTuple

from layerstore.digest import Digest
from layerstore.erofs.layout import HOLE, Chunked, address
from layerstore.errors import os_errors
from layerstore.hot import HotRange
from layerstore.image import Image, Layer, find_target, load_image, read_document
from layerstore.metadata import publish_metadata
from layerstore.oci.config import ImageConfig
from layerstore.opened import OpenLayer, open_layer
from layerstore.pack.chunks import MAX_CHUNK_SIZE, chunk_key
from layerstore.pack.format import BLOCK_SIZE
from layerstore.pack.reader import FrameIndex
from layerstore.pack.stored import StoredPack
from layerstore.pack.writer import DEFAULT_LEVEL, PackWriter
from layerstore.progress import SILENT, Progress
from layerstore.publish import Publisher, current
from layerstore.rawpacks import RawState, require_local, store_raw
from layerstore.store.protocol import Store, WriteStore
from layerstore.tree.inode import Directory, File, walk

_BLOCK = 0xFFFF_FFFF
"""The block of an address; above it is the device."""


class Moved(NamedTuple):
    """A hot chunk: ``blocks`` blocks at ``old``, now at ``new``. Both are addresses on the layer's devices."""

    old: int
    blocks: int
    new: int


@dataclass(frozen=True, slots=True)
class MovedLayer:
    """How pack ranges of a layer translate.

    Attributes:
        before, after: the layer; one and the same where nothing of it was hot.
        devices: of each old device the number that it has now, 0 where it dropped out.
        chunks: what has moved, by old address.
    """

    before: Layer
    after: Layer
    devices: tuple[int, ...]
    chunks: tuple[Moved, ...] = ()

    def at(self, device: int, offset: int, length: int) -> Iterator[tuple[int, int, int, int]]:
        """Where whole blocks of an old device are now, in their order.

        Blocks that no file refers to, on a device that dropped out, are nowhere, and left out.

        Yields:
            Device, offset and length in bytes, and how far into the old range that is.
        """
        start, end = address(device, offset // BLOCK_SIZE), address(device, (offset + length) // BLOCK_SIZE)
        stays = self.devices[device - 1] if 1 <= device <= len(self.devices) else 0
        number = bisect_right(self.chunks, start, key=lambda moved: moved.old) - 1
        block = start
        while block < end:
            following = self.chunks[number + 1].old if number + 1 < len(self.chunks) else end
            if number >= 0 and block < self.chunks[number].old + self.chunks[number].blocks:
                old, blocks, new = self.chunks[number]
                stop = min(end, old + blocks)
                yield *_bytes(new + block - old, stop - block), (block - start) * BLOCK_SIZE
            else:
                stop = min(end, following)
                if stays:
                    yield *_bytes(address(stays, block & _BLOCK), stop - block), (block - start) * BLOCK_SIZE
            block = stop
            while number + 1 < len(self.chunks) and self.chunks[number + 1].old <= block:
                number += 1


def _bytes(where: int, blocks: int) -> tuple[int, int, int]:
    return where >> 32, (where & _BLOCK) * BLOCK_SIZE, blocks * BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Touched:
    """What has to be fetched to have all hot chunks.

    Attributes:
        frames: that hold some.
        reads: runs of neighbouring frames, each of which one request can ask for.
        size: bytes of these frames, compressed.
    """

    frames: int = 0
    reads: int = 0
    size: int = 0

    def __add__(self, other: Touched) -> Touched:
        return Touched(self.frames + other.frames, self.reads + other.reads, self.size + other.size)


@dataclass(frozen=True, slots=True)
class RelayReport:
    """What it came to. Sizes are bytes.

    Attributes:
        manifest: digest of the published manifest.
        image: the image.
        layers: how its pack ranges translate, bottom first.
        matched: ranges that some file has data in.
        unmatched: the others, by reason.
        chunks, hot_size: the distinct chunks of the former, and their raw bytes.
        copied_size: the part of those that the image's other packs go on having, since they hold cold data as well.
        before, after: what a start had to fetch, and has to now.
        stored_size: what the store grew by.
    """

    manifest: Digest
    image: Image
    layers: tuple[MovedLayer, ...]
    matched: int
    unmatched: Mapping[str, int]
    chunks: int
    hot_size: int
    copied_size: int
    before: Touched
    after: Touched
    stored_size: int


def relay(
    store: WriteStore,
    name: str,
    hot: Sequence[HotRange],
    *,
    tag: str | None = None,
    level: int = DEFAULT_LEVEL,
    jobs: int = 2,
    raw: bool = False,
    progress: Progress = SILENT,
) -> RelayReport:
    """Publish the image ``name`` with the chunks of ``hot`` first and together; with ``tag``, under that name.

    Ranges that no file of their layer has data in are counted, and change nothing. With ``raw``, all packs of the
    result are stored raw as well.

    Raises:
        NotFoundError: no such image.
        CorruptError: a metadata image or a frame isn't what its digest says. Frames without hot chunks aren't read.
        ConflictError: ``tag`` was moved by somebody else meanwhile.
        UnsupportedError: ``raw`` and a store whose blobs are no files.
        NoSpaceError: the store is full; nothing was published.
    """
    if raw:
        require_local(store)
    before = None if tag is None else current(store, tag)
    with ExitStack() as stack:
        publisher = Publisher(store, stack.enter_context(store.lease()))
        target = find_target(store, name)
        publisher.lease.pin([target.digest])
        image = load_image(store, str(target.digest))
        publisher.lease.pin(image.blobs)
        scratch = stack.enter_context(store.scratch())
        pool = stack.enter_context(ThreadPoolExecutor(jobs, thread_name_prefix="relay"))
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        work = _Work(publisher, scratch, pool, jobs, level, progress)
        moved = tuple(work.layer(layer, wanted) for layer, wanted in _by_layer(image, hot, work.tally))
        layers = _restacked(moved)
        if layers != image.layers:
            diff_ids = [digest for layer in layers for digest in layer.raw_digests]
            data = read_document(store, image.config, f"config of {name!r}")
            config = publisher.config(ImageConfig.parse(data, f"config of {name!r}"), diff_ids)
            image = Image(layers, config, image.annotations)
            target = image.descriptor()
        packs = {pack.digest: pack for layer in layers for pack in layer.packs}
        stored = store_raw(store, packs.values(), publisher.lease, progress=progress) if raw else ()
        if image.descriptor().digest == target.digest:
            publisher.image(image, tag=tag, expected=before)
        elif tag is not None:  # a manifest with more in it than we write, which hasn't changed
            publisher.reference(tag, target, image, expected=before)
    tally = work.tally
    return RelayReport(
        target.digest,
        image,
        tuple(replace(each, after=after) for each, after in zip(moved, layers, strict=True)),
        tally.matched,
        tally.unmatched,
        tally.chunks,
        tally.hot_size,
        tally.copied_size,
        tally.before,
        tally.after,
        publisher.grown + sum(pack.size for pack in stored if pack.state is RawState.STORED),
    )


@dataclass(slots=True)
class _Tally:
    """The figures of a report, as they come in."""

    matched: int = 0
    unmatched: dict[str, int] = field(default_factory=dict)
    chunks: int = 0
    hot_size: int = 0
    copied_size: int = 0
    before: Touched = Touched()
    after: Touched = Touched()

    def miss(self, reason: str) -> None:
        self.unmatched[reason] = self.unmatched.get(reason, 0) + 1


def _by_layer(image: Image, hot: Iterable[HotRange], tally: _Tally) -> list[tuple[Layer, list[HotRange]]]:
    wanted: dict[Digest, list[HotRange]] = {layer.metadata: [] for layer in image.layers}
    for each in hot:
        if each.layer in wanted:
            wanted[each.layer].append(each)
        else:
            tally.miss("of another layer")
    return [(layer, wanted[layer.metadata]) for layer in image.layers]


def _restacked(moved: Sequence[MovedLayer]) -> tuple[Layer, ...]:
    """The new layers; one that was made over a base of this image says that base's new identity."""
    now = {each.before.metadata: each.after.metadata for each in moved}
    return tuple(
        replace(each.after, base=now.get(each.after.base, each.after.base)) if each.after.base else each.after
        for each in moved
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """The steps of one layer, and what all of them need."""

    publisher: Publisher
    scratch: str
    pool: ThreadPoolExecutor
    jobs: int
    level: int
    progress: Progress
    tally: _Tally = field(default_factory=_Tally)

    def layer(self, layer: Layer, hot: Sequence[HotRange]) -> MovedLayer:
        """Lay out one layer; its new metadata image and pack are in the store afterwards."""
        same = MovedLayer(layer, layer, tuple(range(1, len(layer.packs) + 1)))
        if not hot:
            return same
        store, tally = self.publisher.store, self.tally
        with open_layer(store, layer, scratch=self.scratch) as opened:
            tree = opened.tree()
            files = _chunked(tree)
            chosen = _select(layer, _pieces(files), hot, tally)
            if not chosen:
                return same
            pack, blocks = self._write(opened, chosen)
            tally.chunks += len(chosen)
            tally.hot_size += sum(chosen.values()) * BLOCK_SIZE
            tally.before += _touched(store, layer.packs, chosen.items())
            # Where the hot chunks are all that some pack has, in its order, that pack is as good as a new one.
            packs, devices, own = _devices(layer.packs, pack, _used(files, chosen.keys()))
            new = {old: address(own, block) for old, block in blocks.items()}
            tally.after += _touched(store, packs, ((new[old], count) for old, count in chosen.items()))
            kept = (count for old, count in chosen.items() if devices[(old >> 32) - 1] not in (0, own))
            tally.copied_size += sum(kept) * BLOCK_SIZE
            if not _assign(files, new, devices) and packs == layer.packs:
                return same
            metadata = publish_metadata(self.publisher, tree, packs, self.scratch, self.progress)
        after = replace(layer, packs=packs, **metadata._asdict())
        chunks = tuple(Moved(old, chosen[old], new[old]) for old in sorted(chosen))
        return MovedLayer(layer, after, devices, chunks)

    def _write(self, opened: OpenLayer, chosen: Mapping[int, int]) -> tuple[StoredPack, dict[int, int]]:
        """Write a pack of these chunks in their order; returns it, and at which block each of them is."""
        size = sum(chosen.values()) * BLOCK_SIZE
        with ExitStack() as stack:
            with os_errors("write the hot chunks to a temporary file"):
                spool = stack.enter_context(tempfile.TemporaryFile(dir=self.scratch, buffering=0))
            self.progress.start("read", size)
            spooled = self._spool(opened, chosen, spool)
            self.progress.start("compress", size)
            upload = stack.enter_context(self.publisher.store.upload())
            writer = PackWriter(upload, self.pool, jobs=self.jobs, level=self.level)
            blocks: dict[int, int] = {}
            known: dict[bytes, int] = {}
            for old, count in chosen.items():
                at, key = spooled[old]
                if key not in known:
                    known[key] = writer.blocks
                    with os_errors("read the hot chunks back"):
                        spool.seek(at)
                        data = spool.read(count * BLOCK_SIZE)
                    writer.add([(key, count)], data)
                    self.progress.advance(len(data))
                blocks[old] = known[key]
            pack = writer.finish()
            there = next((each for each in opened.layer.packs if each.digest == pack.digest), None)
            if there is None:
                self.publisher.commit(upload, pack.blob)
            return there or pack, blocks

    def _spool(self, opened: OpenLayer, chosen: Mapping[int, int], spool: IO[bytes]) -> dict[int, tuple[int, bytes]]:
        """Read chunks in the order of their packs, so that each frame is decompressed once.

        Returns:
            Of each, where it is in ``spool``, and its key.
        """
        spooled: dict[int, tuple[int, bytes]] = {}
        end = 0
        for old in sorted(chosen):
            device, offset, length = _bytes(old, chosen[old])
            data = opened.devices.read_device(device, offset, length)
            with os_errors("write the hot chunks to a temporary file"):
                spool.write(data)
            spooled[old] = end, chunk_key(data)
            end += length
            self.progress.advance(length)
        return spooled


def _chunked(tree: Directory) -> list[tuple[File, Chunked]]:
    """Files with data on packs, each once whatever its names."""
    found: dict[int, tuple[File, Chunked]] = {}
    for _, inode in walk(tree):
        if isinstance(inode, File) and isinstance(inode.chunks, Chunked):
            found[id(inode)] = inode, inode.chunks
    return list(found.values())


def _pieces(files: Iterable[tuple[File, Chunked]]) -> dict[int, int]:
    """Every address that a file has, and how many blocks are read there: of several pieces, the longest."""
    found: dict[int, int] = {}
    for file, chunks in files:
        step = BLOCK_SIZE << chunks.bits
        last = len(chunks.addresses) - 1
        for number, where in enumerate(chunks.addresses):
            if where != HOLE:
                blocks = step // BLOCK_SIZE if number < last else -(-(file.size - last * step) // BLOCK_SIZE)
                found[where] = max(found.get(where, 0), blocks)
    return found


def _select(layer: Layer, pieces: Mapping[int, int], hot: Iterable[HotRange], tally: _Tally) -> dict[int, int]:
    """Those pieces that hot ranges touch, as they are first wanted, with their blocks."""
    starts = array("Q", sorted(pieces))
    chosen: dict[int, int] = {}
    for _, device, offset, length in hot:
        if not 1 <= device <= len(layer.packs):
            tally.miss("of another pack")
            continue
        if offset < 0 or length <= 0 or offset + length > layer.packs[device - 1].raw_size:
            tally.miss("beyond its pack")
            continue
        first = address(device, offset // BLOCK_SIZE)
        end = address(device, -(-(offset + length) // BLOCK_SIZE))
        number = max(0, bisect_right(starts, first) - 1)
        touched = []
        while number < len(starts) and starts[number] < end:
            where = starts[number]
            # One that is larger than ours get would be no chunk of a pack: it stays where it is.
            if where + pieces[where] > first and pieces[where] * BLOCK_SIZE <= MAX_CHUNK_SIZE:
                touched.append(where)
            number += 1
        if touched:
            tally.matched += 1
            chosen.update((where, pieces[where]) for where in touched)
        else:
            tally.miss("in no file")
    return chosen


def _used(files: Iterable[tuple[File, Chunked]], moved: Iterable[int]) -> set[int]:
    """The devices that something is left on once ``moved`` have gone."""
    gone = {HOLE, *moved}
    return {where >> 32 for _, chunks in files for where in chunks.addresses if where not in gone}


def _devices(
    old: tuple[StoredPack, ...], hot: StoredPack, used: set[int]
) -> tuple[tuple[StoredPack, ...], tuple[int, ...], int]:
    """The new device table, of each old device its number in it (0: none), and that of the hot pack.

    A new pack comes first, as it does in a conversion.
    """
    kept = [number for number, pack in enumerate(old, 1) if number in used or pack == hot]
    packs = tuple(old[number - 1] for number in kept)
    if hot not in packs:
        packs = (hot, *packs)
    now = {pack.digest: number for number, pack in enumerate(packs, 1)}
    return packs, tuple(now.get(pack.digest, 0) for pack in old), now[hot.digest]


def _assign(files: Iterable[tuple[File, Chunked]], new: Mapping[int, int], devices: Sequence[int]) -> bool:
    """Give every file its new addresses; returns whether any is another than before."""
    changed = False
    for _, chunks in files:
        before = chunks.addresses
        chunks.addresses = array(
            "Q",
            (
                HOLE
                if where == HOLE
                else new[where]
                if where in new
                else address(devices[(where >> 32) - 1], where & _BLOCK)
                for where in before
            ),
        )
        changed |= chunks.addresses != before
    return changed


def _touched(store: Store, packs: Sequence[StoredPack], places: Iterable[tuple[int, int]]) -> Touched:
    """The frames that hold what lies at these addresses, with its blocks."""
    by_device: dict[int, list[tuple[int, int]]] = {}
    for where, blocks in places:
        device, offset, length = _bytes(where, blocks)
        by_device.setdefault(device, []).append((offset, length))
    total = Touched()
    for device, ranges in by_device.items():
        pack = packs[device - 1]
        with store.open(pack.blob) as blob:
            index = FrameIndex.read(pack, blob)
        frames = {number for offset, length in ranges for number in index.covering(offset, length)}
        reads = sum(number - 1 not in frames for number in frames)
        size = sum(index.blob_range(range(number, number + 1))[1] for number in frames)
        total += Touched(len(frames), reads, size)
    return total
