"""What is mounted: ``/proc/<pid>/mountinfo``, as proc_pid_mountinfo(5) lays it out.

The kernel writes space, tab, newline and backslash (and ``#``, and for some filesystems comma, colon and ``=``) as
three octal digits. Paths are bytes. A mount point that has been deleted ends with ``//deleted``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from layerstore.errors import MalformedError, printable
from overlay.mountapi import AnyPath

_OCTAL = re.compile(rb"\\([0-3][0-7]{2})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line. ``device`` is (major, minor); ``options`` are the mount's, ``super_options`` the filesystem's."""

    id: int
    parent: int
    device: tuple[int, int]
    root: bytes
    target: bytes
    options: bytes
    fs_type: bytes
    source: bytes
    super_options: bytes


def unescape(field: bytes) -> bytes:
    """Undo the octal escapes in one pass, so that an escaped backslash never starts another escape."""
    return _OCTAL.sub(lambda match: bytes((int(match[1], 8),)), field)


def parse(text: bytes) -> list[Mount]:
    """Raises MalformedError, naming the line, when it isn't mountinfo."""
    return [_parse_line(line) for line in text.split(b"\n") if line]


def _parse_line(line: bytes) -> Mount:
    fields = line.split(b" ")
    try:
        dash = fields.index(b"-", 6)
        major, _, minor = fields[2].partition(b":")
        return Mount(
            id=int(fields[0]),
            parent=int(fields[1]),
            device=(int(major), int(minor)),
            root=unescape(fields[3]),
            target=unescape(fields[4]),
            options=fields[5],
            fs_type=unescape(fields[dash + 1]),
            source=unescape(fields[dash + 2]),
            super_options=fields[dash + 3],
        )
    except (ValueError, IndexError):
        raise MalformedError(f"not a line of mountinfo: {printable(line[:200])}") from None


def read(pid: int | None = None) -> list[Mount]:
    """All mounts in the namespace of ``pid`` (None: of this process), parents before their children.

    Reading it takes time in proportion to the mounts of the machine; nothing that is called often may do it.
    """
    with open(f"/proc/{'self' if pid is None else pid}/mountinfo", "rb", buffering=0) as stream:
        return parse(stream.readall())


def below(directory: AnyPath, mounts: list[Mount]) -> Iterator[Mount]:
    """Those mounted at ``directory`` or under it, the latest first: the order to unmount in."""
    top = directory.encode("utf-8", "surrogateescape") if isinstance(directory, str) else directory
    top = top.rstrip(b"/")
    for mount in reversed(mounts):
        if mount.target == top or mount.target.startswith(top + b"/"):
            yield mount
