"""Mounts EROFS images for tests, with the system calls themselves, independently of what is tested."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.tools import lacking, need_root

FSCONFIG_SET_STRING = 1
FSCONFIG_CMD_CREATE = 6
MOUNT_ATTR_RDONLY = 1
MOVE_MOUNT_F_EMPTY_PATH = 4
MNT_DETACH = 2
AT_FDCWD = -100
_FSOPEN, _FSCONFIG, _FSMOUNT, _MOVE_MOUNT = 430, 431, 432, 429
"""The same numbers on all architectures (asm-generic/unistd.h)."""

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def erofs_mounted(image: Path, devices: Sequence[Path], target: Path) -> Iterator[Path]:
    """Mount an image, file-backed and read-only, with its packs in order; unmounted at the end."""
    context = _call(_FSOPEN, b"erofs", 0)
    try:
        _call(_FSCONFIG, context, FSCONFIG_SET_STRING, b"source", bytes(image), 0)
        for device in devices:
            _call(_FSCONFIG, context, FSCONFIG_SET_STRING, b"device", bytes(device), 0)
        _call(_FSCONFIG, context, FSCONFIG_CMD_CREATE, None, None, 0)
        mount = _call(_FSMOUNT, context, 0, MOUNT_ATTR_RDONLY)
    finally:
        os.close(context)
    try:
        target.mkdir(exist_ok=True)
        _call(_MOVE_MOUNT, mount, b"", AT_FDCWD, bytes(target), MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.close(mount)
    try:
        yield target
    finally:
        if _libc.umount2(bytes(target), MNT_DETACH):
            raise OSError(ctypes.get_errno(), "umount", str(target))


def require_file_backed_erofs() -> None:
    """End the test unless the kernel can mount EROFS from a regular file (Linux 6.12)."""
    need_root()
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    if release < (6, 12):
        lacking(f"needs Linux 6.12 for file-backed EROFS mounts; this is {platform.release()}")
    if "erofs" not in Path("/proc/filesystems").read_text():
        lacking("this kernel has no EROFS")


def _call(number: int, *arguments: object) -> int:
    converted = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *converted))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)} (system call {number} {arguments!r})")
    return result
