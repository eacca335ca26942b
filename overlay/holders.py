"""Which processes keep a mount busy."""

from __future__ import annotations

import os
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
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            how = _how_held(f"/proc/{name}", device)
            if how is not None:
                found.append(Holder(int(name), _command(name), how))
    return sorted(found, key=lambda holder: holder.pid)


def _how_held(process: str, device: int) -> str | None:
    for link in ("cwd", "root", "exe"):
        if _on_device(f"{process}/{link}", device):
            return link
    try:
        fds = os.listdir(f"{process}/fd")
    except OSError:
        return None  # it has ended
    return next((f"fd {fd}" for fd in fds if _on_device(f"{process}/fd/{fd}", device)), None)


def _on_device(path: str, device: int) -> bool:
    try:
        return os.stat(path).st_dev == device
    except OSError:
        return False


def _command(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/comm", "rb") as stream:
            return printable(stream.read().rstrip(b"\n"))
    except OSError:
        return "?"
