"""System calls that fail on purpose, for files that are on their way to a name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def _is_staged(file: int) -> bool:
    try:
        return ".tmp-" in os.path.basename(os.readlink(f"/proc/self/fd/{file}"))
    except OSError:
        return False


@contextmanager
def failing(call: str, error: int, *, after: int = 0) -> Iterator[None]:
    """``os.write``, ``os.fsync`` or ``os.close`` of staged files fails from its ``after + 1``th call on.

    As in the kernel, a close that reports an error has closed nonetheless.
    """
    real: Callable[..., Any] = getattr(os, call)
    left = after

    def faulty(file: int, *args: Any) -> Any:
        nonlocal left
        if not _is_staged(file):
            return real(file, *args)
        left -= 1
        if left >= 0:
            return real(file, *args)
        if call == "close":
            real(file)
        raise OSError(error, os.strerror(error))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, faulty)
        yield


@contextmanager
def short_writes(limit: int) -> Iterator[None]:
    """No write of a staged file takes more than ``limit`` bytes."""
    real = os.write

    def short(file: int, data: Any) -> int:
        return real(file, memoryview(data)[:limit] if _is_staged(file) else data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", short)
        yield


@contextmanager
def fsync_for_free() -> Iterator[None]:
    """Nothing waits for the disk. A killed process loses nothing that it has written, only a killed machine does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield
