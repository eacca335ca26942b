"""What this kernel and machine can do, tried rather than guessed: the content of ``doctor``.

Every finding is a trial or a look that leaves nothing behind. What works is said once; what doesn't comes with what it
is needed for and what to do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import stat
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from layerstore.digest import Digest
from layerstore.erofs.format import BLOCK_SIZE
from layerstore.erofs.layout import Chunked, Device, address
from layerstore.erofs.writer import write_image
from layerstore.errors import ImgtoolError
from layerstore.tree.inode import Attrs, Directory, File
from overlay.erofs import mount_erofs
from overlay.execution import SEARCH_PATH, usable_runtimes
from overlay.lazy.choice import EAGER, FUSE, choose_backend, fanotify_works, fuse_works
from overlay.lazy.fuse import find_library
from overlay.mountapi import filesystem_name
from overlay.overlayfs import UNFIT_FOR_UPPER, check_filesystem, mount_overlay
from overlay.scratch import unmount_all

Status = Literal["ok", "degraded", "missing"]

FREE_SPACE = 2 << 30
"""Bytes below which a node's root is called short of space."""

_NR_IO_URING_SETUP = 425


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: short and stable, for people and programs.
        status: ok, degraded (works, with a drawback) or missing.
        required: whether sandboxes can't be made without it.
        detail: what was found.
        advice: what it is needed for and what to do; empty when all is well.
    """

    name: str
    status: Status
    required: bool
    detail: str
    advice: str = ""


def probe(root: str) -> list[Finding]:
    """Look at everything, for a node with this root directory (which need not exist yet)."""
    where = _existing(os.path.abspath(root))
    findings = [_kernel(), _privilege(), _filesystem_type("erofs", "6.12"), _filesystem_type("overlay", "6.8")]
    findings += [_root_filesystem(where), _space(where)]
    findings.append(_trial(where))
    findings += [_pre_content(where), _fuse(), _lazy_backend(root), _ublk(), _io_uring(), _loop()]
    findings += _programs()
    return findings


def _existing(path: str) -> str:
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def _kernel() -> Finding:
    release = os.uname().release
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if numbers < (6, 12):
        advice = "EROFS mounts from files need Linux 6.12: use a newer kernel"
        return Finding("kernel", "missing", True, release, advice)
    if numbers < (6, 14):
        advice = "nothing to do: lazy loading goes by FUSE; fanotify, which costs less, needs Linux 6.14"
        return Finding("kernel", "degraded", True, release, advice)
    return Finding("kernel", "ok", True, release)


def _privilege() -> Finding:
    if os.geteuid() == 0:
        return Finding("root", "ok", True, "running as root")
    advice = "mounting needs root; convert, publish and inspect don't. Run up, run and down with sudo"
    return Finding("root", "missing", True, f"running as uid {os.geteuid()}", advice)


def _filesystem_type(name: str, since: str) -> Finding:
    with open("/proc/filesystems", encoding="ascii") as stream:
        if name in stream.read().split():
            return Finding(name, "ok", True, "in /proc/filesystems")
    advice = f"sandboxes need {name}: `modprobe {name}`, or a kernel of {since} or later that has it"
    return Finding(name, "missing", True, "not in /proc/filesystems (a module may load on first use)", advice)


def _root_filesystem(where: str) -> Finding:
    name = "root directory"
    kind = filesystem_name(where)
    detail = f"{where} on {kind}"
    if kind in ("tmpfs", "ramfs", "overlayfs", "erofs") or kind in UNFIT_FOR_UPPER:
        advice = "metadata images and uppers can't live there: choose --root on ext4, xfs or btrfs"
        advice += " (inside a container, on a volume)"
        return Finding(name, "missing", True, detail, advice)
    if os.geteuid() == 0:
        try:
            check_filesystem(where)
        except ImgtoolError as error:
            return Finding(name, "missing", True, detail, str(error))
        except OSError as error:
            return Finding(name, "degraded", True, detail, f"could not be tried: {error.strerror}")
    if kind not in ("ext4", "xfs", "btrfs"):
        advice = "nothing to do: lazy loading goes by FUSE; fanotify, which costs less, needs ext4, xfs or btrfs"
        return Finding(name, "degraded", True, detail, advice)
    return Finding(name, "ok", True, detail)


def _space(where: str) -> Finding:
    status = os.statvfs(where)
    free = status.f_bavail * status.f_frsize
    detail = f"{free / (1 << 30):.1f} GiB free in {where}, {status.f_favail} inodes"
    if free < FREE_SPACE or (status.f_files and status.f_favail < 100_000):
        advice = "the cache and all uppers share this space: free some, run `imgtool gc`, or choose another --root"
        return Finding("space", "degraded", False, detail, advice)
    return Finding("space", "ok", False, detail)


def _trial(where: str) -> Finding:
    """Mount a metadata image with a pack, an overlay over it, and read and write through both."""
    name = "mount trial"
    if os.geteuid() != 0:
        return Finding(name, "missing", True, "not tried", "run doctor as root to try it")
    try:
        with _private_directory(where) as directory:
            _try_mounts(directory)
    except ImgtoolError as error:
        return Finding(name, "missing", True, "file-backed EROFS under overlayfs does not work", str(error))
    except OSError as error:
        return Finding(name, "missing", True, "file-backed EROFS under overlayfs does not work", str(error))
    return Finding(name, "ok", True, "file-backed EROFS with a pack, overlayfs with lowerdir+ over it")


def _try_mounts(directory: str) -> None:
    pack, image = directory + "/pack", directory + "/image"
    data = os.urandom(2 * BLOCK_SIZE)
    with open(pack, "wb") as stream:
        stream.write(data)
    file = File(Attrs(stat.S_IFREG | 0o644, 0, 0, 0, 0), len(data), ())
    file.chunks = Chunked(0, array("Q", (address(1, 1), address(1, 0))))  # out of order, so that indexes are used
    tree = Directory(Attrs(stat.S_IFDIR | 0o755, 0, 0, 0, 0))
    tree.entries[b"file"] = file
    with open(image, "w+b") as stream:
        write_image(tree, [Device(Digest.of(data), 2)], stream)
    for name in ("lower", "upper", "work", "merged"):
        os.mkdir(f"{directory}/{name}")
    mount_erofs(image, [pack], directory + "/lower")
    mount_overlay(
        [directory + "/lower"], directory + "/upper", directory + "/work", directory + "/merged", volatile=True
    )
    with open(directory + "/merged/file", "r+b") as stream:
        if stream.read() != data[BLOCK_SIZE:] + data[:BLOCK_SIZE]:
            raise OSError(errno.EIO, "the kernel read wrong bytes from a pack; don't use this kernel")
        stream.write(b"more")
    if not os.path.exists(directory + "/upper/file"):
        raise OSError(errno.EIO, "a write did not reach the upper")


@contextmanager
def _private_directory(where: str) -> Iterator[str]:
    """A directory on the root's filesystem; what gets mounted in it, and itself, are gone afterwards."""
    directory = tempfile.mkdtemp(prefix=".imgtool-probe-", dir=where)
    try:
        yield directory
    finally:
        for name in ("merged", "lower"):
            unmount_all(f"{directory}/{name}")
        shutil.rmtree(directory)


def _pre_content(where: str) -> Finding:
    name = "fanotify pre-content"
    if os.geteuid() != 0:
        return Finding(name, "missing", False, "not tried", "run doctor as root to try it")
    why = fanotify_works(where)
    if why is not None:
        advice = "lazy loading goes by FUSE without it; it needs Linux 6.14 with CONFIG_FANOTIFY_ACCESS_PERMISSIONS, "
        advice += "and --root on ext4, xfs or btrfs"
        return Finding(name, "missing", False, why, advice)
    return Finding(name, "ok", False, f"works in {where}")


def _fuse() -> Finding:
    if os.geteuid() != 0:
        return Finding("FUSE", "missing", False, "not tried", "run doctor as root to try it")
    why = fuse_works()
    if why is not None:
        advice = "needed for lazy loading where the kernel has no pre-content events: `modprobe fuse`, Debian's fuse3, "
        advice += "and `pip install mfusepy`, whichever is missing"
        return Finding("FUSE", "missing", False, why, advice)
    name, (major, minor) = find_library()
    return Finding("FUSE", "ok", False, f"/dev/fuse, {name} of release {major}.{minor}, mfusepy")


def _lazy_backend(root: str) -> Finding:
    """What mode auto is here."""
    name = "lazy backend"
    if os.geteuid() != 0:
        return Finding(name, "missing", False, "not tried", "run doctor as root to try it")
    backend, why = choose_backend(root)
    detail = f"{backend}: {why}"
    if backend == EAGER:
        advice = "sandboxes start when all of their data have been fetched: see what the two above need"
        return Finding(name, "missing", False, detail, advice)
    if backend == FUSE:
        advice = "nothing to do: a read through FUSE costs more than one with fanotify, also of data that are here"
        return Finding(name, "degraded", False, detail, advice)
    return Finding(name, "ok", False, detail)


def _ublk() -> Finding:
    advice = "nothing to do: disks for microVMs, which are yet to come, will need `modprobe ublk_drv`"
    return _device("ublk", "/dev/ublk-control", advice)


def _loop() -> Finding:
    return _device("loop", "/dev/loop-control", "`modprobe loop`; --scratch needs it")


def _device(name: str, path: str, advice: str) -> Finding:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return Finding(name, "missing", False, f"{path}: {error.strerror}", advice)
    return Finding(name, "ok", False, path)


def _io_uring() -> Finding:
    """Set up a ring with no parameters: EFAULT says that the call exists and is allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(_NR_IO_URING_SETUP, 1, None)
    number = ctypes.get_errno()
    if number == errno.EFAULT:
        return Finding("io_uring", "ok", False, "io_uring_setup works")
    advice = "ublk needs it: a kernel with CONFIG_IO_URING and kernel.io_uring_disabled=0"
    return Finding("io_uring", "missing", False, f"io_uring_setup: {os.strerror(number)}", advice)


def _programs() -> Iterator[Finding]:
    def find(program: str) -> str | None:
        return shutil.which(program, path=SEARCH_PATH)

    runtimes = list(usable_runtimes())
    if runtimes:
        yield Finding("OCI runtime", "ok", False, ", ".join(runtimes))
    else:
        advice = "run falls back to a chroot with its own mounts and pids; install runc for more isolation"
        yield Finding("OCI runtime", "degraded", False, "neither runc nor a crun that works here", advice)
    for program, package, use in (("mkfs.ext4", "e2fsprogs", "--scratch"), ("mount", "mount", "--scratch")):
        path = find(program)
        if path:
            yield Finding(program, "ok", False, path)
        else:
            yield Finding(program, "missing", False, "not installed", f"{use} needs it: install {package}")
