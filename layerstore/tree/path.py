"""Names in a layer, as tuples of components.

The policy is containerd's: a name is joined to the image root after a lexical clean, so a leading ``/`` and parts that
are empty or ``.`` mean nothing, and ``..`` takes a component away but never leaves the root. Bytes are otherwise
exact: a backslash, a line feed or a byte that is no UTF-8 is part of the name.
"""

from __future__ import annotations

from layerstore.errors import MalformedError, printable

NAME_MAX = 255
"""Bytes in one component (linux/limits.h)."""

PATH_MAX = 4096
"""Bytes in a path, the final NUL included (linux/limits.h): no system call can name a longer one."""

Parts = tuple[bytes, ...]


def clean(name: bytes) -> Parts:
    """The components of a member's name; ``()`` is the root.

    Raises:
        MalformedError: it holds a NUL, or it or one of its components is longer than Linux can name.
    """
    if b"\0" in name:
        raise MalformedError(f"{shortened(name)}: the name holds a NUL byte")
    parts: list[bytes] = []
    for part in name.split(b"/"):
        if part == b"..":
            del parts[-1:]
        elif part and part != b".":
            parts.append(part)
    for part in parts:
        check_component(part, name)
    if sum(map(len, parts)) + len(parts) > PATH_MAX:
        raise MalformedError(f"{shortened(name)}: the path is longer than {PATH_MAX - 1:,} bytes")
    return tuple(parts)


def check_component(part: bytes, where: bytes) -> None:
    """Refuse a component that no directory can hold."""
    if len(part) > NAME_MAX:
        raise MalformedError(f"{shortened(where)}: a component is longer than {NAME_MAX} bytes")


def steps(target: bytes) -> list[bytes]:
    """The components of a symlink's target, ``..`` kept: what it means depends on where the link is."""
    return [part for part in target.split(b"/") if part and part != b"."]


def shortened(name: bytes) -> str:
    """A name of any length for a message."""
    return printable(name) if len(name) <= 200 else f"{printable(name[:200])}… ({len(name):,} bytes)"
