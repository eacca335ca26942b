from __future__ import annotations

import dataclasses
import io
import os
import tarfile
from pathlib import Path

import pytest
from support.layouts import compress, tar_of

from layerstore.errors import CorruptError, LimitError, MalformedError, NotFoundError
from layerstore.limits import DEFAULT_LIMITS, Limits
from layerstore.oci.archive import LINKS, ArchiveFiles


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    path = tmp_path / "scratch"
    path.mkdir()
    return path


def opened(tmp_path: Path, data: bytes, limits: Limits = DEFAULT_LIMITS) -> ArchiveFiles:
    path = tmp_path / "x.tar"
    path.write_bytes(data)
    return ArchiveFiles(str(path), scratch=str(tmp_path / "scratch"), limits=limits, warn=lambda line: None)


def content(files: ArchiveFiles, name: str) -> bytes | None:
    file = files.find(name)
    return None if file is None else file.read(name, 1 << 20)


def links(*pairs: tuple[str, str, bytes]) -> bytes:
    """A tar of links of the given type, after a file ``a/file``."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        file = tarfile.TarInfo("./a//file")
        file.size = 4
        archive.addfile(file, io.BytesIO(b"data"))
        for name, target, kind in pairs:
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, target
            archive.addfile(link)
    return buffer.getvalue()


@pytest.mark.parametrize("compression", ["", "gzip", "zstd", "xz", "bzip2"])
def test_members_by_name(tmp_path: Path, scratch: Path, compression: str) -> None:
    long = "d/" * 80 + "x" * 120
    data = compress(tar_of({"a/": None, "a/b": b"1", "c": b"", long: b"2" * 5000}), compression)
    with opened(tmp_path, data) as files:
        assert len(list(scratch.iterdir())) == (1 if compression else 0)
        assert content(files, "a/b") == content(files, "./a//b") == content(files, "x/../a/b") == b"1"
        assert content(files, "c") == b""
        for name in ("a/b", "c"):
            file = files.find(name)
            assert file is not None and not file.is_whole
        assert content(files, long) == b"2" * 5000
        assert content(files, "a/c") is None
        with pytest.raises(MalformedError, match="not a plain regular file"):
            files.find("a")
    assert list(scratch.iterdir()) == []


def test_the_last_of_a_name_counts(tmp_path: Path, scratch: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in (("a", b"old"), ("./a", b"new")):
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, io.BytesIO(data))
    with opened(tmp_path, buffer.getvalue()) as files:
        assert content(files, "a") == b"new"


def test_links_lead_to_their_files(tmp_path: Path, scratch: Path) -> None:
    data = links(
        ("b/link", "../a/file", tarfile.SYMTYPE),
        ("chain", "b/link", tarfile.SYMTYPE),
        ("dir", "a", tarfile.SYMTYPE),
        ("hard", "a/file", tarfile.LNKTYPE),
        ("b/hard", "chain", tarfile.LNKTYPE),
        ("dangling", "nowhere", tarfile.SYMTYPE),
    )
    with opened(tmp_path, data) as files:
        for name in ("b/link", "chain", "dir/file", "hard", "b/hard", "dir/../a/file"):
            assert content(files, name) == b"data", name
        assert files.find("dangling") is None


def test_links_never_lead_out(tmp_path: Path, scratch: Path) -> None:
    data = links(
        ("up", "../x.tar", tarfile.SYMTYPE),
        ("b/upper", "../../x.tar", tarfile.SYMTYPE),
        ("root", "/etc/passwd", tarfile.SYMTYPE),
        ("loop", "loop", tarfile.SYMTYPE),
        ("fork", "fork/fork", tarfile.SYMTYPE),
        *((f"l{n}", f"l{n + 1}", tarfile.SYMTYPE) for n in range(LINKS + 1)),
    )
    with opened(tmp_path, data) as files:
        for name in ("up", "b/upper", "root", "../x.tar", "a/../../x"):
            with pytest.raises(MalformedError, match="leads out of"):
                files.find(name)
        for name in ("loop", "fork", "l0"):
            with pytest.raises(MalformedError, match=f"more than {LINKS} links"):
                files.find(name)
        with pytest.raises(MalformedError, match="a name of 10000 characters"):
            files.find("a/" * 5000)


@pytest.mark.parametrize("compression", ["", "gzip", "zstd", "xz"])
def test_damage_is_loud(tmp_path: Path, scratch: Path, compression: str) -> None:
    data = compress(tar_of({"a": os.urandom(20_000), "b": os.urandom(20_000)}), compression)
    for damaged in (data[:15_000], data[:25_000] + bytes(512) + data[25_512:]):
        if not compression and len(damaged) == len(data):
            damaged = data[:20_992] + b"\1" * 512 + data[21_504:]  # the header of b
        with pytest.raises(MalformedError, match=r"x\.tar: "):
            opened(tmp_path, damaged)
        assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("data", [b"not a tar at all" * 100, b"PK\3\4" + bytes(600)])
def test_not_an_archive(tmp_path: Path, scratch: Path, data: bytes) -> None:
    with pytest.raises(MalformedError, match=r"x\.tar: not a tar archive"):
        opened(tmp_path, data)


def test_limits(tmp_path: Path, scratch: Path) -> None:
    bomb = compress(tar_of({"a": bytes(10 << 20)}), "gzip")
    with pytest.raises(LimitError, match=r"x\.tar: more than the limit of 1048576 bytes"):
        opened(tmp_path, bomb, dataclasses.replace(DEFAULT_LIMITS, layer_bytes=1 << 20))
    with pytest.raises(LimitError, match=r"x\.tar: .*limit"):
        opened(tmp_path, tar_of({"a": b"", "b": b""}), dataclasses.replace(DEFAULT_LIMITS, entries=1))
    assert list(scratch.iterdir()) == []


def test_files_that_are_none(tmp_path: Path, scratch: Path) -> None:
    def attempt(path: Path) -> None:
        ArchiveFiles(str(path), scratch=str(scratch), limits=DEFAULT_LIMITS, warn=lambda line: None)

    with pytest.raises(NotFoundError, match="nowhere"):
        attempt(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(MalformedError, match="not a regular file"):
            attempt(path)


def test_an_archive_that_becomes_shorter(tmp_path: Path, scratch: Path) -> None:
    with opened(tmp_path, tar_of({"a": b"x" * 5000})) as files:
        file = files.find("a")
        assert file is not None
        os.truncate(file.path, 1000)
        with pytest.raises(CorruptError, match="ends early"):
            file.read("a", 1 << 20)
        with pytest.raises(LimitError, match="limit of 10"):
            file.read("a", 10)


def test_closing_twice_is_fine(tmp_path: Path, scratch: Path) -> None:
    files = opened(tmp_path, compress(tar_of({"a": b""}), "gzip"))
    for leftover in scratch.iterdir():
        leftover.unlink()
    files.close()
    files.close()
    assert list(scratch.iterdir()) == []
