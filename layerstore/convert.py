"""From an image, archive or directory to a published layer.

::

    source ─▶ tree (layers merged) ─▶ chunks (hashed) ─▶ reuse (what the store has) ─▶ pack (the rest)
                                                                                        │
                                        reference ◀─ manifest ◀─ config ◀─ metadata image ◀─┘

Every step but the last writes under digests only, protected by a lease; a conversion that stops anywhere leaves the
store as it was, save for space that ``gc`` reclaims.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import zstandard

from layerstore.digest import Digest
from layerstore.erofs.layout import HOLE, Chunked, Device, address
from layerstore.erofs.writer import write_image
from layerstore.errors import CorruptError, LimitError, UsageError, os_errors
from layerstore.image import Image, Layer, Role, all_packs, load_image
from layerstore.limits import DEFAULT_LIMITS, Limits
from layerstore.material import Base, SourceReader, survey
from layerstore.oci.platform import Platform
from layerstore.oci.source_name import SourceName
from layerstore.opened import open_layer
from layerstore.pack.chunks import (
    DEFAULT_SIZES,
    INDEX_ENTRY,
    ChunkTable,
    Sizes,
    chunk_files,
    pieces,
    read_pieces,
    run_length,
    runs,
)
from layerstore.pack.format import BLOCK_SIZE
from layerstore.pack.reuse import Reuse, choose, find
from layerstore.pack.stored import StoredPack
from layerstore.pack.writer import DEFAULT_LEVEL, PackWriter
from layerstore.progress import SILENT, Progress
from layerstore.publish import commit, current, publish_config, publish_image
from layerstore.store.protocol import Lease, WriteStore
from layerstore.tree.inode import Directory

_HASH_STEP = 1 << 20
_METADATA_LEVEL = 9
"""A metadata image is small and is fetched before everything else: worth a slower compressor."""


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


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion came to. Sizes are bytes.

    Attributes:
        manifest: digest of the published manifest.
        layer: the layer.
        source_size: read from the source, compressed as it was.
        data_size: of all distinct chunks.
        new_size, shared_size: the parts of it that are new, and that other packs already had.
        stored_size: what the store grew by: new pack, metadata image, config and manifest, as far as it lacked them.
        entries: names in the tree.
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
        MalformedError, UnsupportedError, LimitError: the source.
        CorruptError: the source's or the base's bytes are not what their digests say.
        ConflictError: the source isn't built on the base, or ``tag`` was moved by somebody else meanwhile.
        NoSpaceError: the store is full; nothing was published.
    """
    warnings = _Warnings(warn)
    before = None if tag is None else current(store, tag)
    with ExitStack() as stack:
        lease = stack.enter_context(store.lease())
        scratch = stack.enter_context(store.scratch())
        pool = stack.enter_context(ThreadPoolExecutor(conversion.jobs, thread_name_prefix="convert"))
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        base = _load_base(conversion, store, scratch, stack)
        reader = SourceReader(scratch, stack, conversion.platform, conversion.limits, progress, warnings)
        material = reader.read(conversion.source, base)
        entries, files = survey(material.tree)
        for file in files:
            file.chunks = None  # one that comes from the base still has its address there
        progress.start("hash", sum(extent.length for file in files for extent in file.extents))
        table = chunk_files(files, conversion.sizes, pool, conversion.jobs, progress)
        _check_indexes(table, conversion.limits)
        reuse = _reuse(conversion, table, base, store, lease, progress, warnings)
        grown: dict[Digest, int] = {}
        new = _write_pack(conversion, table, reuse, store, lease, pool, progress, grown)
        packs = ((new,) if new else ()) + reuse.packs
        _assign(table, reuse, new)
        metadata = _write_metadata(material.tree, packs, scratch, store, lease, progress, grown)
        layer = Layer(
            conversion.role,
            *metadata,
            packs=packs,
            base=base.layer.metadata if base else None,
            source=material.digest,
            diff_ids=material.diff_ids,
        )
        config = publish_config(store, lease, material.config, layer.raw_digests, grown)
        image = Image((layer,), config)
        target = publish_image(store, lease, image, tag=tag, expected=before, grown=grown)
    new_blocks = sum(b for b, source in zip(table.blocks, reuse.source, strict=True) if source < 0)
    return Report(
        target.digest,
        image,
        material.size,
        table.raw_size,
        new_blocks * BLOCK_SIZE,
        table.raw_size - new_blocks * BLOCK_SIZE,
        sum(grown.values()),
        entries,
        tuple(warnings.texts),
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


def _reuse(
    conversion: Conversion,
    table: ChunkTable,
    base: Base | None,
    store: WriteStore,
    lease: Lease,
    progress: Progress,
    warn: Callable[[str], None],
) -> Reuse:
    own = base.layer.packs if base else ()
    packs = {pack.digest: pack for pack in own}
    if conversion.dedup:
        unreadable: list[str] = []
        for pack in all_packs(store, unreadable):
            packs.setdefault(pack.digest, pack)
        for text in unreadable:
            warn(f"not reusing from an image that can't be read: {text}")

    def verify(pack: StoredPack) -> None:
        lease.pin([pack.blob])
        progress.start("verify", pack.blob_size)
        verify_blob(store, pack.blob, pack.blob_size, progress)

    candidates = find(table, packs.values(), store, warn)
    return choose(table, candidates, preferred=frozenset(pack.digest for pack in own), verify=verify, warn=warn)


def verify_blob(store: WriteStore, digest: Digest, size: int, progress: Progress) -> None:
    """Hash a stored blob: its name is no proof of its bytes.

    Raises:
        CorruptError: it isn't what its name says.
    """
    hasher = digest.hasher()
    with store.open(digest) as blob:
        if blob.size != size:
            raise CorruptError(f"blob {digest}", expected=f"{size} bytes", actual=f"{blob.size}")
        for offset in range(0, size, _HASH_STEP):
            piece = blob.read_at(offset, min(_HASH_STEP, size - offset))
            hasher.update(piece)
            progress.advance(len(piece))
    digest.check(hasher, f"blob {digest}")


def _write_pack(
    conversion: Conversion,
    table: ChunkTable,
    reuse: Reuse,
    store: WriteStore,
    lease: Lease,
    pool: ThreadPoolExecutor,
    progress: Progress,
    grown: dict[Digest, int],
) -> StoredPack | None:
    """Write the chunks that no chosen pack has; their blocks are entered into ``reuse.block``."""
    is_new = [source < 0 for source in reuse.source]
    if not any(is_new):
        return None
    progress.start("compress", sum(b for b, new in zip(table.blocks, is_new, strict=True) if new) * BLOCK_SIZE)
    keys = list(table.keys)
    with store.upload() as upload:
        writer = PackWriter(upload, pool, jobs=conversion.jobs, level=conversion.level)
        for index, (file, bits, chunks) in enumerate(table.files):
            numbers = dict(zip(pieces(file, bits), chunks, strict=True))
            first_uses = (
                piece
                for piece, number in numbers.items()
                if is_new[number] and table.first_file[number] == index and table.first_piece[number] == piece
            )
            for first, count in runs(first_uses, run_length(bits)):
                data = read_pieces(file, bits, first, count)
                added = [numbers[piece] for piece in range(first, first + count)]
                block = writer.blocks
                for number in added:
                    reuse.block[number] = block
                    block += table.blocks[number]
                writer.add([(keys[number], table.blocks[number]) for number in added], data)
                progress.advance(len(data))
        pack = writer.finish()
        commit(store, lease, upload, pack.blob, grown)
    return pack


def _assign(table: ChunkTable, reuse: Reuse, new: StoredPack | None) -> None:
    """Give every chunked file the addresses of its chunks."""
    first_foreign = 2 if new else 1
    for chunked in table.files:
        count = -(-chunked.file.size // (BLOCK_SIZE << chunked.bits))
        addresses = array("Q", [HOLE]) * count
        for piece, number in zip(pieces(chunked.file, chunked.bits), chunked.chunks, strict=True):
            source = reuse.source[number]
            device = 1 if source < 0 else first_foreign + source
            addresses[piece] = address(device, reuse.block[number])
        chunked.file.chunks = Chunked(chunked.bits, addresses)


def _write_metadata(
    tree: Directory,
    packs: tuple[StoredPack, ...],
    scratch: str,
    store: WriteStore,
    lease: Lease,
    progress: Progress,
    grown: dict[Digest, int],
) -> tuple[Digest, int, Digest, int]:
    """Write and publish the metadata image; returns digest and size, raw and compressed."""
    devices = [Device(pack.digest, pack.blocks) for pack in packs]
    with ExitStack() as stack:
        with os_errors("write the metadata image"):
            file = stack.enter_context(tempfile.TemporaryFile(dir=scratch))
        upload = stack.enter_context(store.upload())
        summary = write_image(tree, devices, file)
        progress.start("metadata", summary.bytes)
        compressor = zstandard.ZstdCompressor(level=_METADATA_LEVEL).compressobj(size=summary.bytes)
        with os_errors("read the metadata image"):
            file.seek(0)
            while piece := file.read(_HASH_STEP):
                upload.write(compressor.compress(piece))
                progress.advance(len(piece))
        upload.write(compressor.flush())
        blob, size = upload.digest(), upload.size
        commit(store, lease, upload, blob, grown)
    return summary.digest, summary.bytes, blob, size
