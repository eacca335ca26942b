"""From an image, archive or directory to a published layer.

::

    source ─▶ tree (layers merged) ─▶ chunks (hashed) ─▶ reuse (what the store has) ─▶ pack (the rest)
                                                                                        │
                                        reference ◀─ manifest ◀─ config ◀─ metadata image ◀─┘

Every step but the last writes under digests only, protected by a lease; a conversion that stops anywhere leaves the
store as it was, save for space that ``gc`` reclaims.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate

from layerstore.digest import Digest
from layerstore.erofs.layout import HOLE, Chunked, address
from layerstore.errors import ConflictError, CorruptError, LimitError, UsageError
from layerstore.hot import HotFile, frames, hot_chunks, withhold
from layerstore.image import Image, Layer, Role, all_packs, load_image
from layerstore.limits import DEFAULT_LIMITS, Limits
from layerstore.material import Base, SourceReader, survey
from layerstore.metadata import publish_metadata
from layerstore.oci.platform import Platform
from layerstore.oci.source_name import SourceName
from layerstore.opened import open_layer
from layerstore.pack.chunks import (
    DEFAULT_SIZES,
    INDEX_ENTRY,
    ChunkTable,
    Sizes,
    Taker,
    chunk_files,
    chunk_key,
    pieces,
    read_pieces,
    run_length,
)
from layerstore.pack.format import BLOCK_SIZE
from layerstore.pack.reuse import Reuse, choose, find
from layerstore.pack.stored import StoredPack
from layerstore.pack.writer import DEFAULT_LEVEL, PackWriter
from layerstore.progress import SILENT, Progress
from layerstore.publish import Publisher, current
from layerstore.rawpacks import RawState, require_local, store_raw
from layerstore.store.protocol import Upload, WriteStore
from layerstore.store.reading import is_intact
from layerstore.tree.inode import File


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is to be converted, and how.

    Attributes:
        source: where from.
        role: what the layer is for.
        base: reference or digest of a base in the store, which the source was built on.
        rebase: compute the difference of the trees where the source was not built on that base.
        platform: which image of an index; also the platform of what has none (``tree:``, ``tar:``).
        dedup: refer to packs that the store has; without, the result depends on the source (and base) alone.
        level: zstd level of the pack.
        jobs: threads for hashing and compression; the result doesn't depend on it.
        sizes: for measuring other chunk and inline sizes.
        limits: bounds on what the source may ask for.
        raw: store the layer's packs raw too, those that it shares included.
        hot: what is to be read first, in order. It lies together, at the head of the new pack, and is written there
            though other packs have it, unless one of them has all of it together.
    """

    source: SourceName
    role: Role
    base: str | None = None
    rebase: bool = False
    platform: Platform | None = None
    dedup: bool = True
    level: int = DEFAULT_LEVEL
    jobs: int = 2
    sizes: Sizes = DEFAULT_SIZES
    limits: Limits = DEFAULT_LIMITS
    raw: bool = False
    hot: Sequence[HotFile] = ()


@dataclass(frozen=True, slots=True)
class Hot:
    """What became of what was to be read first. Sizes are bytes, raw.

    Attributes:
        size, chunks: of it.
        frames: how many hold it, of however many packs.
        copied_size: the part of it that packs of the store had as well, where it isn't together.
        matched: parts of files that named some of it.
        unmatched: parts that named none, by reason.
    """

    size: int
    chunks: int
    frames: int
    copied_size: int
    matched: int
    unmatched: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion came to. Sizes are bytes.

    Attributes:
        manifest: digest of the published manifest.
        layer: the layer.
        source_size: read from the source, compressed as it was.
        data_size: of all distinct chunks.
        new_size, shared_size: the parts of it that are new, and that other packs already had.
        stored_size: what the store grew by: new pack, metadata image, config, manifest, and packs stored raw, as far
            as it lacked them.
        entries: names in the tree.
        hot: what became of what was to be read first; None where nothing was named.
    """

    manifest: Digest
    image: Image
    source_size: int
    data_size: int
    new_size: int
    shared_size: int
    stored_size: int
    entries: int
    warnings: tuple[str, ...]
    hot: Hot | None = None

    @property
    def layer(self) -> Layer:
        return self.image.layers[-1]


@dataclass(slots=True)
class _Warnings:
    told: Callable[[str], None]
    texts: list[str] = field(default_factory=list)

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        self.told(text)


def convert(
    conversion: Conversion,
    store: WriteStore,
    *,
    tag: str | None = None,
    progress: Progress = SILENT,
    warn: Callable[[str], None] = lambda text: None,
) -> Report:
    """Convert and publish; with ``tag``, the reference of that name is made or moved.

    Raises:
        MalformedError, UnsupportedError, LimitError: the source; UnsupportedError also a store without raw packs.
        CorruptError: the source's or the base's bytes are not what their digests say.
        ConflictError: the source isn't built on the base, or ``tag`` was moved by somebody else meanwhile.
        NoSpaceError: the store is full; nothing was published.
    """
    warnings = _Warnings(warn)
    if conversion.raw:
        require_local(store)
    before = None if tag is None else current(store, tag)
    with ExitStack() as stack:
        publisher = Publisher(store, stack.enter_context(store.lease()))
        scratch = stack.enter_context(store.scratch())
        pool = stack.enter_context(ThreadPoolExecutor(conversion.jobs, thread_name_prefix="convert"))
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        work = _Work(conversion, publisher, scratch, pool, progress, warnings)
        base = _load_base(conversion, store, scratch, stack)
        reader = SourceReader(scratch, stack, conversion.platform, conversion.limits, progress, warnings)
        material = reader.read(conversion.source, base)
        entries, files = survey(material.tree)
        for file in files:
            file.chunks = None  # one that comes from the base still has its address there
        own = base.layer.packs if base else ()
        present = work.packs(own)
        hot = None
        if present or conversion.hot:
            table = work.chunks(files, "hash")
            wanted = hot_chunks(material.tree, table, conversion.hot)
            reuse, copied = work.reuse(table, present, own, wanted.numbers)
            new = work.write_rest(table, reuse, wanted.numbers)
            if conversion.hot:
                hot = Hot(*_measured(wanted.numbers, table, reuse), copied, wanted.matched, wanted.unmatched)
        else:
            table, reuse, new = work.write_all(files)
        packs = ((new,) if new else ()) + reuse.packs
        _assign(table, reuse, new)
        layer = Layer(
            conversion.role,
            *publish_metadata(publisher, material.tree, packs, scratch, progress),
            packs=packs,
            base=base.layer.metadata if base else None,
            source=material.digest,
            diff_ids=material.diff_ids,
        )
        image = Image((layer,), publisher.config(material.config, layer.raw_digests))
        raw = store_raw(store, packs, publisher.lease, progress=progress) if conversion.raw else ()
        target = publisher.image(image, tag=tag, expected=before)
    new_blocks = sum(b for b, source in zip(table.blocks, reuse.source, strict=True) if source < 0)
    return Report(
        target.digest,
        image,
        material.size,
        table.raw_size,
        new_blocks * BLOCK_SIZE,
        table.raw_size - new_blocks * BLOCK_SIZE,
        publisher.grown + sum(pack.size for pack in raw if pack.state is RawState.STORED),
        entries,
        tuple(warnings.texts),
        hot,
    )


def _check_indexes(table: ChunkTable, limits: Limits) -> None:
    """A hole costs nothing in an archive and 8 bytes a chunk here."""
    sizes = [-(-chunked.file.size // (BLOCK_SIZE << chunked.bits)) * INDEX_ENTRY for chunked in table.files]
    if sum(sizes) > limits.index_bytes:
        largest = table.files[sizes.index(max(sizes))].file.size
        raise LimitError(
            f"chunk indexes of {sum(sizes)} bytes, more than the limit of {limits.index_bytes}: the image has too much "
            f"data, or files with too large holes; its largest index is that of a file of {largest} bytes"
        )


def _load_base(conversion: Conversion, store: WriteStore, scratch: str, stack: ExitStack) -> Base | None:
    if conversion.base is None:
        if conversion.rebase:
            raise UsageError("--rebase computes a difference to a base: name it with --base")
        return None
    if conversion.role is Role.BASE:
        raise UsageError("a base stands on nothing: --base is for workspaces and toolkits")
    image = load_image(store, conversion.base)
    if len(image.layers) != 1 or image.layers[0].role is not Role.BASE:
        roles = ", ".join(layer.role for layer in image.layers)
        raise UsageError(f"{conversion.base!r} is no base but: {roles}")
    opened = stack.enter_context(open_layer(store, image.layers[0], scratch=scratch))
    return Base(conversion.base, image.layers[0], opened.tree(), conversion.rebase)


@dataclass(frozen=True, slots=True)
class _Work:
    """The steps between a tree and its layer, with what all of them need."""

    conversion: Conversion
    publisher: Publisher
    scratch: str
    pool: ThreadPoolExecutor
    progress: Progress
    warn: Callable[[str], None]

    def packs(self, own: Sequence[StoredPack]) -> list[StoredPack]:
        """The packs that may be referred to: the base's, and all that the store has."""
        packs = {pack.digest: pack for pack in own}
        if self.conversion.dedup:
            unreadable: list[str] = []
            for pack in all_packs(self.publisher.store, unreadable):
                packs.setdefault(pack.digest, pack)
            for text in unreadable:
                self.warn(f"not reusing from an image that can't be read: {text}")
        return list(packs.values())

    def chunks(self, files: Sequence[File], step: str, take: Taker | None = None) -> ChunkTable:
        """Name all chunks; ``take`` gets the bytes of each distinct one."""
        self.progress.start(step, sum(extent.length for file in files for extent in file.extents))
        jobs, sizes = self.conversion.jobs, self.conversion.sizes
        table = chunk_files(files, sizes, self.pool, jobs, self.progress, take or (lambda chunks, data: None))
        _check_indexes(table, self.conversion.limits)
        return table

    def reuse(
        self, table: ChunkTable, present: Sequence[StoredPack], own: Sequence[StoredPack], hot: Sequence[int]
    ) -> tuple[Reuse, int]:
        """Choose packs to refer to. A pack's blob is hashed before: its name is no proof of its bytes.

        Returns:
            The choice, and how many bytes of ``hot`` are to be written though other packs have them.
        """
        store = self.publisher.store

        def verify(pack: StoredPack) -> None:
            self.publisher.lease.pin([pack.blob])
            self.progress.start("verify", pack.blob_size)
            with store.open(pack.blob) as blob:
                if blob.size != pack.blob_size or not is_intact(blob, pack.blob, self.progress):
                    raise CorruptError(f"blob {pack.blob} in {store.location} is corrupt")

        candidates = find(table, present, store, self.warn)
        copied = withhold(hot, table.blocks, candidates) * BLOCK_SIZE if hot else 0
        preferred = frozenset(pack.digest for pack in own)
        return choose(table, candidates, preferred=preferred, verify=verify, warn=self.warn), copied

    def write_all(self, files: Sequence[File]) -> tuple[ChunkTable, Reuse, StoredPack | None]:
        """Where nothing can be referred to, hash and write in one pass: the same pack as in two."""
        with self.publisher.store.upload() as upload:
            writer = self._writer(upload)
            table = self.chunks(files, "pack", writer.add)
            block = array("Q", [0, *accumulate(table.blocks)][: len(table.blocks)])
            reuse = Reuse((), array("i", [-1]) * len(block), block)
            return table, reuse, self._finish(writer, upload) if block else None

    def write_rest(self, table: ChunkTable, reuse: Reuse, hot: Sequence[int]) -> StoredPack | None:
        """Write the chunks that no chosen pack has, ``hot`` ones first; enter their blocks into ``reuse.block``."""
        first = dict.fromkeys(number for number in hot if reuse.source[number] < 0)
        order = array("I", first)
        order.extend(number for number, source in enumerate(reuse.source) if source < 0 and number not in first)
        if not order:
            return None
        self.progress.start("compress", sum(table.blocks[number] for number in order) * BLOCK_SIZE)
        keys = list(table.keys)
        with self.publisher.store.upload() as upload:
            writer = self._writer(upload)
            for file, bits, numbers in _neighbours(table, order):
                data = read_pieces(file, bits, table.first_piece[numbers[0]], len(numbers))
                chunks = [(keys[number], table.blocks[number]) for number in numbers]
                _check_unchanged(chunks, data)
                block = writer.blocks
                for number in numbers:
                    reuse.block[number] = block
                    block += table.blocks[number]
                writer.add(chunks, data)
                self.progress.advance(len(data))
            return self._finish(writer, upload)

    def _writer(self, upload: Upload) -> PackWriter:
        return PackWriter(upload, self.pool, jobs=self.conversion.jobs, level=self.conversion.level)

    def _finish(self, writer: PackWriter, upload: Upload) -> StoredPack:
        pack = writer.finish()
        self.publisher.commit(upload, pack.blob)
        return pack


def _check_unchanged(chunks: Sequence[tuple[bytes, int]], data: bytes) -> None:
    """What is read a second time has to be what was named: a wrong chunk under a name would reach other images."""
    view = memoryview(data)
    for key, blocks in chunks:
        length = blocks * BLOCK_SIZE
        if chunk_key(view[:length]) != key:
            raise ConflictError("the source changed while it was read; convert it again when nothing writes to it")
        view = view[length:]


def _neighbours(table: ChunkTable, order: Sequence[int]) -> Iterator[tuple[File, int, Sequence[int]]]:
    """Chunks in an order, those together that follow each other where they were first seen, and can be read at once."""
    at = 0
    while at < len(order):
        number = order[at]
        index, piece = table.first_file[number], table.first_piece[number]
        file, bits, _ = table.files[index]
        last = at + 1
        while (
            last < min(len(order), at + run_length(bits))
            and table.first_file[order[last]] == index
            and table.first_piece[order[last]] == piece + last - at
        ):
            last += 1
        yield file, bits, order[at:last]
        at = last


def _measured(hot: Sequence[int], table: ChunkTable, reuse: Reuse) -> tuple[int, int, int]:
    """Bytes, number and frames of chunks whose blocks are known."""
    places: dict[int, list[tuple[int, int]]] = {}
    for number in hot:
        places.setdefault(reuse.source[number], []).append((reuse.block[number], table.blocks[number]))
    size = sum(table.blocks[number] for number in hot) * BLOCK_SIZE
    return size, len(hot), sum(len(frames(of)) for of in places.values())


def _assign(table: ChunkTable, reuse: Reuse, new: StoredPack | None) -> None:
    """Give every chunked file the addresses of its chunks."""
    first_foreign = 2 if new else 1
    for file, bits, chunks in table.files:
        count = -(-file.size // (BLOCK_SIZE << bits))
        addresses = array("Q", [HOLE]) * count
        for piece, number in zip(pieces(file, bits), chunks, strict=True):
            source = reuse.source[number]
            device = 1 if source < 0 else first_foreign + source
            addresses[piece] = address(device, reuse.block[number])
        file.chunks = Chunked(bits, addresses)
