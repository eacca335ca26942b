"""How this machine loads lazily: what `auto` chooses, and why. Found out by trying; nothing is left behind."""

from __future__ import annotations

import errno
import importlib.util
import os
import tempfile

from layerstore.errors import UnsupportedError, printable
from overlay.lazy import fanotify
from overlay.lazy.fuse import find_library
from overlay.mountapi import filesystem_name

FANOTIFY, FUSE, EAGER = "fanotify", "fuse", "eager"
FUSE_DEVICE = "/dev/fuse"


def choose_backend(root: str) -> tuple[str, str]:
    """(fanotify, fuse or eager, why in one line) for a node with this root, which need not exist yet."""
    no_fanotify = fanotify_works(root)
    if no_fanotify is None:
        where = _existing(root)
        return FANOTIFY, f"pre-content events work on {filesystem_name(where)} at {printable(where)}"
    no_fuse = fuse_works()
    if no_fuse is None:
        return FUSE, f"FUSE works, and fanotify doesn't: {no_fanotify}"
    return EAGER, f"neither fanotify works ({no_fanotify}) nor FUSE ({no_fuse})"


def fanotify_works(root: str) -> str | None:
    """None where pre-content events can be had for files of ``root``; else why not, in one line."""
    where = _existing(root)
    try:
        group = fanotify.init()
    except OSError as error:
        if error.errno == errno.EPERM:
            return "it needs root (CAP_SYS_ADMIN)"
        if error.errno == errno.EINVAL:
            return "the kernel lacks CONFIG_FANOTIFY_ACCESS_PERMISSIONS"
        return f"{error.strerror}"
    try:
        with tempfile.TemporaryFile(dir=where) as stream:
            fanotify.mark(group, stream.fileno())
    except OSError as error:
        if error.errno == errno.EINVAL:
            return f"kernel {os.uname().release} is older than 6.14"
        if error.errno == errno.EOPNOTSUPP:
            return f"{filesystem_name(where)} at {printable(where)} has no pre-content events; ext4, xfs and btrfs have"
        return f"{error.strerror} in {printable(where)}"
    finally:
        os.close(group)
    return None


def fuse_works() -> str | None:
    """None where a FUSE server can be started; else why not, in one line."""
    if os.geteuid() != 0:
        return "it needs root"
    try:
        os.close(os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"{FUSE_DEVICE}: {error.strerror}"
    if importlib.util.find_spec("mfusepy") is None:
        return "the Python package mfusepy is not installed"
    try:
        find_library()
    except UnsupportedError as error:
        return str(error)
    return None


def _existing(path: str) -> str:
    path = os.path.abspath(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path
