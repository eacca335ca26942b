"""Files that appear whole or not at all, and what killed writers leave."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from layerstore.durable import reclaim_temporaries, replace_file, temporary_name


def test_a_file_is_replaced_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"one", b"two" * 1000):
        replace_file(str(path), content)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["file"]


def test_a_failed_replacement_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    replace_file(str(path), b"old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        replace_file(str(path), b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_old_unfinished_files_are_reclaimed_and_young_and_finished_ones_kept(tmp_path: Path) -> None:
    folder = tmp_path / "packs" / "sha256"
    folder.mkdir(parents=True)
    old, young = (Path(temporary_name(str(folder / name))) for name in ("a", "b"))
    for path in (old, young):
        path.write_bytes(b"half")
    finished = folder / "finished"
    finished.write_bytes(b"whole")
    for path in (old, finished):
        os.utime(path, (1, 1))
    assert reclaim_temporaries(str(tmp_path), older_than=3600) == [str(old)]
    assert sorted(os.listdir(folder)) == sorted([young.name, "finished"])
    assert reclaim_temporaries(str(tmp_path / "missing"), older_than=0) == []
