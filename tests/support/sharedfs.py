"""File systems that raw packs may lie on: what a store in ``backing`` looks like through them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from overlay.mountapi import MNT_DETACH, mount, umount
from support.tools import need_tool

KINDS = ("ext4", "tmpfs", "overlayfs", "fuse")
PATIENCE = 20.0
"""Seconds for a FUSE server to appear."""


class Shared:
    """``path`` shows what is put into ``backing``; ``server`` is the process behind it, if there is one."""

    def __init__(self, backing: Path, path: Path, server: subprocess.Popen[bytes] | None = None) -> None:
        self.backing = backing
        self.path = path
        self.server = server

    def kill(self) -> None:
        """The server dies, as it does with its machine."""
        assert self.server is not None
        self.server.kill()
        self.server.wait()


@contextmanager
def shared(kind: str, top: Path) -> Iterator[Shared]:
    """A file system of this kind below ``top``; gone at the end."""
    backing = top / "backing"
    backing.mkdir(parents=True)
    if kind == "ext4":  # of the tests' own directory
        yield Shared(backing, backing)
        return
    place = top / "shared"
    place.mkdir()
    server = None
    if kind == "tmpfs":
        mount("tmpfs", str(backing), "tmpfs", 0, b"size=256m")
        os.rmdir(place)
        place = backing
    elif kind == "overlayfs":
        for name in ("lower", "work"):
            (top / name).mkdir()
        options = f"lowerdir={top}/lower,upperdir={backing},workdir={top}/work".encode()
        mount("overlay", str(place), "overlay", 0, options)
    else:
        server = subprocess.Popen([need_tool("bindfs"), "-f", str(backing), str(place)])
    try:
        deadline = time.monotonic() + PATIENCE
        while server is not None and not os.path.ismount(place):
            assert server.poll() is None and time.monotonic() < deadline, "bindfs did not start"
            time.sleep(0.01)  # there is nothing to wait on but the mount itself
        yield Shared(backing, place, server)
    finally:
        try:
            umount(str(place), MNT_DETACH)
        finally:
            if server is not None:
                server.kill()
                server.wait()
