"""Lower directories, an upper and a work directory become one tree.

Options that change what is stored in an upper are named, never left to the kernel's configuration: ``index``,
``redirect_dir`` and ``metacopy`` off, so that an upper holds whole files and can be exported as a layer; ``xino`` on,
so that a tree over several filesystems has one st_dev and inode numbers that survive copy-up.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from layerstore.errors import (
    ConflictError,
    ImgtoolError,
    LimitError,
    PermissionError_,
    UnsupportedError,
    UsageError,
    from_os_error,
    printable,
)
from overlay.fspath import FsPaths
from overlay.mountapi import (
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_RDONLY,
    AnyPath,
    FsContext,
    filesystem_name,
)

OVL_MAX_STACK = 500
"""Lower directories of one overlay; fs/overlayfs/params.h."""

UNFIT_FOR_UPPER = {
    "overlayfs": "overlayfs can't be the upper of another overlay",
    "erofs": "it is read-only",
    "nfs": "NFS lacks trusted xattrs and whiteouts",
    "vfat": "FAT has no xattrs, owners or device nodes",
    "exfat": "exFAT has no xattrs, owners or device nodes",
    "ramfs": "ramfs has no xattrs",
    "cifs": "SMB lacks trusted xattrs and whiteouts",
    "smb3": "SMB lacks trusted xattrs and whiteouts",
    "9p": "9p lacks whiteouts by rename",
    "ecryptfs": "it is stacked itself",
}


def mount_overlay(
    lowers: Sequence[AnyPath],
    upper: AnyPath | None,
    work: AnyPath | None,
    target: AnyPath,
    *,
    empty: AnyPath | None = None,
    read_only: bool = False,
    volatile: bool = False,
    nodev: bool = True,
    checked: bool = False,
) -> None:
    """Mount an overlay at ``target``.

    Args:
        lowers: bottom first, as layers are listed everywhere in this project; the last one wins.
        upper: takes the writes; None when read-only.
        work: an empty directory next to ``upper``, on the same mount.
        target: an existing directory.
        empty: when read-only, an empty directory. Without an upper the kernel wants two lowers or more, and with an
            empty one on top a single layer is a case like any other.
        read_only: mount without upper.
        volatile: never flush the upper: fsync in it does nothing and unmounting doesn't write out the whole
            filesystem below. Its upper is lost with the machine, and the kernel refuses to mount it again
            until ``work`` has been made anew.
        nodev: device nodes in the tree can't be opened through this mount.
        checked: the caller has made ``upper`` and ``work`` itself where :func:`check_upper` has passed.

    Raises:
        UsageError: arguments that don't belong together.
        LimitError: more lowers than the kernel stacks.
        UnsupportedError: the kernel lacks overlayfs or ``lowerdir+`` (Linux 6.8), or the upper's filesystem is unfit.
        ConflictError: ``work`` isn't empty, or not on the mount of ``upper``.
        NotFoundError: a directory is missing.
        PermissionError_: not root.
    """
    if not lowers:
        raise UsageError("an overlay needs at least one layer")
    if len(lowers) + read_only > OVL_MAX_STACK:
        raise LimitError(f"{len(lowers)} layers; overlayfs stacks at most {OVL_MAX_STACK}: merge some")
    if read_only:
        if upper is not None or work is not None or empty is None:
            raise UsageError("a read-only overlay takes an empty directory, and neither upper nor work")
        lowers = [*lowers, empty]
    elif upper is None or work is None:
        raise UsageError("a writable overlay takes upper and work")
    elif not checked:
        check_upper(upper, work)
    try:
        with FsPaths() as paths, FsContext("overlay") as context:
            context.set(b"source", b"overlay")
            for lower in reversed(lowers):  # the kernel takes the topmost first
                context.set(b"lowerdir+", paths.value(lower))
            if upper is not None and work is not None:
                context.set(b"upperdir", paths.value(upper))
                context.set(b"workdir", paths.value(work))
                if volatile:
                    context.flag(b"volatile")
            context.set(b"index", b"off")
            context.set(b"redirect_dir", b"off")
            context.set(b"metacopy", b"off")
            context.set(b"xino", b"on")
            context.set(b"uuid", b"null")
            context.create()
            attributes = (MOUNT_ATTR_NODEV if nodev else 0) | (MOUNT_ATTR_RDONLY if read_only else 0)
            context.mount(attributes, target)
    except OSError as error:
        raise _explained(error, target, upper, work) from error


def check_upper(upper: AnyPath, work: AnyPath) -> None:
    """Say in advance why ``upper`` and ``work`` would not do.

    The kernel refuses some of this with a bare EINVAL and accepts some of it, to fail later with EXDEV or ESTALE.

    Raises:
        ConflictError: they are on different mounts or subvolumes, one is inside the other, or work isn't empty.
        UnsupportedError: their filesystem can't hold an upper.
        NotFoundError: one is missing.
    """
    upper, work = os.fsencode(upper), os.fsencode(work)
    pair = f"upper {printable(upper)} and work {printable(work)}"
    try:
        if os.stat(upper).st_dev != os.stat(work).st_dev or _mount_id(upper) != _mount_id(work):
            raise ConflictError(
                f"{pair} are on different mounts or subvolumes; overlayfs wants them on one: put them side by side"
            )
        real_upper, real_work = os.path.realpath(upper) + b"/", os.path.realpath(work) + b"/"
        if real_upper.startswith(real_work) or real_work.startswith(real_upper):
            raise ConflictError(f"{pair} lie inside each other; put them side by side")
        check_filesystem(upper)
        with os.scandir(work) as entries:
            if next(entries, None) is not None:
                raise ConflictError(f"work {printable(work)} is not empty; use a new directory")
    except OSError as error:
        raise from_os_error(error, f"check {pair}") from error


def check_filesystem(directory: AnyPath) -> None:
    """Raise UnsupportedError unless the filesystem of ``directory`` can hold an upper; OSError when it won't say."""
    shown = printable(os.fsencode(directory))
    kind = filesystem_name(directory)
    if kind in UNFIT_FOR_UPPER:
        raise UnsupportedError(
            f"{shown} is on {kind} and can't hold an upper: {UNFIT_FOR_UPPER[kind]}; use ext4, xfs, btrfs or tmpfs"
        )
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        raise UnsupportedError(f"{shown} is mounted read-only and can't hold an upper")
    try:
        os.setxattr(directory, b"trusted.imgtool.probe", b"y")
        os.removexattr(directory, b"trusted.imgtool.probe")
    except OSError as error:
        if error.errno == errno.ENODATA:
            return  # another process is probing too, and has removed it first
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        raise UnsupportedError(
            f"{shown} is on {kind}, which stores no trusted xattrs, and can't hold an upper; "
            "use ext4, xfs, btrfs or tmpfs"
        ) from error


def _mount_id(path: bytes) -> bytes:
    """The ``mnt_id`` line of the path's fdinfo: tells bind mounts of one filesystem apart."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        with open(f"/proc/self/fdinfo/{fd}", "rb") as stream:
            return next(line for line in stream if line.startswith(b"mnt_id:"))
    finally:
        os.close(fd)


def _explained(error: OSError, target: AnyPath, upper: AnyPath | None, work: AnyPath | None) -> ImgtoolError:
    what = f"mount overlay at {printable(os.fsencode(target))}"
    release = os.uname().release
    if error.errno in (errno.EPERM, errno.EACCES):
        return PermissionError_(f"{what}: it needs root (CAP_SYS_ADMIN): {error.strerror}")
    if error.errno == errno.ENODEV:
        return UnsupportedError(f"{what}: this kernel ({release}) has no overlayfs; `modprobe overlay` may help")
    if error.errno == errno.EINVAL and "lowerdir+" in (error.strerror or "") and _release(release) < (6, 8):
        return UnsupportedError(f"{what}: overlayfs of this kernel ({release}) has no lowerdir+, which came with 6.8")
    if error.errno == errno.EINVAL:
        if upper is not None and work is not None:
            try:
                check_upper(upper, work)
            except ImgtoolError as reason:
                return reason
        return UnsupportedError(f"{what}: {error.strerror}")
    if error.errno == errno.ELOOP:
        return UnsupportedError(f"{what}: filesystems are stacked too deep: {error.strerror}")
    return from_os_error(error, what)


def _release(text: str) -> tuple[int, ...]:
    """(6, 8) of "6.8.0-45-generic"."""
    numbers = []
    for part in text.split(".")[:2]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
