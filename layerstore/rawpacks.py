"""Packs stored raw, besides compressed, so that the kernel reads them where they lie (mode ``direct``).

A raw pack is the blob that the pack's identity names: ``blobs/sha256/<hex>`` of a directory store is the raw bytes, in
whole blocks, and can be given to the kernel as a device. It comes from the compressed blob, each frame checked, and all
of it before it gets its name. Manifests don't list it; they name it (:mod:`layerstore.store.reach`), so ``gc`` keeps it
as long as an image that uses the pack, ``verify`` checks it, and ``copy`` leaves it where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from layerstore.digest import Digest
from layerstore.errors import CorruptError, NotFoundError, UnsupportedError, UsageError, about
from layerstore.image import Image, find_target, load_image
from layerstore.pack.reader import FrameIndex
from layerstore.pack.stored import StoredPack
from layerstore.progress import SILENT, Progress
from layerstore.store.protocol import Lease, LocalStore, PruneStore, Store, WriteStore
from layerstore.store.reach import Documents, reference_links
from layerstore.store.reading import is_intact


class RawState(StrEnum):
    """What became of a raw pack."""

    STORED = "stored"
    """It wasn't there, or was damaged."""
    PRESENT = "present"
    """It was there, and right."""
    REMOVED = "removed"
    KEPT = "kept"
    """It was to be removed, and something else needs it."""


@dataclass(frozen=True, slots=True)
class RawPack:
    """A raw pack and what became of it.

    Attributes:
        digest: of the pack.
        size: bytes.
        state: what became of it.
        users: why it was kept: names of other images, or what a lease or manifest wants it for.
    """

    digest: Digest
    size: int
    state: RawState
    users: tuple[str, ...] = ()


def require_local(store: Store) -> LocalStore:
    """``store`` as one whose blobs are files.

    Raises:
        UnsupportedError: it isn't.
    """
    if not isinstance(store, LocalStore):
        raise UnsupportedError(
            f"{store.location} is no directory, and the kernel reads raw packs from files: copy the image to one"
        )
    return store


def is_raw(store: Store, pack: StoredPack) -> bool:
    """Whether a pack is stored raw, by name and size: its bytes are not looked at."""
    try:
        return store.stat(pack.digest) == pack.raw_size
    except NotFoundError:
        return False


def packs_of(store: Store, names: Iterable[str]) -> tuple[StoredPack, ...]:
    """The packs of images, each once."""
    return _packs(load_image(store, name) for name in names)


def _packs(images: Iterable[Image]) -> tuple[StoredPack, ...]:
    packs: dict[Digest, StoredPack] = {}
    for image in images:
        for layer in image.layers:
            for pack in layer.packs:
                packs.setdefault(pack.digest, pack)
    return tuple(packs.values())


def publish_raw(store: WriteStore, names: Sequence[str], *, progress: Progress = SILENT) -> list[RawPack]:
    """Store all packs of some images raw. Repeating it changes nothing, and replaces what is damaged.

    Raises:
        NotFoundError: no such image.
        And what :func:`store_raw` raises.
    """
    require_local(store)
    with store.lease() as lease:
        lease.pin([find_target(store, name).digest for name in names])
        images = [load_image(store, name) for name in names]
        lease.pin([blob for image in images for blob in image.blobs])
        return store_raw(store, _packs(images), lease, progress=progress)


def store_raw(
    store: WriteStore, packs: Iterable[StoredPack], lease: Lease, *, progress: Progress = SILENT
) -> list[RawPack]:
    """Store packs raw, unless they are; those that are there are hashed before they are believed.

    Memory is that of a frame. What has been stored when it fails is whole, and stays.

    Raises:
        UnsupportedError: the store's blobs are no files.
        CorruptError: a compressed pack is missing or damaged; nothing of it is stored.
        NoSpaceError: nothing of the pack at which the disk was full is left.
    """
    require_local(store)
    packs = tuple(packs)
    lease.pin([digest for pack in packs for digest in (pack.blob, pack.digest)])
    done = []
    for pack in packs:
        lease.renew()
        state = RawState.PRESENT
        if not _is_whole(store, pack, progress):
            with about(f"store pack {pack.digest} raw"):
                _decompress(store, pack, progress)
            state = RawState.STORED
        done.append(RawPack(pack.digest, pack.raw_size, state))
    return done


def _is_whole(store: Store, pack: StoredPack, progress: Progress) -> bool:
    try:
        blob = store.open(pack.digest)
    except NotFoundError:
        return False
    with blob:
        if blob.size != pack.raw_size:
            return False
        progress.start("verify raw pack", pack.raw_size)
        try:
            return is_intact(blob, pack.digest, progress)
        except CorruptError:  # cut off meanwhile
            return False


def _decompress(store: WriteStore, pack: StoredPack, progress: Progress) -> None:
    try:
        blob = store.open(pack.blob)
    except NotFoundError as error:
        raise CorruptError(f"its image is damaged: {error}") from error
    with blob, store.upload() as upload:
        index = FrameIndex.read(pack, blob)
        progress.start("store raw pack", pack.raw_size)
        for number in range(len(index)):
            raw = index.decode(number, blob.read_at(*index.blob_range(range(number, number + 1))))
            upload.write(raw)
            progress.advance(len(raw))
        upload.commit(pack.digest, pack.raw_size)


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """Which raw packs of some images may go.

    Attributes:
        location: of the store.
        manifests: of the images.
        doomed: raw packs that nothing else needs.
        kept: those that something else needs.
        documents: what has been read of the store's documents.
    """

    location: str
    manifests: frozenset[Digest]
    doomed: tuple[RawPack, ...]
    kept: tuple[RawPack, ...]
    documents: Documents = field(compare=False, repr=False)


def plan_removal(store: PruneStore, names: Sequence[str]) -> RemovalPlan:
    """What :func:`remove_raw` would remove: raw packs of these images that no other image uses. Changes nothing.

    Raises:
        NotFoundError: no such image.
        ImgtoolError: a reference, lease or document can't be read; then nothing is certain.
    """
    present: dict[Digest, int] = {}
    for pack in packs_of(store, names):
        try:
            present[pack.digest] = store.stat(pack.digest)
        except NotFoundError:
            pass
    manifests = frozenset(find_target(store, name).digest for name in names)
    documents = Documents(store)
    users = _users(store, documents, present, manifests)
    raw = [_fate(digest, size, users[digest]) for digest, size in present.items()]
    doomed = tuple(each for each in raw if each.state is RawState.REMOVED)
    kept = tuple(each for each in raw if each.state is RawState.KEPT)
    return RemovalPlan(store.location, manifests, doomed, kept, documents)


def _fate(digest: Digest, size: int, users: list[str]) -> RawPack:
    return RawPack(digest, size, RawState.KEPT if users else RawState.REMOVED, tuple(users))


def remove_raw(store: PruneStore, plan: RemovalPlan) -> list[RawPack]:
    """Remove what the plan says, as far as that still holds; the compressed packs stay. Can be interrupted.

    A mount that has a raw pack open goes on reading it where the file system keeps open files (local ones do, NFS only
    for its own client); elsewhere its reads fail.

    Raises:
        ImgtoolError: as :func:`plan_removal`; then nothing has been removed.
    """
    if plan.location != store.location:
        raise UsageError(f"the plan is for {plan.location}, not for {store.location}")
    done = list(plan.kept)
    with store.collecting():
        users = _users(store, plan.documents, [raw.digest for raw in plan.doomed], plan.manifests)
        for raw in plan.doomed:
            fate = _fate(raw.digest, raw.size, users[raw.digest])
            if fate.state is RawState.KEPT or store.delete(raw.digest):
                done.append(fate)
    return done


def _users(
    store: PruneStore, documents: Documents, digests: Iterable[Digest], manifests: frozenset[Digest]
) -> dict[Digest, list[str]]:
    """For each raw pack, what needs it besides the images of ``manifests``."""
    users: dict[Digest, list[str]] = {digest: [] for digest in digests}
    for digest in store.pinned() & users.keys():
        users[digest].append("a lease")
    for reference in store.references():
        needed = {
            link.descriptor.digest
            for link in reference_links(store, documents, reference)
            # One that a manifest lists as a blob of its own is more than a raw form.
            if not (link.raw and reference.target.digest in manifests)
        }
        for digest in needed & users.keys():
            users[digest].append(reference.name)
    return users
