"""The archive as a whole: digests over every byte, promises, limits, and nothing left behind."""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import io
import lzma
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard
from support import tars
from support.tars import Trickle, directory, file, tar

from layerstore.digest import Digest
from layerstore.errors import (
    CorruptError,
    LimitError,
    MalformedError,
    NoSpaceError,
    NotFoundError,
    UnavailableError,
    UsageError,
)
from layerstore.limits import Limits
from layerstore.tar import pump
from layerstore.tar.archive import LayerArchive
from layerstore.tar.compression import Compression
from layerstore.tar.member import Member
from layerstore.tar.spool import Spool

BODIES = {b"a": b"first", b"big": bytes(range(256)) * 2048, b"c": b"last"}
TAR = tar(directory("d/"), *(file(name, body) for name, body in BODIES.items()))


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


COMPRESSORS: dict[Compression, Callable[[bytes], bytes]] = {
    Compression.NONE: bytes,
    Compression.GZIP: gzip.compress,
    Compression.ZSTD: zstd,
    Compression.XZ: lzma.compress,
    Compression.BZIP2: bz2.compress,
}


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[str]:
    """A directory that has to be empty again, and no thread of ours may be left."""
    path = tmp_path / "scratch"
    path.mkdir()
    yield str(path)
    assert list(path.iterdir()) == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("layer-")] == []


def archive(source: object, scratch: str, **options: object) -> LayerArchive:
    return LayerArchive(source, **{"scratch": scratch, "warn": pytest.fail, **options})  # type: ignore[arg-type]


def content(layer: LayerArchive, member: Member) -> bytes:
    return b"".join(layer.source.read_at(at, length) for _, length, at in member.data)


def read_all(layer: LayerArchive) -> dict[bytes, bytes]:
    return {member.path: content(layer, member) for member in layer.members()}


def swallow(layer: LayerArchive) -> None:
    with layer:
        for _ in layer.members():
            pass
        layer.finish()


@pytest.mark.case("Z07")
@pytest.mark.parametrize("compression", list(Compression))
@pytest.mark.parametrize("by_path", [True, False])
def test_members_data_and_digests(compression: Compression, by_path: bool, scratch: str, tmp_path: Path) -> None:
    blob = COMPRESSORS[compression](TAR)
    (tmp_path / "blob").write_bytes(blob)
    seen: list[int] = []
    source = tmp_path / "blob" if by_path else io.BytesIO(blob)
    with archive(source, scratch, expected=Digest.of(blob), expected_size=len(blob), progress=seen.append) as layer:
        assert layer.compression is compression
        assert read_all(layer) == {b"d/": b"", **BODIES}
        assert layer.finish() == (Digest.of(blob), len(blob), Digest.of(TAR), len(TAR))
        assert layer.finish().diff_id == Digest.of(TAR)
        assert read_all(layer) == {b"d/": b"", **BODIES}
    assert sum(seen) == len(blob)


@pytest.mark.parametrize("compression", list(Compression))
def test_streams_may_come_in_small_pieces(compression: Compression, scratch: str) -> None:
    small = tar(file("a", b"x" * 700))
    with archive(Trickle(COMPRESSORS[compression](small), [1, 2, 7]), scratch) as layer:
        assert layer.compression is compression
        assert read_all(layer) == {b"a": b"x" * 700}
        assert layer.finish().diff_id == Digest.of(small)


def test_a_plain_file_needs_no_scratch_space(tmp_path: Path) -> None:
    path = tmp_path / "layer.tar"
    path.write_bytes(TAR)
    with archive(path, str(tmp_path / "missing")) as layer:
        assert read_all(layer) == {b"d/": b"", **BODIES}
        assert layer.finish() == (Digest.of(TAR), len(TAR), Digest.of(TAR), len(TAR))
    with pytest.raises(NotFoundError, match="create temporary file"):
        archive(io.BytesIO(TAR), str(tmp_path / "missing")).__enter__()


@pytest.mark.case("Z01")
@pytest.mark.parametrize("split", [512, 1024, 1536, 700])
def test_every_gzip_member_belongs_to_the_layer(split: int, scratch: str) -> None:
    blob = gzip.compress(TAR[:split]) + gzip.compress(TAR[split:])
    with archive(io.BytesIO(blob), scratch) as layer:
        assert read_all(layer).keys() == {b"d/", *BODIES}
        assert layer.finish().diff_id == Digest.of(TAR)


@pytest.mark.case("Z05")
@pytest.mark.parametrize(
    "rest", [bytes(10_240 - 1024), tar(file("other")), b"\xff" * 3_000_000], ids=["record", "tar", "junk"]
)
@pytest.mark.parametrize("compression", [Compression.NONE, Compression.GZIP])
def test_the_diff_id_is_over_all_of_the_layer(
    rest: bytes, compression: Compression, scratch: str, tmp_path: Path
) -> None:
    data = TAR + rest
    path = tmp_path / "blob"
    path.write_bytes(COMPRESSORS[compression](data))
    for source in (path, io.BytesIO(path.read_bytes())):
        with archive(source, scratch) as layer:
            assert read_all(layer).keys() == {b"d/", *BODIES}
            assert layer.finish()[2:] == (Digest.of(data), len(data))


@pytest.mark.case("Z03")
def test_the_diff_id_is_over_every_zstd_frame(scratch: str) -> None:
    compressor = zstandard.ZstdCompressor()
    blob = b"".join(compressor.compress(TAR[at : at + 100_000]) for at in range(0, len(TAR), 100_000))
    blob += b"\x5e\x2a\x4d\x18\x03\0\0\0end"
    with archive(io.BytesIO(blob), scratch) as layer:
        assert read_all(layer).keys() == {b"d/", *BODIES}
        assert layer.finish().diff_id == Digest.of(TAR)


@pytest.mark.case("T41")
@pytest.mark.parametrize("blob", [b"", gzip.compress(b""), zstd(b"")], ids=["nothing", "gzip", "zstd"])
def test_nothing_is_an_empty_layer(blob: bytes, scratch: str, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(blob)
    for source in (io.BytesIO(blob), tmp_path / "blob"):
        warnings: list[str] = []
        with archive(source, scratch, warn=warnings.append) as layer:
            assert list(layer.members()) == []
            assert layer.finish() == (Digest.of(blob), len(blob), Digest.of(b""), 0)
        assert len(warnings) == 1


@pytest.mark.case("T42")
def test_what_is_neither_tar_nor_compressed_is_called_so(scratch: str) -> None:
    layer = archive(io.BytesIO(b"\x1f\x8b but no deflate" * 100), scratch)
    with layer, pytest.raises(MalformedError, match="not a tar archive, nor one compressed by gzip"):
        list(layer.members())


# promises


@pytest.mark.parametrize("by_path", [True, False])
@pytest.mark.parametrize("compression", list(Compression))
def test_a_damaged_blob_is_corrupt_when_its_digest_is_known(
    compression: Compression, by_path: bool, scratch: str, tmp_path: Path
) -> None:
    blob = COMPRESSORS[compression](TAR)
    for at in (3, 520, len(blob) // 2, len(blob) - 3):
        damaged = bytearray(blob)
        damaged[min(at, len(blob) - 1)] ^= 0x10
        (tmp_path / "blob").write_bytes(damaged)
        source = tmp_path / "blob" if by_path else io.BytesIO(damaged)
        with pytest.raises(CorruptError, match="another digest") as caught:
            swallow(archive(source, scratch, expected=Digest.of(blob), expected_size=len(blob)))
        assert caught.value.expected == str(Digest.of(blob))
        assert caught.value.actual == str(Digest.of(damaged))


def test_a_malformed_blob_with_the_right_digest_is_malformed(scratch: str) -> None:
    for data in (TAR[:600], gzip.compress(TAR)[:-5], b"\xff" * 2000, zstd(TAR) + b"x"):
        with pytest.raises(MalformedError):
            swallow(archive(io.BytesIO(data), scratch, expected=Digest.of(data), expected_size=len(data)))


@pytest.mark.parametrize("by_path", [True, False])
@pytest.mark.parametrize("compression", [Compression.NONE, Compression.GZIP])
@pytest.mark.parametrize("difference", [-1, 1, 1000])
def test_a_blob_of_another_size_is_corrupt(
    compression: Compression, by_path: bool, difference: int, scratch: str, tmp_path: Path
) -> None:
    blob = COMPRESSORS[compression](TAR)
    (tmp_path / "blob").write_bytes(blob)
    source = tmp_path / "blob" if by_path else io.BytesIO(blob)
    with pytest.raises(CorruptError, match="another size"):
        swallow(archive(source, scratch, expected=Digest.of(blob), expected_size=len(blob) - difference))


def test_reading_stops_one_byte_behind_the_promised_size(scratch: str) -> None:
    for promised in (0, 5, 100, 700_000):
        stream = io.BytesIO(os.urandom(10) + bytes(3_000_000))
        with pytest.raises(CorruptError, match=f"expected {promised}, got more than {promised}"):
            swallow(archive(stream, scratch, expected_size=promised))
        assert stream.tell() == promised + 1


def test_other_digest_algorithms(scratch: str) -> None:
    blob = gzip.compress(TAR)
    expected = Digest("sha512", hashlib.sha512(blob).hexdigest())
    with archive(io.BytesIO(blob), scratch, expected=expected, diff_algorithm="sha512") as layer:
        assert layer.finish()[::2] == (expected, Digest("sha512", hashlib.sha512(TAR).hexdigest()))
    with archive(io.BytesIO(TAR), scratch, diff_algorithm="sha512") as layer:
        assert layer.finish()[::2] == (Digest.of(TAR), Digest("sha512", hashlib.sha512(TAR).hexdigest()))
    wrong = Digest("sha512", hashlib.sha512(b"").hexdigest())
    with pytest.raises(CorruptError, match="sha512"):
        swallow(archive(io.BytesIO(blob), scratch, expected=wrong))


# limits


@pytest.mark.case("Z10")
@pytest.mark.parametrize("compression", [kind for kind in Compression if kind is not Compression.NONE])
@pytest.mark.parametrize("where", ["inside a member", "behind the end marker"])
def test_a_bomb_meets_the_limit(compression: Compression, where: str, scratch: str) -> None:
    size = 12 << 20
    data = tars.header("bomb", size=size) + bytes(size) + tars.END if where == "inside a member" else TAR + bytes(size)
    blob = COMPRESSORS[compression](data)
    assert len(blob) < size // 500
    limits = Limits(layer_bytes=4 << 20)
    with archive(io.BytesIO(blob), scratch, limits=limits) as layer:
        with pytest.raises(LimitError, match="more than 4194304 bytes when decompressed"):
            for _ in layer.members():
                pass
            layer.finish()
        assert os.fstat(layer.source._fd).st_size <= limits.layer_bytes  # type: ignore[attr-defined]
    with archive(io.BytesIO(blob), scratch, limits=Limits(layer_bytes=len(data))) as layer:
        assert layer.finish().diff_size == len(data)


@pytest.mark.case("Z10", "Z18")
def test_a_plain_file_meets_the_limit_before_anything_is_read(scratch: str, tmp_path: Path) -> None:
    path = tmp_path / "sparse.tar"
    path.write_bytes(tars.header("huge", size=3 << 40))
    os.truncate(path, (3 << 40) + 2048)
    with pytest.raises(LimitError, match="layer is 3298534885376 bytes; 274877906944 are the limit"):
        archive(path, scratch).__enter__()
    layer = archive(path, scratch, limits=Limits(layer_bytes=1 << 43, file_bytes=2 << 40))
    with layer, pytest.raises(LimitError, match='"huge"'):
        list(layer.members())


@pytest.mark.case("Z03")
def test_a_window_that_is_too_large_is_a_limit(scratch: str) -> None:
    with pytest.raises(LimitError, match="window too large"):
        swallow(archive(io.BytesIO(b"\x28\xb5\x2f\xfd\x00\xa8" + bytes(100)), scratch))


# timing, threads and failures


class Gated(io.RawIOBase):
    """Gives its head, and the rest once the gate is open."""

    def __init__(self, data: bytes, head: int) -> None:
        self._data = io.BytesIO(data)
        self._head = head
        self.gate = threading.Event()

    def read(self, size: int = -1, /) -> bytes:
        if self._data.tell() >= self._head:
            assert self.gate.wait(60)
            return self._data.read(size)
        return self._data.read(min(size, self._head - self._data.tell()))


def test_reads_wait_for_data_that_has_not_come_yet(scratch: str) -> None:
    stream = Gated(TAR, 1024)
    with archive(stream, scratch) as layer, ThreadPoolExecutor(4) as threads:
        found = [threads.submit(layer.source.read_at, at, 1000) for at in range(0, 8000, 1000)]
        beyond = threads.submit(layer.source.read_at, len(TAR) - 10, 11)
        stream.gate.set()
        assert b"".join(one.result() for one in found) == TAR[:8000]
        with pytest.raises(MalformedError, match="truncated layer"):
            beyond.result()


def test_leaving_early_ends_the_threads(scratch: str) -> None:
    blob = gzip.compress(TAR * 20, 1)
    with archive(io.BytesIO(blob), scratch) as layer:
        assert next(layer.members()).path == b"d/"
    with pytest.raises(UsageError, match="not open"):
        layer.finish()
    layer.close()


def test_an_error_in_the_block_is_not_replaced(scratch: str) -> None:
    with pytest.raises(KeyboardInterrupt), archive(io.BytesIO(gzip.compress(TAR)), scratch):
        raise KeyboardInterrupt


def test_leaving_does_not_wait_for_a_stream_that_stalls(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump, "_PATIENCE", 0.01)
    stream = Gated(gzip.compress(TAR), 20)
    with archive(stream, scratch):
        pass
    stalled = [thread for thread in threading.enumerate() if thread.name.startswith("layer-")]
    stream.gate.set()
    for thread in stalled:
        thread.join(60)
    assert len(stalled) <= 1


def test_waiting_readers_are_told_that_the_archive_was_closed(scratch: str) -> None:
    spool = Spool.create(scratch)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(spool.read_at, 0, 1)
        spool.close()
        with pytest.raises(UsageError, match="closed"):
            waiting.result()


class Failing(io.RawIOBase):
    def __init__(self, data: bytes, error: Exception) -> None:
        self._data = io.BytesIO(data)
        self._error = error

    def read(self, size: int = -1, /) -> bytes:
        data = self._data.read(size)
        if not data:
            raise self._error
        return data


@pytest.mark.parametrize("compression", list(Compression))
def test_a_stream_that_fails_is_not_a_layer_that_ends(compression: Compression, scratch: str) -> None:
    cut = (
        COMPRESSORS[compression](TAR)[:-600] if compression is Compression.NONE else COMPRESSORS[compression](TAR)[:-20]
    )
    for error, shown in (
        (OSError(errno.EIO, "Input/output error"), UnavailableError),
        (NotFoundError("gone"), NotFoundError),
        (ValueError("a bug"), ValueError),
    ):
        with pytest.raises(shown):
            swallow(archive(Failing(cut, error), scratch))


def test_a_full_disk_is_reported_as_such(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(1000)
        return real(fd, data[:1000], offset)

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(NoSpaceError, match="free space"):
        swallow(archive(io.BytesIO(gzip.compress(TAR * 10, 1)), scratch))


def test_a_failing_progress_ends_the_archive(scratch: str) -> None:
    def progress(_: int) -> None:
        raise RuntimeError("display is gone")

    with pytest.raises(RuntimeError, match="display"):
        swallow(archive(io.BytesIO(TAR), scratch, progress=progress))


def test_a_missing_file(scratch: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="open layer"):
        archive(tmp_path / "none", scratch).__enter__()
    with pytest.raises(UsageError):
        list(archive(tmp_path / "none", scratch).members())


def test_a_pipe_by_path(scratch: str, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(TAR,))
    writer.start()
    with archive(path, scratch) as layer:
        assert read_all(layer).keys() == {b"d/", *BODIES}
        assert layer.finish().diff_id == Digest.of(TAR)
    writer.join()


def test_a_file_that_shrinks_while_it_is_read(scratch: str, tmp_path: Path) -> None:
    path = tmp_path / "layer.tar"
    path.write_bytes(TAR)
    with archive(path, scratch) as layer:
        found = list(layer.members())
        os.truncate(path, 600)
        with pytest.raises(CorruptError, match="shorter"):
            content(layer, found[-1])


def test_errors_of_the_pump_come_behind_what_can_still_be_read(scratch: str) -> None:
    good = tar(*(file(f"f{i}", b"x" * 1000) for i in range(3000)), end=b"")
    blob = gzip.compress(good)[:-8]
    for _ in range(5):
        names: list[bytes] = []
        with archive(io.BytesIO(blob), scratch) as layer, pytest.raises(MalformedError, match="its gzip data ends"):
            names.extend(member.path for member in layer.members())
        assert len(names) == 3000
