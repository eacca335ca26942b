"""Mode ``direct``: the kernel reads packs where they lie, raw, on the store's file system.

The metadata image is the node's own, as always, and verified. A raw pack was verified when the store got it
(:mod:`layerstore.rawpacks`); what is read through the mount is not: those bytes are trusted to the file system (3FS,
NFS, any that the kernel opens files on; of EROFS's files only the metadata image has to be on a local one). Checked
before the mount is that each pack is a regular file of the right size, and with ``verify`` its sha256.

What the kernel makes of a pack that changes under a mount, tried on 6.18 on ext4, tmpfs and FUSE alike:

* cut off: EIO for what lay beyond, never zeros; the rest of its last block and neighbours in the same read go too;
* its file system gone (a FUSE server killed): EIO;
* renamed, unlinked or replaced: the old file's bytes, as long as the file system keeps open files;
* overwritten, or cut off and then extended: whatever is in the file then, zeros too. Nothing can notice that.
"""

from __future__ import annotations

import os
import stat

from layerstore.errors import CorruptError, NotFoundError, UnsupportedError, from_os_error, os_errors, printable
from layerstore.image import Layer
from layerstore.opened import FileSource
from layerstore.pack.stored import StoredPack
from layerstore.progress import SILENT, Progress
from layerstore.rawpacks import is_raw, require_local
from layerstore.store.protocol import Store
from overlay.layers import MountableLayer

VARIANT = "direct"
"""Of layers mounted so."""
BACKEND = "raw packs"
"""What the kernel reads, as ``ps`` and receipts name it."""

_STEP = 1 << 20


def mountable(
    layer: Layer, store: Store, image: str, *, name: str = "IMAGE", verify: bool = False, progress: Progress = SILENT
) -> MountableLayer:
    """A layer to be mounted from its metadata image at ``image`` and its raw packs in ``store``.

    Raises:
        ImgtoolError: as :func:`raw_devices`.
    """
    devices = raw_devices(layer, store, name=name, verify=verify, progress=progress)
    return MountableLayer(layer.metadata.hex, image, devices, VARIANT)


def raw_devices(
    layer: Layer, store: Store, *, name: str = "IMAGE", verify: bool = False, progress: Progress = SILENT
) -> tuple[str, ...]:
    """Paths of the raw packs of a layer, in the order of its device table, checked.

    Args:
        layer: whose.
        store: where they are.
        name: of the image, for the command that stores what is missing.
        verify: read all of every pack and compare its sha256, once, now.
        progress: told the bytes read for that.

    Raises:
        UnsupportedError: the store is no directory, or a pack is no regular file.
        NotFoundError: packs that aren't stored raw, all named, and the command that does it.
        CorruptError: a pack has another size than its manifest says, or with ``verify`` another digest.
        UnavailableError: the file system fails.
    """
    local = require_local(store)
    repair = f"`imgtool raw {printable(name)} --store {store.location}`"
    paths, missing = [], []
    for pack in layer.packs:
        path = local.local_path(pack.digest)
        if _check(pack, path, repair, verify=verify, progress=progress):
            paths.append(path)
        else:
            missing.append(pack)
    if missing:
        is_raw(store, missing[0])  # raises where it is all of the store that is missing
        listed = ", ".join(f"{pack.digest.hex[:12]}…" for pack in missing)
        raise NotFoundError(
            f"{len(missing)} of {len(layer.packs)} packs of layer {layer.metadata.hex[:12]}… are not stored raw in "
            f"{store.location} ({listed}): run {repair}"
        )
    return tuple(paths)


def verification(verified: bool) -> str:
    """How the data of such a mount are verified: a line for receipts."""
    before = "raw packs by sha256 before the mount" if verified else "raw packs by size alone before the mount"
    return f"the metadata image by digest and structure; {before}; nothing when it is read"


def _check(pack: StoredPack, path: str, repair: str, *, verify: bool, progress: Progress) -> bool:
    """Whether something is there, and what it should be."""
    what = f"raw pack {printable(path)}"
    try:
        # Opened, since that is when NFS asks the server instead of its cache; not waiting, should it be a fifo.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise from_os_error(error, what) from error
    try:
        with os_errors(what):
            status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise UnsupportedError(f"{what} is no regular file, and the kernel takes no other: remove it, run {repair}")
        if status.st_size != pack.raw_size:
            raise CorruptError(f"{what} has {status.st_size} bytes, its manifest says {pack.raw_size}: run {repair}")
        if verify:
            _hash(pack, FileSource(file, what), repair, progress)
        return True
    finally:
        os.close(file)


def _hash(pack: StoredPack, source: FileSource, repair: str, progress: Progress) -> None:
    progress.start("verify raw pack", pack.raw_size)
    hasher = pack.digest.hasher()
    for offset in range(0, pack.raw_size, _STEP):
        piece = source.read_at(offset, min(_STEP, pack.raw_size - offset))
        hasher.update(piece)
        progress.advance(len(piece))
    if hasher.hexdigest() != pack.digest.hex:
        raise CorruptError(
            f"raw pack {pack.digest} is damaged, its bytes have sha256 {hasher.hexdigest()}: run {repair}"
        )
