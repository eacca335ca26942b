"""Which processes keep a mount busy."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

from layerstore.errors import printable


@dataclass(frozen=True, slots=True)
class Holder:
    """A process with a file, directory or program on the mount; ``how`` is cwd, root, exe or "fd N"."""

    pid: int
    command: str
    how: str

    def __str__(self) -> str:
        return f"{self.command} (pid {self.pid}, {self.how})"


def holders_of(device: int) -> list[Holder]:
    """The processes that use the filesystem with this st_dev, by pid.

    It reads all of /proc and is for error messages. Processes in other mount namespaces count as well.
    """
    return holders_by_device({device}).get(device, [])


def holders_by_device(devices: Collection[int]) -> dict[int, list[Holder]]:
    """:func:`holders_of` for many filesystems in one look at /proc; those that nobody uses are left out."""
    found: dict[int, list[Holder]] = {}
    if devices:
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
            for device, how in _held_by(f"/proc/{pid}", devices).items():
                found.setdefault(device, []).append(Holder(pid, _command(str(pid)), how))
    return found


def _held_by(process: str, devices: Collection[int]) -> dict[int, str]:
    """Which of the filesystems the process uses, and the first way in which it does."""
    held: dict[int, str] = {}
    for link in ("cwd", "root", "exe"):
        device = _device(f"{process}/{link}")
        if device in devices:
            held.setdefault(device, link)
    try:
        fds = os.listdir(f"{process}/fd")
    except OSError:
        return held  # it has ended
    for fd in fds:
        device = _device(f"{process}/fd/{fd}")
        if device in devices:
            held.setdefault(device, f"fd {fd}")
    return held


def _device(path: str) -> int:
    try:
        return os.stat(path).st_dev
    except OSError:
        return -1


def _command(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/comm", "rb") as stream:
            return printable(stream.read().rstrip(b"\n"))
    except OSError:
        return "?"
