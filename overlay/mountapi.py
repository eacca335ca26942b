"""The kernel's mount interface, by ctypes.

Constants and structures carry the names of ``<linux/mount.h>``, ``<linux/openat2.h>``, ``<linux/magic.h>``,
``<linux/prctl.h>``, ``<linux/stat.h>`` and ``<sched.h>``. The calls that came with Linux 5.2 and later have the same
number on every architecture (``<asm-generic/unistd.h>``) and go through ``syscall(2)``: C libraries lack wrappers for
some of them.
Every failure is an OSError with errno and path; failures of an :class:`FsContext` end with the kernel's own words.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Collection
from ctypes import c_char_p, c_int, c_long, c_size_t, c_uint, c_ulong, c_void_p
from types import TracebackType
from typing import Any

from layerstore.errors import printable

AT_FDCWD = -100

FSOPEN_CLOEXEC = 0x1
FSMOUNT_CLOEXEC = 0x1
FSCONFIG_SET_FLAG = 0
FSCONFIG_SET_STRING = 1
FSCONFIG_CMD_CREATE = 6
FSCONFIG_VALUE_MAX = 255
"""Bytes of a string value; fs/fsopen.c copies 256 with the NUL."""

MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOATIME = 0x10

MOVE_MOUNT_F_EMPTY_PATH = 0x4
MOVE_MOUNT_BENEATH = 0x200
"""Since Linux 6.5."""

OPEN_TREE_CLONE = 0x1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
AT_RECURSIVE = 0x8000
AT_EMPTY_PATH = 0x1000

STATX_MNT_ID = 0x1000
"""Since Linux 5.8."""
_STX_MNT_ID = 0x90
"""Offset of ``stx_mnt_id``, 64 bits, in ``struct statx``, which takes 256 bytes."""

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_MOVE = 0x2000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
MS_STRICTATIME = 1 << 24

MNT_FORCE = 0x1
MNT_DETACH = 0x2
UMOUNT_NOFOLLOW = 0x8

CLONE_NEWNS = 0x0002_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWPID = 0x2000_0000

PR_SET_PDEATHSIG = 1
PR_CAPBSET_DROP = 24

CAPABILITY_NUMBERS = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_FOWNER": 3,
    "CAP_FSETID": 4,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_SETPCAP": 8,
    "CAP_NET_BIND_SERVICE": 10,
    "CAP_NET_RAW": 13,
    "CAP_SYS_CHROOT": 18,
    "CAP_MKNOD": 27,
    "CAP_AUDIT_WRITE": 29,
    "CAP_SETFCAP": 31,
}
"""Those of <linux/capability.h> that sandboxes are given."""

RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_IN_ROOT = 0x10

BTRFS_SUPER_MAGIC = 0x9123683E
CIFS_SUPER_MAGIC = 0xFF534D42
ECRYPTFS_SUPER_MAGIC = 0xF15F
EROFS_SUPER_MAGIC_V1 = 0xE0F5E1E2
EXFAT_SUPER_MAGIC = 0x2011BAB0
EXT4_SUPER_MAGIC = 0xEF53
FUSE_SUPER_MAGIC = 0x65735546
MSDOS_SUPER_MAGIC = 0x4D44
NFS_SUPER_MAGIC = 0x6969
OVERLAYFS_SUPER_MAGIC = 0x794C7630
RAMFS_MAGIC = 0x858458F6
SMB2_SUPER_MAGIC = 0xFE534D42
TMPFS_MAGIC = 0x01021994
V9FS_MAGIC = 0x01021997
XFS_SUPER_MAGIC = 0x58465342

FILESYSTEM_NAMES = {
    BTRFS_SUPER_MAGIC: "btrfs",
    CIFS_SUPER_MAGIC: "cifs",
    ECRYPTFS_SUPER_MAGIC: "ecryptfs",
    EROFS_SUPER_MAGIC_V1: "erofs",
    EXFAT_SUPER_MAGIC: "exfat",
    EXT4_SUPER_MAGIC: "ext4",
    FUSE_SUPER_MAGIC: "fuse",
    MSDOS_SUPER_MAGIC: "vfat",
    NFS_SUPER_MAGIC: "nfs",
    OVERLAYFS_SUPER_MAGIC: "overlayfs",
    RAMFS_MAGIC: "ramfs",
    SMB2_SUPER_MAGIC: "smb3",
    TMPFS_MAGIC: "tmpfs",
    V9FS_MAGIC: "9p",
    XFS_SUPER_MAGIC: "xfs",
}


class open_how(ctypes.Structure):
    """``struct open_how`` of <linux/openat2.h>, 24 bytes."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)


def _syscall(*argtypes: Any) -> Any:
    """A prototype of syscall(2); the first argument of each call is the number."""
    return ctypes.CFUNCTYPE(c_long, c_long, *argtypes, use_errno=True)(("syscall", _libc))


_NR_open_tree, _open_tree = 428, _syscall(c_int, c_char_p, c_uint)
_NR_move_mount, _move_mount = 429, _syscall(c_int, c_char_p, c_int, c_char_p, c_uint)
_NR_fsopen, _fsopen = 430, _syscall(c_char_p, c_uint)
_NR_fsconfig, _fsconfig = 431, _syscall(c_int, c_uint, c_char_p, c_char_p, c_int)
_NR_fsmount, _fsmount = 432, _syscall(c_int, c_uint, c_uint)
_NR_openat2, _openat2 = 437, _syscall(c_int, c_char_p, ctypes.POINTER(open_how), c_size_t)

_mount = _libc.mount
_mount.argtypes = (c_char_p, c_char_p, c_char_p, c_ulong, c_char_p)
_umount2 = _libc.umount2
_umount2.argtypes = (c_char_p, c_int)
_unshare = _libc.unshare
_unshare.argtypes = (c_int,)
_pivot_root = _libc.pivot_root
_pivot_root.argtypes = (c_char_p, c_char_p)
_statfs = _libc.statfs
_statfs.argtypes = (c_char_p, c_void_p)
_statx = _libc.statx
_statx.argtypes = (c_int, c_char_p, c_int, c_uint, c_void_p)
_prctl = _libc.prctl
_prctl.argtypes = (c_int, c_ulong, c_ulong, c_ulong, c_ulong)

AnyPath = str | bytes


def _failed(call: str, path: AnyPath | None = None, log: str = "") -> OSError:
    number = ctypes.get_errno()
    text = f"{call}: {os.strerror(number)}"
    if log:
        text += f"; kernel: {log}"
    return OSError(number, text, path)


class FsContext:
    """A filesystem being configured: ``fsopen`` to ``fsmount``. Closing it before ``mount`` leaves nothing behind."""

    __slots__ = ("_closed", "fd", "fs_type")

    def __init__(self, fs_type: str) -> None:
        """Raises OSError: ENODEV when the kernel lacks ``fs_type``, EPERM without CAP_SYS_ADMIN."""
        self.fs_type = fs_type
        self._closed = True
        self.fd = int(_fsopen(_NR_fsopen, fs_type.encode(), FSOPEN_CLOEXEC))
        if self.fd < 0:
            raise _failed(f"fsopen {fs_type}")
        self._closed = False

    def __enter__(self) -> FsContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self.fd)

    def set(self, key: bytes, value: bytes) -> None:
        """One ``key=value``: at most 255 bytes, taken as they are (no escapes, commas are nothing special)."""
        if _fsconfig(_NR_fsconfig, self.fd, FSCONFIG_SET_STRING, key, value, 0) < 0:
            raise self._failed(f"{self.fs_type} option {key.decode()}={printable(value)}")

    def flag(self, key: bytes) -> None:
        if _fsconfig(_NR_fsconfig, self.fd, FSCONFIG_SET_FLAG, key, None, 0) < 0:
            raise self._failed(f"{self.fs_type} option {key.decode()}")

    def create(self) -> None:
        """Make the superblock; here the kernel checks that the options fit together."""
        if _fsconfig(_NR_fsconfig, self.fd, FSCONFIG_CMD_CREATE, None, None, 0) < 0:
            raise self._failed(f"{self.fs_type} mount")

    def detached(self, attributes: int) -> int:
        """A descriptor of the created filesystem, attached nowhere; closing it unmounts. ``MOUNT_ATTR_*`` flags."""
        mount_fd = int(_fsmount(_NR_fsmount, self.fd, FSMOUNT_CLOEXEC, attributes))
        if mount_fd < 0:
            raise self._failed(f"fsmount {self.fs_type}")
        return mount_fd

    def mount(self, attributes: int, target: AnyPath, *, beneath: bool = False) -> None:
        """Attach the created filesystem at ``target``, or ``beneath`` what is mounted there; ``MOUNT_ATTR_*`` flags."""
        mount_fd = self.detached(attributes)
        try:  # closing a mount that was not moved anywhere unmounts it
            flags = MOVE_MOUNT_F_EMPTY_PATH | (MOVE_MOUNT_BENEATH if beneath else 0)
            if _move_mount(_NR_move_mount, mount_fd, b"", AT_FDCWD, os.fsencode(target), flags):
                raise _failed("move_mount", target)
        finally:
            os.close(mount_fd)

    def log(self) -> str:
        """What the kernel says about this context: its messages, severity cut off, joined into one line."""
        lines = []
        while True:
            try:
                message = os.read(self.fd, 4096)
            except OSError:  # ENODATA: that was the last one
                break
            if not message:
                break
            lines.append(printable(message.strip().removeprefix(b"e ").removeprefix(b"w ").removeprefix(b"i ")))
        return "; ".join(lines)

    def _failed(self, what: str) -> OSError:
        number = ctypes.get_errno()
        log = self.log()
        ctypes.set_errno(number)
        return _failed(what, log=log)


def mount(source: AnyPath, target: AnyPath, fs_type: str, flags: int, data: bytes = b"") -> None:
    """``mount(2)``, for short options: the kernel cuts ``data`` silently at one page."""
    if len(data) >= 4096:
        raise OSError(errno.EINVAL, f"{len(data)} bytes of mount options; mount(2) takes 4095", target)
    if _mount(os.fsencode(source), os.fsencode(target), fs_type.encode(), flags, data or None):
        raise _failed(f"mount {fs_type or printable(os.fsencode(source))}", target)


def umount(target: AnyPath, flags: int = 0) -> None:
    """``umount2(2)``, never through a symbolic link. EBUSY: in use; EINVAL: not a mount point."""
    if _umount2(os.fsencode(target), flags | UMOUNT_NOFOLLOW):
        raise _failed("umount", target)


def unshare(flags: int) -> None:
    if _unshare(flags):
        raise _failed("unshare")


def pivot_root(new_root: AnyPath, put_old: AnyPath) -> None:
    if _pivot_root(os.fsencode(new_root), os.fsencode(put_old)):
        raise _failed("pivot_root", new_root)


def open_tree(directory_fd: int, path: AnyPath, flags: int) -> int:
    """A descriptor of the mount at ``path``, or with OPEN_TREE_CLONE of a detached copy of it."""
    fd = int(_open_tree(_NR_open_tree, directory_fd, os.fsencode(path), flags))
    if fd < 0:
        raise _failed("open_tree", path)
    return fd


def mount_id(fd: int) -> int:
    """The mount that ``fd`` was opened through, which tells copies of one mount apart. Numbers of dead ones return."""
    buffer = ctypes.create_string_buffer(256)
    if _statx(fd, b"", AT_EMPTY_PATH, STATX_MNT_ID, buffer):
        raise _failed("statx")
    return ctypes.c_uint64.from_buffer(buffer, _STX_MNT_ID).value


def open_in_root(root_fd: int, path: AnyPath, flags: int) -> int:
    """Open ``path`` as a process whose root is ``root_fd`` would: absolute links and ``..`` stay inside."""
    how = open_how(flags=flags | os.O_CLOEXEC, mode=0, resolve=RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
    while True:
        fd = int(_openat2(_NR_openat2, root_fd, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(open_how)))
        if fd >= 0:
            return fd
        if ctypes.get_errno() != errno.EAGAIN:  # EAGAIN: a rename raced with ".."; openat2(2) says try again
            raise _failed("openat2", path)


def filesystem_magic(path: AnyPath) -> int:
    """``f_type`` of ``statfs(2)``: the kind of filesystem at ``path``, one of the ``*_MAGIC`` values."""
    buffer = ctypes.create_string_buffer(256)  # struct statfs is 120 bytes on 64-bit machines
    if _statfs(os.fsencode(path), buffer):
        raise _failed("statfs", path)
    return c_long.from_buffer(buffer).value & 0xFFFF_FFFF


def filesystem_name(path: AnyPath) -> str:
    magic = filesystem_magic(path)
    return FILESYSTEM_NAMES.get(magic, f"filesystem {magic:#x}")


def die_with_parent(signal_number: int) -> None:
    """Have this process sent ``signal_number`` when the thread that forked it ends (PR_SET_PDEATHSIG)."""
    if _prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0):
        raise _failed("prctl PR_SET_PDEATHSIG")


def drop_capabilities(keep: Collection[str]) -> None:
    """Take all but ``keep`` out of the bounding set: programs that this process executes can't have them.

    The names are those of <linux/capability.h>.
    """
    kept = {CAPABILITY_NUMBERS[name] for name in keep}
    for number in range(64):
        if number not in kept and _prctl(PR_CAPBSET_DROP, number, 0, 0, 0):
            if ctypes.get_errno() == errno.EINVAL:
                return  # past the last one that this kernel knows
            raise _failed("prctl PR_CAPBSET_DROP")
