"""Files that appear whole or not at all: a temporary name in the same directory, fsync, rename, fsync of the directory.

``docs/architecture.md`` has the order and why; the stores use the same steps with bytes that arrive in pieces.
"""

from __future__ import annotations

import os
import secrets
import time

_PREFIX = ".tmp-"


def temporary_name(path: str) -> str:
    """A name beside ``path`` that no other process or thread uses."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f"{_PREFIX}{os.getpid()}-{secrets.token_hex(6)}-{name[:32]}")


def sync_directory(path: str) -> None:
    """Make renames in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: str, data: bytes) -> None:
    """Give ``path`` this content, durably."""
    temporary = temporary_name(path)
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
        sync_directory(os.path.dirname(path))
    finally:
        remove_quietly(temporary)


def reclaim_temporaries(directory: str, *, older_than: float) -> list[str]:
    """Remove what killed writers left below ``directory``: temporary names that nothing has written to for so long.

    Args:
        directory: a tree of this node; it may not exist.
        older_than: seconds.
    """
    removed = []
    now = time.time()
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            if name.startswith(_PREFIX) and now - os.stat(path).st_mtime > older_than:
                remove_quietly(path)
                removed.append(path)
    return sorted(removed)


def remove_quietly(path: str) -> None:
    """Remove a file that may be gone already."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
