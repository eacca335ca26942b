"""The FUSE server without FUSE: wants, and packs whose every byte is right or an error."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.fuse_server import PATIENCE, Worker, until
from support.lazy_images import SparsePack, noise
from support.tools import CHECKOUT

from layerstore.cache.framemap import MISSING, UNVERIFIED, FrameMap
from layerstore.errors import MalformedError, UnsupportedError
from overlay.lazy import fuse, packfiles, wants
from overlay.lazy.link import Link
from overlay.lazy.packfiles import PackFiles
from overlay.lazy.wants import Wants

FRAME = 8192
SIZE = 10 * FRAME + 4096
"""Ten whole frames and a short one."""


def quiet(*what: object, **fields: object) -> None:
    pass


@pytest.fixture
def pack(tmp_path: Path) -> Iterator[SparsePack]:
    made = SparsePack(tmp_path / "pack", noise(SIZE, 3), frame=FRAME)
    yield made
    made.close()


class Front:
    """Files and wants of a server, with what its own loop does for the worker's link done by a thread."""

    def __init__(self, pack: SparsePack, deadline: float = PATIENCE) -> None:
        self.pack = pack
        self.rung = threading.Event()
        self.wants = Wants(deadline, self.rung.set, quiet)
        self.files = PackFiles(self.wants)
        self.links: list[Link] = []
        self.workers: list[Worker] = []
        self._threads: list[threading.Thread] = []
        self.guard()
        self.handle = self.files.open(pack.hex)

    def guard(self) -> str:
        return self.files.guard(self.pack.hex, [os.dup(fd) for fd in self.pack.descriptors])

    def connect(self) -> Link:
        """Attach a new link; the worker's end."""
        mine, its = Link.pair()
        self.links += [mine]
        self.wants.attach(mine)
        return its

    def work(self, decide: Callable[[Any], str] = lambda want: "fill") -> Worker:
        worker = Worker(self.connect(), [self.pack], decide)
        self.workers.append(worker)
        thread = threading.Thread(target=self._hear, args=(self.links[-1],))
        thread.start()
        self._threads.append(thread)
        return worker

    def _hear(self, link: Link) -> None:
        link.setblocking(True)  # the order of messages is all that matters here
        while received := link.receive():
            self.wants.answer(received[0])

    def read(self, offset: int = 0, length: int = SIZE, pid: int = 0) -> bytes:
        return self.files.read(self.handle, offset, length, lambda: pid)

    def fails(self, offset: int = 0, length: int = SIZE, pid: int = 0) -> bool:
        with pytest.raises(OSError) as caught:
            self.read(offset, length, pid)
        return caught.value.errno == errno.EIO

    def close(self) -> None:
        self.wants.close()
        for worker in self.workers:
            if worker.link.fileno() >= 0:
                worker.close()
        for thread in self._threads:
            thread.join(PATIENCE)
        for link in self.links:
            link.close()


@pytest.fixture
def front(pack: SparsePack) -> Iterator[Front]:
    made = Front(pack)
    yield made
    made.close()


def short(pack: SparsePack, deadline: float) -> Front:
    return Front(pack, deadline)


def test_what_is_there_is_read_without_asking(front: Front, pack: SparsePack) -> None:
    pack.fill()
    for offset in (0, 1, FRAME - 1, FRAME, 3 * FRAME + 5, SIZE - 1):
        for length in (1, 4096, FRAME, 2 * FRAME + 3, SIZE):
            assert front.read(offset, length) == pack.data[offset : offset + length]
    assert front.read(SIZE, 4096) == front.read(SIZE + 4096, 1) == b""
    assert front.wants.asked == 0


def test_what_was_asked_for_is_touched_whether_or_not_it_was_there(front: Front, pack: SparsePack) -> None:
    pack.fill([3, 4])
    front.work()
    front.read(3 * FRAME, FRAME + 1)
    front.read(7 * FRAME, 1)
    assert [number for number, byte in enumerate(pack.frames.touched()) if byte] == [3, 4, 7]


@pytest.mark.parametrize("state", [MISSING, UNVERIFIED])
def test_only_what_is_missing_is_asked_for_in_runs(front: Front, pack: SparsePack, state: int) -> None:
    pack.fill([0, 3, 4, 9])
    for number in (1, 2, 5, 6, 7, 8, 10):
        pack.frames.set(number, state)
    worker = front.work()
    assert front.read(pid=77) == pack.data
    assert [(want["first"], want["count"]) for want in worker.wants] == [(1, 2), (5, 4), (10, 1)]
    assert {want["pack"] for want in worker.wants} == {pack.hex}
    assert {want["pid"] for want in worker.wants} == {77}
    assert len({want["want"] for want in worker.wants}) == 3
    assert all(0 < want["deadline"] - time.monotonic() < PATIENCE for want in worker.wants)


def test_many_readers_of_a_frame_are_one_want(front: Front, pack: SparsePack) -> None:
    worker = front.work(lambda want: "hold")
    with ThreadPoolExecutor(20) as pool:
        reads = [pool.submit(front.read, 100 * n, 100, n) for n in range(20)]
        until(lambda: front.files.waits == 20 and worker.held)
        worker.let_go()
        assert b"".join(read.result(PATIENCE) for read in reads) == pack.data[:2000]
    assert len(worker.wants) == 1


def test_reads_that_overlap_ask_only_for_the_rest(front: Front, pack: SparsePack) -> None:
    worker = front.work(lambda want: "hold")
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(front.read, 0, 2 * FRAME)
        until(lambda: len(worker.held) == 1)
        other = pool.submit(front.read, FRAME, 2 * FRAME)
        until(lambda: len(worker.held) == 2)
        worker.let_go()
        assert one.result(PATIENCE) == pack.data[: 2 * FRAME]
        assert other.result(PATIENCE) == pack.data[FRAME : 3 * FRAME]
    assert [(want["first"], want["count"]) for want in worker.wants] == [(0, 2), (2, 1)]


def test_a_frame_that_failed_fails_at_once_and_is_asked_for_again_later(
    front: Front, pack: SparsePack, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = front.work(lambda want: "fail")
    monkeypatch.setattr(wants, "FAILED_FOR", 3600.0)
    assert all(front.fails(0, length) for length in (1, 100, FRAME))
    assert len(worker.wants) == 1
    worker.decide = lambda want: "fill"
    assert front.read(FRAME, 10) == pack.data[FRAME : FRAME + 10]  # another frame has nothing to do with it
    monkeypatch.setattr(wants, "FAILED_FOR", 0.0)
    worker.decide = lambda want: "fail"
    assert front.fails(2 * FRAME, 1)
    worker.decide = lambda want: "fill"
    assert front.read(2 * FRAME, 10) == pack.data[2 * FRAME : 2 * FRAME + 10]
    assert front.wants.failed == 2


def test_a_failed_frame_that_came_all_the_same_is_read(
    front: Front, pack: SparsePack, monkeypatch: pytest.MonkeyPatch
) -> None:
    front.work(lambda want: "fail")
    monkeypatch.setattr(wants, "FAILED_FOR", 3600.0)
    assert front.fails(0, 1)
    pack.fill([0])
    assert front.read(0, FRAME) == pack.data[:FRAME]


@pytest.mark.parametrize("connected", [False, True])
def test_no_answer_is_an_error_at_the_deadline(pack: SparsePack, connected: bool) -> None:
    front = short(pack, 0.2)
    try:
        if connected:
            front.work(lambda want: "ignore")
        started = time.monotonic()
        assert front.fails(0, 1)
        assert 0.2 <= time.monotonic() - started < PATIENCE
        assert len(front.wants) == 0
    finally:
        front.close()


def test_the_deadline_is_that_of_the_read_not_of_each_frame(pack: SparsePack, monkeypatch: pytest.MonkeyPatch) -> None:
    """EROFS asks pack by pack, and the kernel retries page by page: the same thread, a moment later."""
    front = short(pack, 0.2)
    monkeypatch.setattr(wants, "FAILED_FOR", 3600.0)
    try:
        worker = front.work(lambda want: "ignore")
        assert front.fails(0, 1, pid=7)
        assert all(front.fails(number * FRAME, 1, pid=7) for number in range(len(pack)))
        assert len(worker.wants) == 1
        assert front.fails(FRAME, 1, pid=8)
        assert front.fails(2 * FRAME, 1, pid=0) and front.fails(3 * FRAME, 1, pid=0)
        until(lambda: len(worker.wants) == 4)
    finally:
        front.close()


def test_a_read_that_failed_soon_has_the_rest_of_its_deadline(front: Front, pack: SparsePack) -> None:
    worker = front.work(lambda want: "fail" if want["first"] == 0 else "fill")
    assert front.fails(0, 1, pid=7)
    assert front.read(FRAME, 10, pid=7) == pack.data[FRAME : FRAME + 10]
    assert len(worker.wants) == 2


def test_a_want_that_nobody_waits_for_any_more_is_not_joined(pack: SparsePack, monkeypatch: pytest.MonkeyPatch) -> None:
    front = short(pack, 0.1)
    monkeypatch.setattr(wants, "FAILED_FOR", 0.0)
    try:
        worker = front.work(lambda want: "fail" if want["first"] == 0 else "ignore")
        pack.fill([1])
        assert front.fails(0, 3 * FRAME)  # the first part fails, so nobody waits for the second
        until(lambda: len(worker.wants) == 2)
        deadline = worker.wants[1]["deadline"]
        until(lambda: time.monotonic() > deadline)
        worker.decide = lambda want: "fill"
        assert front.read(2 * FRAME, 10) == pack.data[2 * FRAME : 2 * FRAME + 10]
    finally:
        front.close()


def test_a_new_worker_is_asked_for_what_the_old_one_left(front: Front, pack: SparsePack) -> None:
    with ThreadPoolExecutor(3) as pool:
        reads = [pool.submit(front.read, number * FRAME, FRAME) for number in range(3)]
        until(lambda: len(front.wants) == 3)  # and there is no worker yet
        for _ in range(2):
            dying = front.work(lambda want: "ignore")
            until(lambda dying=dying: len(dying.wants) == 3)
            dying.close()
            front.wants.attach(None)
        front.work()
        assert b"".join(read.result(PATIENCE) for read in reads) == pack.data[: 3 * FRAME]
    assert front.wants.asked == 3


def test_a_worker_that_does_not_read_holds_nobody_beyond_the_deadline(tmp_path: Path) -> None:
    big = SparsePack(tmp_path / "big", noise(4096 * 800, 5), frame=4096)
    front = Front(big, 0.5)
    its = front.connect()
    try:
        with ThreadPoolExecutor(400) as pool:  # more wants than a socket takes
            results = list(pool.map(lambda n: front.fails(n * 4096, 1), range(0, 800, 2)))
        assert all(results)
        assert front.rung.is_set()
        assert front.wants.flush() is True  # wants that have failed aren't sent any more
    finally:
        its.close()
        front.close()
        big.close()


def test_what_could_not_be_sent_is_sent_later(tmp_path: Path) -> None:
    big = SparsePack(tmp_path / "big", noise(4096 * 600, 5), frame=4096)
    front = Front(big)
    its = front.connect()
    try:
        with ThreadPoolExecutor(300) as pool:
            reads = [pool.submit(front.read, 8192 * n, 10) for n in range(300)]
            until(lambda: len(front.wants) == 300)
            assert front.rung.wait(PATIENCE)
            assert not front.wants.flush()
            seen = set()
            while len(seen) < 300:
                received = its.receive()
                assert received is not None
                seen.add(received[0]["first"])
                big.fill([received[0]["first"]])
                front.wants.answer({"got": received[0]["want"]})
                front.wants.flush()
            assert [read.result(PATIENCE) for read in reads] == [big.raw(2 * n)[:10] for n in range(300)]
    finally:
        its.close()
        front.close()
        big.close()


@pytest.mark.parametrize(
    "message",
    [{}, {"got": "1"}, {"got": 1.0}, {"got": True}, {"got": None}, {"failed": []}, {"failed": {}}, {"x": 1}],
)
def test_answers_that_are_none(front: Front, message: dict[str, Any]) -> None:
    with pytest.raises(MalformedError):
        front.wants.answer(message)


def test_answers_to_nothing_are_nothing(front: Front, pack: SparsePack) -> None:
    for number in (-1, 0, 1, 10**30):
        front.wants.answer({"got": number})
        front.wants.answer({"failed": number, "why": 5})
    front.work()
    assert front.read() == pack.data


def test_a_lie_of_the_worker_is_an_error(front: Front) -> None:
    front.work(lambda want: "lie")
    assert front.fails(0, 1)


def test_after_the_end_everything_fails(front: Front, pack: SparsePack) -> None:
    pack.fill([1])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(front.fails, 0, 1)
        until(lambda: len(front.wants) == 1)
        front.wants.close()
        assert waiting.result(PATIENCE)
    assert front.fails(2 * FRAME, 1)
    assert front.read(FRAME, 10) == pack.data[FRAME : FRAME + 10]


def test_a_cut_data_file_is_an_error_and_never_padded(front: Front, pack: SparsePack) -> None:
    pack.fill()
    os.truncate(pack.path, 5 * FRAME + 100)
    assert front.read(0, 5 * FRAME) == pack.data[: 5 * FRAME]
    assert front.fails(5 * FRAME, FRAME)
    assert front.fails(6 * FRAME, FRAME)


def test_a_frame_thrown_away_in_the_middle_of_a_read_is_an_error(
    front: Front, pack: SparsePack, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack.fill()
    real = os.pread

    def pread(fd: int, length: int, offset: int) -> bytes:
        pack.frames.set(3, MISSING)
        os.pwrite(pack.data_fd, bytes(FRAME), 3 * FRAME)
        return real(fd, length, offset)

    monkeypatch.setattr(packfiles.os, "pread", pread)
    assert front.fails(3 * FRAME, 10)
    assert front.read(FRAME, 10) == pack.data[FRAME : FRAME + 10]


def test_any_surprise_is_an_error_of_reading(front: Front, monkeypatch: pytest.MonkeyPatch, pack: SparsePack) -> None:
    pack.fill()
    monkeypatch.setattr(packfiles.os, "pread", lambda *_: 1 / 0)
    assert front.fails(0, 1)
    with pytest.raises(OSError, match="Input/output"):
        front.files.read(4711, 0, 1, lambda: 0)
    assert front.files.errors == 2


def test_a_released_file_is_gone_but_open_ones_go_on(front: Front, pack: SparsePack) -> None:
    pack.fill([0, 1])
    assert front.files.names() == [pack.hex]
    assert front.files.size(pack.hex) == SIZE
    for _ in range(2):
        front.files.release(pack.hex)
        front.files.release("0" * 64)
    assert front.files.names() == []
    for call in (front.files.open, front.files.size):
        with pytest.raises(FileNotFoundError):
            call(pack.hex)
    assert front.read(0, FRAME) == pack.data[:FRAME]
    assert front.files.size_of(front.handle) == SIZE
    assert front.fails(3 * FRAME, 1)  # nobody would answer
    assert front.wants.asked == 0
    front.guard()
    front.work()
    assert front.read() == pack.data
    front.files.close(front.handle)


def test_descriptors_close_with_the_last_reader(pack: SparsePack) -> None:
    before = len(os.listdir("/proc/self/fd"))
    front = Front(pack)
    second = front.files.open(pack.hex)
    front.files.release(pack.hex)
    front.files.close(front.handle)
    assert len(os.listdir("/proc/self/fd")) > before
    front.files.close(second)
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(front.files) == 0


def test_descriptors_can_be_replaced_under_readers(front: Front, pack: SparsePack, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    other = SparsePack(tmp_path / "other", pack.data, frame=4096)
    try:
        with ThreadPoolExecutor(1) as pool:
            read = pool.submit(front.read)
            until(lambda: len(front.wants) == 1)
            front.files.guard(other.hex, [os.dup(fd) for fd in other.descriptors])
            other.fill()
            front.wants.answer({"got": 1})
            assert read.result(PATIENCE) == pack.data
    finally:
        other.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert front.read() == pack.data


def unsealed(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def cut(pack: SparsePack, tmp_path: Path) -> int:
    path = tmp_path / "short"
    path.write_bytes(b"x" * (SIZE - 1))
    return os.open(path, os.O_RDONLY)


HOSTILE: dict[str, Callable[[SparsePack, Path], tuple[object, list[int]]]] = {
    "number": lambda pack, _: (5, [os.dup(fd) for fd in pack.descriptors]),
    "nothing": lambda pack, _: (None, [os.dup(fd) for fd in pack.descriptors]),
    "path": lambda pack, _: ("../" + pack.hex[3:], [os.dup(fd) for fd in pack.descriptors]),
    "upper case": lambda pack, _: (pack.hex.upper(), [os.dup(fd) for fd in pack.descriptors]),
    "newline": lambda pack, _: (pack.hex + "\n", [os.dup(fd) for fd in pack.descriptors]),
    "other pack": lambda pack, _: ("0" * 64, [os.dup(fd) for fd in pack.descriptors]),
    "no descriptors": lambda pack, _: (pack.hex, []),
    "one": lambda pack, _: (pack.hex, [os.dup(pack.data_fd)]),
    "three": lambda pack, _: (pack.hex, [os.dup(fd) for fd in (*pack.descriptors, 0)]),
    "changed places": lambda pack, _: (pack.hex, [os.dup(fd) for fd in reversed(pack.descriptors)]),
    "two data": lambda pack, _: (pack.hex, [os.dup(pack.data_fd), os.dup(pack.data_fd)]),
    "two maps": lambda pack, _: (pack.hex, [os.dup(pack.frames.fd), os.dup(pack.frames.fd)]),
    "pipes": lambda pack, _: (pack.hex, list(os.pipe())),
    "short data": lambda pack, path: (pack.hex, [cut(pack, path), os.dup(pack.frames.fd)]),
    "directory": lambda pack, path: (pack.hex, [os.open(path, os.O_RDONLY), os.dup(pack.frames.fd)]),
    "unreadable": lambda pack, _: (pack.hex, [os.open(pack.path, os.O_WRONLY), os.dup(pack.frames.fd)]),
    "path only": lambda pack, _: (pack.hex, [os.open(pack.path, os.O_PATH), os.dup(pack.frames.fd)]),
    "map that can shrink": lambda pack, _: (
        pack.hex,
        [os.dup(pack.data_fd), unsealed(os.pread(pack.frames.fd, 1 << 20, 0))],
    ),
    "empty pack": lambda pack, _: (
        "0" * 64,
        [os.open("/dev/null", os.O_RDONLY), FrameMap.create(bytes(32), 0, [], b"").fd],
    ),
    "no frames": lambda pack, _: (
        pack.hex,
        [os.dup(pack.data_fd), FrameMap.create(bytes.fromhex(pack.hex), SIZE, [], b"").fd],
    ),
    "first frame not at 0": lambda pack, _: (
        pack.hex,
        [os.dup(pack.data_fd), FrameMap.create(bytes.fromhex(pack.hex), SIZE, [4096], b"\2").fd],
    ),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_guards_that_are_refused_close_their_descriptors(pack: SparsePack, tmp_path: Path, fault: str) -> None:
    files = PackFiles(Wants(1, lambda: None, quiet))
    name, fds = HOSTILE[fault](pack, tmp_path)
    with pytest.raises(MalformedError) as caught:
        files.guard(name, fds)
    assert "\n" not in str(caught.value)
    assert files.names() == []
    for fd in fds:
        with pytest.raises(OSError):
            os.fstat(fd)


def test_no_libfuse_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(UnsupportedError, match="install Debian's fuse3"):
        fuse.find_library()


@pytest.mark.parametrize(("number", "version"), [(314, (3, 14)), (318, (3, 18)), (312, (3, 12))])
def test_libfuse_versions(monkeypatch: pytest.MonkeyPatch, number: int, version: tuple[int, int]) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: type("Library", (), {"fuse_version": lambda self: number})())
    assert fuse.find_library() == (fuse.LIBRARIES[0], version)


@pytest.mark.parametrize("number", [29, 310, 38])
def test_an_old_libfuse_is_refused(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: type("Library", (), {"fuse_version": lambda self: number})())
    with pytest.raises(UnsupportedError, match=r"needs 3\.12"):
        fuse.find_library()


@pytest.mark.parametrize("before", [None, "/elsewhere"])
def test_no_mfusepy_is_told_and_the_environment_is_as_before(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.setattr(fuse, "find_library", lambda: ("libfuse3.so.3", (3, 14)))
    monkeypatch.setitem(sys.modules, "mfusepy", None)
    if before is None:
        monkeypatch.delenv("FUSE_LIBRARY_PATH", raising=False)
    else:
        monkeypatch.setenv("FUSE_LIBRARY_PATH", before)
    with pytest.raises(UnsupportedError, match="pip install"):
        fuse.load_binding()
    assert os.environ.get("FUSE_LIBRARY_PATH") == before


def test_the_binding_is_imported_by_the_server_alone() -> None:
    script = "import sys, overlay.lazy.fuse, overlay.probe; print('mfusepy' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=CHECKOUT)
    assert said.stdout == "False\n"
