"""From an image, archive or directory to a published layer.

::

    source ─▶ tree (layers merged) ─▶ chunks (hashed) ─▶ reuse (what the store has) ─▶ pack (the rest)
                                                                                        │
                                        reference ◀─ manifest ◀─ config ◀─ metadata image ◀─┘

Every step but the last writes under digests only, protected by a lease; a conversion that stops anywhere leaves the
store as it was, save for space that ``gc`` reclaims.
"""

from __future__ import annotations

import os
import sys
import tempfile
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import zstandard

from layerstore.content import same_content
from layerstore.digest import Digest
from layerstore.erofs.layout import HOLE, Chunked, Device, address
from layerstore.erofs.writer import write_image
from layerstore.errors import ConflictError, CorruptError, UsageError, os_errors
from layerstore.image import Image, Layer, Role, all_packs, load_image
from layerstore.limits import DEFAULT_LIMITS, Limits
from layerstore.oci.config import ImageConfig
from layerstore.oci.document import dump
from layerstore.oci.platform import Platform
from layerstore.oci.source import SourceImage
from layerstore.oci.source_name import SourceName
from layerstore.oci.transport import open_source
from layerstore.opened import open_layer
from layerstore.pack.chunks import ChunkTable, Sizes, chunk_files, pieces, read_piece
from layerstore.pack.format import BLOCK_SIZE
from layerstore.pack.reuse import Reuse, choose, find
from layerstore.pack.stored import StoredPack
from layerstore.pack.writer import DEFAULT_LEVEL, PackWriter
from layerstore.publish import current, publish_config, publish_image
from layerstore.progress import SILENT, Progress
from layerstore.store.protocol import Lease, WriteStore
from layerstore.tar.archive import LayerArchive
from layerstore.tree.difference import delta
from layerstore.tree.inode import Directory, File, walk
from layerstore.tree.local import scan
from layerstore.tree.merge import Merge

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
    sizes: Sizes = Sizes()
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
        stored_size: what the store grew by: new pack, metadata image, config and manifest.
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
class _Material:
    """The tree of a source, with where it came from."""

    tree: Directory
    config: ImageConfig
    size: int
    digest: Digest | None
    diff_ids: tuple[Digest, ...]


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
        base = _load_base(conversion, store)
        material = _read(conversion, base, store, scratch, stack, progress, warnings)
        entries, files = _survey(material.tree)
        progress.start("hash", sum(extent.length for file in files for extent in file.extents))
        table = chunk_files(files, conversion.sizes, pool, conversion.jobs, progress)
        reuse = _reuse(conversion, table, base, store, lease, progress, warnings)
        new = _write_pack(conversion, table, reuse, store, lease, pool, progress)
        packs = ((new,) if new else ()) + reuse.packs
        _assign(table, reuse, new)
        metadata = _write_metadata(material.tree, packs, scratch, store, lease, progress)
        layer = Layer(
            conversion.role,
            *metadata,
            packs=packs,
            base=base.layers[0].metadata if base else None,
            source=material.digest,
            diff_ids=material.diff_ids,
        )
        config = publish_config(store, lease, material.config, layer.raw_digests)
        image = Image((layer,), config)
        target = publish_image(store, lease, image, tag=tag, expected=before)
    new_blocks = sum(b for b, source in zip(table.blocks, reuse.source, strict=True) if source < 0)
    return Report(
        target.digest,
        image,
        material.size,
        table.raw_size,
        new_blocks * BLOCK_SIZE,
        table.raw_size - new_blocks * BLOCK_SIZE,
        (new.blob_size if new else 0) + layer.blob_size + config.size + target.size,
        entries,
        tuple(warnings.texts),
    )


def _load_base(conversion: Conversion, store: WriteStore) -> Image | None:
    if conversion.base is None:
        if conversion.rebase:
            raise UsageError("--rebase computes a difference to a base: name it with --base")
        return None
    if conversion.role is Role.BASE:
        raise UsageError("a base stands on nothing: --base is for workspaces and toolkits")
    base = load_image(store, conversion.base)
    if len(base.layers) != 1 or base.layers[0].role is not Role.BASE:
        roles = ", ".join(layer.role for layer in base.layers)
        raise UsageError(f"{conversion.base!r} is no base but: {roles}")
    return base


def _read(
    conversion: Conversion,
    base: Image | None,
    store: WriteStore,
    scratch: str,
    stack: ExitStack,
    progress: Progress,
    warn: Callable[[str], None],
) -> _Material:
    lower = None
    if base is not None:
        lower = stack.enter_context(open_layer(store, base.layers[0], scratch=scratch)).tree()
    match conversion.source.transport:
        case "tree":
            progress.start("scan", None)
            tree = scan(conversion.source.path, warn=warn)
            material = _Material(tree, _plain_config(conversion.platform), 0, None, ())
            material.size = sum(extent.length for file in _survey(tree)[1] for extent in file.extents)
            if not conversion.rebase:
                return material
        case "tar":
            merge = Merge(lower=None if conversion.rebase else lower, warn=warn, limits=conversion.limits)
            material = _read_tar(conversion, merge, scratch, stack, progress, warn)
            if not conversion.rebase:
                return material
        case _:
            source = stack.enter_context(
                open_source(conversion.source, scratch=scratch, limits=conversion.limits, warn=warn)
            )
            image = source.image(conversion.platform)
            skip = 0
            if base is not None and not conversion.rebase:
                skip = _layers_of_base(image, base, conversion)
            merge = Merge(lower=lower if skip else None, warn=warn, limits=conversion.limits)
            material = _read_image(conversion, image, skip, merge, scratch, stack, progress, warn)
            if skip:
                return material
    if lower is not None:
        material.tree = delta(lower, material.tree, same_content)
    return material


def _layers_of_base(image: SourceImage, base: Image, conversion: Conversion) -> int:
    """How many of the image's layers the base consists of."""
    expected = base.layers[0].diff_ids
    actual = tuple(layer.diff_id for layer in image.layers)
    if not expected or actual[: len(expected)] != expected:
        shared = next((i for i, (a, b) in enumerate(zip(actual, expected, strict=False)) if a != b), len(actual))
        why = (
            "the base doesn't record the layers it was made from"
            if not expected
            else f"of the base's {len(expected)} layers the image begins with {shared}"
        )
        raise ConflictError(
            f"{conversion.source} isn't built on {conversion.base!r}: {why}; "
            "use its own base, or --rebase to compute the difference of the trees"
        )
    return len(expected)


def _read_image(
    conversion: Conversion,
    image: SourceImage,
    skip: int,
    merge: Merge,
    scratch: str,
    stack: ExitStack,
    progress: Progress,
    warn: Callable[[str], None],
) -> _Material:
    layers = image.layers[skip:]
    total = sum(layer.descriptor.size for layer in layers)
    progress.start("unpack", total)
    for number, layer in enumerate(layers, skip):
        archive = stack.enter_context(
            LayerArchive(
                image.open_layer(number),
                scratch=scratch,
                limits=conversion.limits,
                warn=warn,
                expected=layer.descriptor.digest,
                expected_size=layer.descriptor.size,
                progress=progress.advance,
            )
        )
        merge.apply(archive.members(), archive.source)
        _, _, diff_id, _ = archive.finish()
        if layer.diff_id is not None and layer.diff_id.algorithm == "sha256" and diff_id != layer.diff_id:
            raise CorruptError(
                f"diff ID of layer {layer.descriptor.digest}", expected=str(layer.diff_id), actual=str(diff_id)
            )
    diff_ids = tuple(layer.diff_id for layer in image.layers)
    return _Material(merge.tree(), image.config, total, image.descriptor.digest, diff_ids)


def _read_tar(
    conversion: Conversion,
    merge: Merge,
    scratch: str,
    stack: ExitStack,
    progress: Progress,
    warn: Callable[[str], None],
) -> _Material:
    path = conversion.source.path
    if path == "-":
        stream = sys.stdin.buffer
        progress.start("unpack", None)
    else:
        with os_errors("open the archive"):
            stream = stack.enter_context(open(path, "rb"))
            progress.start("unpack", os.fstat(stream.fileno()).st_size)
    archive = stack.enter_context(
        LayerArchive(stream, scratch=scratch, limits=conversion.limits, warn=warn, progress=progress.advance)
    )
    merge.apply(archive.members(), archive.source)
    _, size, diff_id, _ = archive.finish()
    return _Material(merge.tree(), _plain_config(conversion.platform), size, diff_id, (diff_id,))


def _plain_config(platform: Platform | None) -> ImageConfig:
    """The config of a source that has none; without ``--platform`` it fits every machine."""
    document: dict[str, object] = {"architecture": "unknown", "os": "linux", "config": {}}
    if platform is not None:
        document["architecture"] = platform.architecture
        document["os"] = platform.os
        if platform.variant:
            document["variant"] = platform.variant
    document["rootfs"] = {"type": "layers", "diff_ids": []}
    return ImageConfig.parse(dump(document), "config")


def _survey(tree: Directory) -> tuple[int, list[File]]:
    """How many names the tree has, and its regular files, each once, in the order their data is laid out."""
    seen: set[int] = set()
    files = []
    names = 0
    for _, inode in walk(tree):
        names += 1
        if isinstance(inode, File) and id(inode) not in seen:
            seen.add(id(inode))
            files.append(inode)
    return names, files


def _reuse(
    conversion: Conversion,
    table: ChunkTable,
    base: Image | None,
    store: WriteStore,
    lease: Lease,
    progress: Progress,
    warn: Callable[[str], None],
) -> Reuse:
    own = base.layers[0].packs if base else ()
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
) -> StoredPack | None:
    """Write the chunks that no chosen pack has; their blocks are entered into ``reuse.block``."""
    new = [number for number, source in enumerate(reuse.source) if source < 0]
    if not new:
        return None
    progress.start("compress", sum(table.blocks[number] for number in new) * BLOCK_SIZE)
    keys = list(table.keys)
    with store.upload() as upload:
        writer = PackWriter(upload, pool, jobs=conversion.jobs, level=conversion.level)
        for number in new:
            chunked = table.files[table.first_file[number]]
            reuse.block[number] = writer.blocks
            data = read_piece(chunked.file, chunked.bits, table.first_piece[number])
            writer.add(keys[number], data)
            progress.advance(len(data))
        pack = writer.finish()
        lease.pin([pack.blob])
        upload.commit(pack.blob, pack.blob_size)
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
) -> tuple[Digest, int, Digest, int]:
    """Write and publish the metadata image; returns digest and size, raw and compressed."""
    devices = [Device(pack.digest, pack.blocks) for pack in packs]
    with tempfile.TemporaryFile(dir=scratch) as file, store.upload() as upload:
        with os_errors("write the metadata image"):
            summary = write_image(tree, devices, file)
        progress.start("metadata", summary.bytes)
        compressor = zstandard.ZstdCompressor(level=_METADATA_LEVEL).compressobj(size=summary.bytes)
        file.seek(0)
        while piece := file.read(_HASH_STEP):
            upload.write(compressor.compress(piece))
            progress.advance(len(piece))
        upload.write(compressor.flush())
        blob, size = upload.digest(), upload.size
        lease.pin([blob])
        upload.commit(blob, size)
    return summary.digest, summary.bytes, blob, size
