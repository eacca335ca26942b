"""What mode auto is on a machine, and why: every reason in one line."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from layerstore.errors import UnsupportedError
from overlay.lazy import choice, fanotify


def failing(number: int) -> Callable[..., int]:
    def fail(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def group() -> int:
    return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One on which everything works, as far as it is not asked."""
    monkeypatch.setattr(fanotify, "init", group)
    monkeypatch.setattr(fanotify, "mark", lambda group, fd: None)
    monkeypatch.setattr(choice, "find_library", lambda: ("libfuse3.so.3", (3, 14)))
    monkeypatch.setattr(choice, "FUSE_DEVICE", "/dev/null")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return monkeypatch


def test_fanotify_comes_first_and_nothing_is_left(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    backend, why = choice.choose_backend(str(tmp_path / "not" / "yet"))
    assert backend == choice.FANOTIFY
    assert why.startswith("pre-content events work on ") and why.endswith(f" at {tmp_path}")
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("call", "number", "why"),
    [
        ("init", errno.EPERM, "it needs root (CAP_SYS_ADMIN)"),
        ("init", errno.EINVAL, "the kernel lacks CONFIG_FANOTIFY_ACCESS_PERMISSIONS"),
        ("init", errno.EMFILE, os.strerror(errno.EMFILE)),
        ("mark", errno.EINVAL, f"kernel {os.uname().release} is older than 6.14"),
        ("mark", errno.EOPNOTSUPP, " has no pre-content events; ext4, xfs and btrfs have"),
        ("mark", errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ],
)
def test_fuse_where_fanotify_does_not_work(
    machine: pytest.MonkeyPatch, tmp_path: Path, call: str, number: int, why: str
) -> None:
    machine.setattr(fanotify, call, failing(number))
    reason = choice.fanotify_works(str(tmp_path))
    assert reason is not None and why in reason
    assert choice.choose_backend(str(tmp_path)) == (choice.FUSE, f"FUSE works, and fanotify doesn't: {reason}")


def test_eager_where_neither_works(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing() -> tuple[str, tuple[int, int]]:
        raise UnsupportedError("there is no libfuse 3")

    machine.setattr(fanotify, "init", failing(errno.EINVAL))
    machine.setattr(choice, "find_library", missing)
    assert choice.choose_backend(str(tmp_path)) == (
        choice.EAGER,
        "neither fanotify works (the kernel lacks CONFIG_FANOTIFY_ACCESS_PERMISSIONS) nor FUSE (there is no libfuse 3)",
    )
    machine.setattr(choice, "FUSE_DEVICE", str(tmp_path / "none"))
    assert choice.fuse_works() == f"{tmp_path}/none: No such file or directory"
    machine.setattr(os, "geteuid", lambda: 1000)
    assert choice.fuse_works() == "it needs root"
