"""Files of an image, seen as a process inside it would: links stay within its root, nothing of the host is read."""

from __future__ import annotations

import errno
import os
import stat

from layerstore.errors import LimitError, MalformedError, from_os_error, printable
from overlay.mountapi import open_in_root

READ_LIMIT = 16 << 20
"""Bytes of a file that is read whole (/etc/passwd and its like)."""


def is_program(rootfs: str, path: str) -> bool | None:
    """Whether ``path`` of the tree at ``rootfs`` is a file with an execute bit; None when it isn't there."""
    root = os.open(rootfs, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = open_in_root(root, path, os.O_PATH)
    except OSError:
        return None
    finally:
        os.close(root)
    try:
        mode = os.fstat(fd).st_mode
    finally:
        os.close(fd)
    return stat.S_ISREG(mode) and mode & 0o111 != 0


def read_in_root(rootfs: str, path: str, limit: int = READ_LIMIT) -> bytes | None:
    """The content of the regular file ``path`` of the tree at ``rootfs``; None when it isn't there.

    A dangling link, or a link to something of the host, is a file that isn't there.

    Raises:
        MalformedError: it is there, and no regular file.
        LimitError: it is longer than ``limit``.
        UnavailableError, PermissionError_: it can't be read.
    """
    shown = printable(path)
    try:
        root = os.open(rootfs, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # a FIFO must not block us, nor a terminal become ours
            fd = open_in_root(root, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        finally:
            os.close(root)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise from_os_error(error, f"open {shown} of the image") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise MalformedError(f"{shown} of the image is not a regular file")
        content = b""
        while len(content) <= limit and (part := os.read(fd, limit + 1 - len(content))):
            content += part
    except OSError as error:
        raise from_os_error(error, f"read {shown} of the image") from error
    finally:
        os.close(fd)
    if len(content) > limit:
        raise LimitError(f"{shown} of the image has more than {limit} bytes")
    return content
