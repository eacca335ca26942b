"""``--scratch SIZE``: an upper that can't grow beyond it.

Upper and work live in an ext4 filesystem of that size in a sparse file; at the limit, programs in the sandbox see
ENOSPC. One file behind one loop device is safe; it is several devices of one EROFS image that loop gets wrong.
The loop device frees itself when the filesystem is unmounted (LO_FLAGS_AUTOCLEAR, set by mount(8)).
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
from collections.abc import Collection, Iterator

from layerstore.errors import UnavailableError, UnsupportedError, UsageError, from_os_error, printable
from overlay.mountapi import MNT_DETACH, umount

IMAGE = "scratch.img"
MOUNT_POINT = "scratch"
MINIMUM = 4 << 20
"""Bytes below which ext4's own structures leave too little."""

LOOP_CLR_FD = 0x4C01
"""<linux/loop.h>."""

_MKFS_OPTIONS = (
    "-q",
    "-F",
    *("-t", "ext4"),
    *("-b", "4096"),
    *("-i", "8192"),  # bytes per inode: source trees and package caches are small files
    *("-m", "0"),  # no share for root alone: root is who writes here
    *("-O", "^has_journal"),  # it doesn't outlive the machine
    *("-E", "nodiscard,lazy_itable_init=1"),
)
_MOUNT_OPTIONS = "loop,nodev,noatime,noinit_itable"
"""noinit_itable: no background thread zeroes inode tables that would turn the sparse file into a full one."""


def create_scratch(directory: str, size: int) -> str:
    """Make and mount the filesystem in ``directory``; returns the mount point, with empty ``upper`` and ``work``.

    Undone when it fails.

    Raises:
        UsageError: ``size`` is below the minimum.
        UnsupportedError: mkfs.ext4 or mount is missing, or the kernel has no loop devices.
        UnavailableError: one of them failed.
        NoSpaceError: the node's disk is full.
    """
    if size < MINIMUM:
        raise UsageError(f"scratch of {size} bytes is too small for a filesystem; the least is {MINIMUM}")
    image, mount_point = os.path.join(directory, IMAGE), os.path.join(directory, MOUNT_POINT)
    try:
        fd = os.open(image, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size // 4096 * 4096)
        finally:
            os.close(fd)
        os.mkdir(mount_point, 0o700)
        _run("mkfs.ext4", *_MKFS_OPTIONS, image)
        _run("mount", "-t", "ext4", "-o", _MOUNT_OPTIONS, image, mount_point)
        os.mkdir(os.path.join(mount_point, "upper"), 0o755)
        os.mkdir(os.path.join(mount_point, "work"), 0o700)
    except BaseException as error:
        remove_scratch(directory)
        if isinstance(error, OSError):
            raise from_os_error(error, f"create scratch of {size} bytes") from error
        raise
    return mount_point


def remove_scratch(directory: str) -> None:
    """Unmount and delete what :func:`create_scratch` made, or a part of it."""
    image, mount_point = os.path.join(directory, IMAGE), os.path.join(directory, MOUNT_POINT)
    unmount_all(mount_point)
    for remove, path in ((os.rmdir, mount_point), (os.unlink, image)):
        try:
            remove(path)
        except FileNotFoundError:
            pass


def unmount_all(mount_point: str) -> int:
    """Unmount whatever is stacked on ``mount_point``, detaching what is busy; returns how many mounts that were."""
    count = 0
    while True:
        try:
            umount(mount_point, MNT_DETACH)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):
                return count
            raise
        count += 1


def stray_loops(below: str, mounted: Collection[tuple[int, int]]) -> Iterator[str]:
    """Free, and name, loop devices whose file is below the directory ``below`` and that aren't mounted.

    Args:
        below: where images of scratches are.
        mounted: (major, minor) of what is mounted.
    """
    prefix = os.fsencode(below).rstrip(b"/") + b"/"
    for device in sorted(name for name in os.listdir("/sys/block") if name.startswith("loop")):
        try:
            with open(f"/sys/block/{device}/loop/backing_file", "rb") as stream:
                backing = stream.read()
        except OSError:
            continue  # not bound
        if not backing.startswith(prefix):
            continue
        fd = os.open(f"/dev/{device}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            number = os.fstat(fd).st_rdev
            if (os.major(number), os.minor(number)) in mounted:
                continue
            fcntl.ioctl(fd, LOOP_CLR_FD)
        except OSError as error:
            if error.errno != errno.ENXIO:  # it has just freed itself
                raise
            continue
        finally:
            os.close(fd)
        yield f"/dev/{device}"


def _run(program: str, *arguments: str) -> None:
    path = shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin")
    if path is None:
        package = {"mkfs.ext4": "e2fsprogs", "mount": "mount"}[program]
        raise UnsupportedError(f"--scratch needs {program}; install {package}")
    ran = subprocess.run(
        [path, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"},
    )
    if ran.returncode:
        said = printable(ran.stderr.strip().replace(b"\n", b"; "))[:500]
        raise UnavailableError(f"{program} for --scratch failed with {ran.returncode}: {said}")
