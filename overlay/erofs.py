"""A layer on the node: one file-backed EROFS mount of its metadata image, with its packs as extra devices.

Never through loop devices: on 6.18 reads of chunks that lie on several of them return wrong bytes (bios are merged
across devices). File-backed mounts came with Linux 6.12.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from layerstore.erofs.format import BLOCK_SIZE
from layerstore.erofs.reader import Image
from layerstore.errors import (
    ConflictError,
    CorruptError,
    ImgtoolError,
    PermissionError_,
    UnsupportedError,
    from_os_error,
    os_errors,
    printable,
)
from overlay.fspath import FsPaths
from overlay.mountapi import (
    MOUNT_ATTR_NOATIME,
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    AnyPath,
    FsContext,
    filesystem_name,
)


def mount_erofs(
    image: AnyPath, devices: Sequence[AnyPath], target: AnyPath, *, nodev: bool = True, beneath: bool = False
) -> None:
    """Mount the metadata image ``image`` at ``target``, read-only.

    Args:
        image: a regular file on a real local filesystem.
        devices: the packs, in the order of the image's device table. The kernel maps them by position alone.
        target: an existing directory.
        nodev: device nodes of the layer can't be opened through this mount.
        beneath: ``target`` is a mount point, and this mount goes under what is mounted there.

    Set-user-ID bits don't count on this mount; they do on an overlay above it, where programs run.

    Raises:
        ConflictError: the number of devices differs from the image's device table. The kernel would mount an image
            without its devices and fail, or lie, when data are read.
        CorruptError: the image is damaged, or a pack is shorter than its slot says.
        UnsupportedError: the kernel lacks EROFS or file-backed mounts, or doesn't know a feature of the image, or
            the image lies on a filesystem that it can't be mounted from.
        NotFoundError: image, device or target is missing.
        PermissionError_: not root.
    """
    with os_errors(f"mount metadata image {_shown(image)}"):
        _check_devices(image, devices)
    attributes = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOATIME
    if nodev:
        attributes |= MOUNT_ATTR_NODEV
    try:
        with FsPaths() as paths, FsContext("erofs") as context:
            context.set(b"source", paths.value(image))
            for device in devices:
                context.set(b"device", paths.value(device))
            context.create()
            context.mount(attributes, target, beneath=beneath)
    except OSError as error:
        raise _explained(error, image, devices) from error


def _check_devices(image: AnyPath, devices: Sequence[AnyPath]) -> None:
    with open(image, "rb", buffering=0) as stream:
        slots = Image(_OpenImage(stream.fileno())).slots
    if len(devices) != len(slots):
        raise ConflictError(
            f"metadata image {_shown(image)} lists {len(slots)} packs and {len(devices)} were given; "
            "fetch the missing ones"
        )
    for slot, device in zip(slots, devices, strict=True):
        size = os.stat(device).st_size
        if size < slot.blocks * BLOCK_SIZE:  # reads past its end would fail one by one, later
            raise CorruptError(
                f"pack {_shown(device)} is too short", expected=f"{slot.blocks * BLOCK_SIZE} bytes", actual=str(size)
            )


class _OpenImage:
    """The image's bytes for its reader."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.size = os.fstat(fd).st_size

    def read_at(self, offset: int, length: int) -> bytes:
        data = os.pread(self._fd, length, offset)
        if len(data) != length:
            raise CorruptError("metadata image was cut while open", expected=f"{length} bytes", actual=str(len(data)))
        return data


def _explained(error: OSError, image: AnyPath, devices: Sequence[AnyPath]) -> ImgtoolError:
    what = f"mount metadata image {_shown(image)}"
    if error.errno == errno.ENOTBLK:
        return UnsupportedError(f"{what}: {_why_not_file_backed(image)}")
    if error.errno in (errno.EPERM, errno.EACCES):
        return PermissionError_(f"{what}: it needs root (CAP_SYS_ADMIN): {error.strerror}")
    if error.errno == errno.ENODEV:
        return UnsupportedError(f"{what}: this kernel ({os.uname().release}) has no EROFS; `modprobe erofs` may help")
    if error.errno in (errno.EUCLEAN, errno.EBADMSG):
        return CorruptError(f"{what}: {error.strerror}")
    if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
        for path in (image, *devices):  # the usual reason: something that isn't a regular file
            if not os.path.isfile(path):
                return UnsupportedError(f"{what}: {_shown(path)} is not a regular file")
        return UnsupportedError(f"{what}: {error.strerror}")
    return from_os_error(error, what)


def _why_not_file_backed(image: AnyPath) -> str:
    try:
        kind = filesystem_name(image)
    except OSError:
        kind = ""
    if kind in ("tmpfs", "ramfs", "overlayfs", "erofs"):
        return f"it lies on {kind}, and must lie on a real local filesystem; put the node's root on ext4, xfs or btrfs"
    return (
        f"this kernel ({os.uname().release}) can't mount EROFS from a file on {kind or 'its filesystem'}; "
        "that needs Linux 6.12 with CONFIG_EROFS_FS_BACKED_BY_FILE, and not tmpfs or overlayfs"
    )


def _shown(path: AnyPath) -> str:
    return printable(os.fsencode(path))
