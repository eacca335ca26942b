from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlay import deletion
from overlay.deletion import DEPTH, remove_tree


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def nest(top: Path, depth: int) -> None:
    """Directories one in another, deeper than any path can say."""
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for level in range(depth):
        os.mkdir("d", dir_fd=fd)
        os.close(os.open(f"file{level % 3}", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)


def test_missing_is_fine(parent: int) -> None:
    remove_tree(parent, b"nothing")
    assert os.listdir(parent) == []


@pytest.mark.parametrize("depth", [0, 1, DEPTH - 2, DEPTH - 1, DEPTH, DEPTH + 1, 5 * DEPTH])
def test_any_depth(tmp_path: Path, parent: int, depth: int) -> None:
    nest(tmp_path / "tree", depth)
    before = len(os.listdir("/proc/self/fd"))
    remove_tree(parent, b"tree")
    assert os.listdir(parent) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_names_that_deep_directories_are_moved_to_may_be_taken(tmp_path: Path, parent: int) -> None:
    nest(tmp_path / "tree", DEPTH + 3)
    (tmp_path / "tree" / ".deeper-0").mkdir()
    (tmp_path / "tree" / ".deeper-1").write_text("x")
    remove_tree(parent, b"tree")
    assert os.listdir(parent) == []


def test_links_are_removed_and_not_followed(tmp_path: Path, parent: int) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("kept")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "directory").symlink_to(outside)
    (tree / "file").symlink_to(outside / "keep")
    (tree / "dangling").symlink_to("nowhere")
    os.link(outside / "keep", tree / "hard")
    remove_tree(parent, b"tree")
    assert os.listdir(parent) == ["outside"]
    assert (outside / "keep").read_text() == "kept"


def test_the_top_itself_may_be_a_link(tmp_path: Path, parent: int) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    remove_tree(parent, b"link")
    assert os.listdir(parent) == ["real"]


def test_all_kinds_of_entries_and_names(tmp_path: Path, parent: int) -> None:
    tree = os.fsencode(tmp_path) + b"/tree"
    os.mkdir(tree)
    os.mkfifo(tree + b"/fifo")
    for name in (b"a\nb", b"\xff\xfe", b"-rf", b" "):
        os.mkdir(tree + b"/" + name)
        os.close(os.open(tree + b"/" + name + b"/" + name, os.O_CREAT | os.O_WRONLY))
    remove_tree(parent, b"tree")
    assert os.listdir(parent) == []


def test_more_entries_than_a_batch(tmp_path: Path, parent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion._Batch, "SIZE", 7)
    for number in range(50):
        (tmp_path / f"tree/{number % 3}/{number}").mkdir(parents=True)
        (tmp_path / f"tree/file{number}").write_text("x")
    remove_tree(parent, b"tree")
    assert os.listdir(parent) == []
