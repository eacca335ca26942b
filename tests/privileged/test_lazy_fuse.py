"""Packs behind the FUSE server, read through EROFS: every byte is right or an error, whatever dies or stalls."""

from __future__ import annotations

import errno
import mmap
import os
import random
import resource
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.fuse_server import PATIENCE, Server, fuse_server, need_fuse, until
from support.lazy_images import FRAME, LazyImage, lazy_image, noise
from support.mounts import erofs_mounted, require_file_backed_erofs
from support.sandboxes import file
from support.tools import need_tool

from layerstore.cache.framemap import MISSING
from overlay import mountinfo, probe
from overlay.lazy import fuse
from overlay.lazy.link import Link
from overlay.mountapi import MNT_DETACH, umount

pytestmark = pytest.mark.privileged

SLOW = 1.0
"""A deadline that a test waits for."""


@pytest.fixture
def disk() -> Iterator[Path]:
    """A directory on a real file system; nothing is mounted in it when the test is over."""
    require_file_backed_erofs()
    need_fuse()
    with tempfile.TemporaryDirectory(prefix="imgtool-test-", dir="/var/tmp") as path:
        try:
            yield Path(path)
        finally:
            left = [mount.target for mount in mountinfo.below(path, mountinfo.read())]
            for target in left:
                umount(target, MNT_DETACH)
            assert left == []


@pytest.fixture
def image(disk: Path) -> Iterator[LazyImage]:
    """Three packs, so that every readahead lies on several."""
    with lazy_image(disk / "image", {"a": noise(2 << 20, 1), "b": noise(300_001, 2)}, packs=3) as made:
        yield made


@pytest.fixture
def single(disk: Path) -> Iterator[LazyImage]:
    with lazy_image(disk / "single", {"a": noise(4 << 20, 3)}) as made:
        yield made


def mounted(server: Server, image: LazyImage, target: Path) -> Any:
    return erofs_mounted(image.image, [server.guard(pack) for pack in image.packs], target)


def outcome(path: Path, offset: int, length: int, *, random_access: bool = False) -> bytes | int:
    """What a reader gets: bytes, or the number of the error."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if random_access:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return os.pread(fd, length, offset)
    except OSError as error:
        assert error.errno is not None
        return error.errno
    finally:
        os.close(fd)


def forget(*paths: Path) -> None:
    """Drop the page cache of these files."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def timed(call: Callable[[], Any]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def waits(server: Server, count: int) -> None:
    """Until so many reads wait for the worker."""
    until(lambda: server.stats()["waits"] >= count)


def test_every_byte_through_several_packs(disk: Path, image: LazyImage) -> None:
    with fuse_server(disk / "packs") as server:
        worker = server.worker(image.packs)
        with mounted(server, image, disk / "lower") as lower:
            for _ in range(2):
                for name, data in image.files.items():
                    assert (lower / name).read_bytes() == data
                    forget(lower / name)
            with (lower / "a").open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as memory:
                assert memory[:] == image.files["a"]
        asked = [(want["pack"], want["first"] + n) for want in worker.wants for n in range(want["count"])]
        # Two readers may ask for one frame at the same moment: that it is fetched once is the fetcher's business.
        assert set(asked) == {(pack.hex, n) for pack in image.packs for n in range(len(pack))}
        for pack in image.packs:
            forget(disk / "packs" / pack.hex, pack.path)
            assert (disk / "packs" / pack.hex).read_bytes() == pack.data


def test_packs_are_read_only_files_of_root(disk: Path, image: LazyImage) -> None:
    with fuse_server(disk / "packs") as server:
        names = sorted(pack.hex for pack in image.packs)
        path = disk / "packs" / image.packs[0].hex
        assert not path.exists()
        for pack in image.packs:  # each is there at once, although it was just looked for in vain
            assert not (disk / "packs" / pack.hex).exists()
            server.guard(pack)
            status = os.stat(disk / "packs" / pack.hex)
            assert (status.st_mode, status.st_size) == (stat.S_IFREG | 0o400, len(pack.data))
        assert sorted(os.listdir(disk / "packs")) == names
        for flags in (os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            with pytest.raises(OSError) as caught:
                os.open(path, flags)
            assert caught.value.errno == errno.EROFS
        with pytest.raises(OSError):
            (disk / "packs" / "new").touch()
        [mount] = mountinfo.below(str(disk / "packs"), mountinfo.read())
        assert mount.fs_type == b"fuse.imgtool"
        assert {b"ro", b"nosuid", b"nodev"} <= set(mount.options.split(b","))


def test_programs_run_and_other_users_read(disk: Path) -> None:
    """Through EROFS everybody reads what its modes allow; the packs themselves are root's."""
    disk.chmod(0o755)
    program = Path(os.path.realpath(need_tool("id")))
    with (
        lazy_image(disk / "image", {"a": noise(1 << 20, 4)}, extra={b"id": file(program.read_bytes(), 0o755)}) as image,
        fuse_server(disk / "packs") as server,
    ):
        worker = server.worker(image.packs)
        with mounted(server, image, disk / "lower") as lower:
            said = subprocess.run([lower / "id", "-u"], user=65534, group=65534, extra_groups=[], capture_output=True)
            assert said.stdout == b"65534\n", said.stderr
            cat = [need_tool("cat"), lower / "a"]
            said = subprocess.run(cat, user=65534, group=65534, extra_groups=[], capture_output=True)
            assert said.stdout == image.files["a"]
            cat = [need_tool("cat"), disk / "packs" / image.pack.hex]
            said = subprocess.run(cat, user=65534, group=65534, extra_groups=[], capture_output=True)
            assert said.returncode != 0 and b"Permission denied" in said.stderr
        assert all(want["pid"] > 0 for want in worker.wants)


def test_readers_of_the_same_frames_ask_once_in_their_own_name(disk: Path, single: LazyImage) -> None:
    with fuse_server(disk / "packs") as server:
        worker = server.worker(single.packs)
        threads: list[int] = []

        def read(path: Path, offset: int) -> bytes | int:
            threads.append(threading.get_native_id())
            return outcome(path, offset, 1 << 20)

        with mounted(server, single, disk / "lower") as lower, ThreadPoolExecutor(8) as pool:
            reads = [pool.submit(read, lower / "a", 4096 * number) for number in range(8)]
            for number, each in enumerate(reads):
                assert each.result(PATIENCE) == single.files["a"][4096 * number :][: 1 << 20]
        asked = [want["first"] + n for want in worker.wants for n in range(want["count"])]
        assert len(asked) == len(set(asked))
        assert {want["pid"] for want in worker.wants} <= set(threads)


def test_what_does_not_come_is_an_error_at_the_deadline_and_right_later(disk: Path, image: LazyImage) -> None:
    with fuse_server(disk / "packs", deadline=SLOW) as server, mounted(server, image, disk / "lower") as lower:
        worker = server.worker(image.packs, lambda want: "ignore")
        # A readahead over three packs, retried page by page: one deadline all the same.
        got: list[bytes | int] = []
        took = timed(lambda: got.append(outcome(lower / "a", 100_000, 200_000)))
        assert got == [errno.EIO]
        assert SLOW <= took < 2 * SLOW
        with pytest.raises(OSError):
            (lower / "b").read_bytes()
        worker.decide = lambda want: "fill"
        until(lambda: outcome(lower / "a", 0, 2 << 20) == image.files["a"])
        until(lambda: outcome(lower / "b", 0, 1 << 20) == image.files["b"])
        assert "not there within 1 seconds" in server.said()


def test_a_failure_is_an_error_at_once_and_right_later(disk: Path, image: LazyImage) -> None:
    with fuse_server(disk / "packs") as server, mounted(server, image, disk / "lower") as lower:
        worker = server.worker(image.packs, lambda want: "fail")
        assert timed(lambda: outcome(lower / "a", 0, 4096)) < PATIENCE / 2
        assert outcome(lower / "a", 0, 4096) == errno.EIO
        worker.decide = lambda want: "fill"
        until(lambda: outcome(lower / "a", 0, 2 << 20) == image.files["a"])
        assert "the test says so" in server.said()


def test_a_worker_that_dies_is_replaced_under_readers(disk: Path, image: LazyImage) -> None:
    with (
        fuse_server(disk / "packs") as server,
        mounted(server, image, disk / "lower") as lower,
        ThreadPoolExecutor(1) as pool,
    ):
        first = server.worker(image.packs, lambda want: "ignore")
        read = pool.submit((lower / "a").read_bytes)
        until(lambda: first.wants)
        first.close()
        until(lambda: "the worker is gone" in server.said())
        second = server.worker(image.packs, lambda want: "ignore")
        until(lambda: second.wants)
        assert second.wants[0] == first.wants[0]
        server.worker(image.packs)  # in place of one that lives
        assert read.result(PATIENCE) == image.files["a"]


def test_slow_reads_do_not_stop_others(disk: Path) -> None:
    """200 blocked reads: the kernel's limit of 12 readaheads and libfuse's of 10 threads would be in the way."""
    step = 3 * FRAME  # apart enough to be in no readahead of each other
    with (
        lazy_image(disk / "image", {"a": noise(200 * step, 5), "b": noise(8 << 20, 6)}) as image,
        fuse_server(disk / "packs") as server,
        mounted(server, image, disk / "lower") as lower,
        ThreadPoolExecutor(200) as pool,
    ):
        image.pack.fill(range(600, len(image.pack)))
        worker = server.worker(image.packs, lambda want: "hold")
        slow = image.files["a"]
        reads = [pool.submit(outcome, lower / "a", n * step, 100, random_access=True) for n in range(200)]
        waits(server, 200)
        assert (lower / "b").read_bytes() == image.files["b"]
        assert not any(read.done() for read in reads)
        until(lambda: len(worker.held) == 200)
        worker.let_go()
        for number, read in enumerate(reads):
            assert read.result(PATIENCE) == slow[number * step :][:100]


def test_a_killed_reader_does_not_wait(disk: Path, single: LazyImage) -> None:
    with fuse_server(disk / "packs") as server, mounted(server, single, disk / "lower") as lower:
        worker = server.worker(single.packs, lambda want: "hold")
        reader = subprocess.Popen([need_tool("cat"), lower / "a"], stdout=subprocess.DEVNULL)
        until(lambda: worker.held)
        reader.kill()
        assert reader.wait(PATIENCE) == -signal.SIGKILL
        worker.let_go()
        worker.decide = lambda want: "fill"
        assert (lower / "a").read_bytes() == single.files["a"]


def test_a_lie_of_the_worker_is_an_error(disk: Path, single: LazyImage) -> None:
    with fuse_server(disk / "packs") as server, mounted(server, single, disk / "lower") as lower:
        worker = server.worker(single.packs, lambda want: "lie")
        assert outcome(lower / "a", 0, 4096) == errno.EIO
        worker.decide = lambda want: "fill"
        assert (lower / "a").read_bytes() == single.files["a"]


def test_a_killed_server_is_errors_and_never_zeros(disk: Path, image: LazyImage) -> None:
    data = image.files["a"]
    with fuse_server(disk / "one") as server:
        worker = server.worker(image.packs)
        with mounted(server, image, disk / "lower") as lower, ThreadPoolExecutor(4) as pool:
            assert outcome(lower / "a", 0, FRAME) == data[:FRAME]
            worker.decide = lambda want: "hold"
            reads = [pool.submit(outcome, lower / "a", (1 << 20) + n * 4096, 4096) for n in range(4)]
            until(lambda: worker.held)
            server.kill()
            for read in reads:  # those that wait get an error at once
                assert read.result(PATIENCE) == errno.EIO
            assert outcome(lower / "a", 0, FRAME) == data[:FRAME]  # what is in the page cache can still be read
            for pack in image.packs:
                pack.fill()  # and nothing brings the rest back, not even that it is there
            assert outcome(lower / "a", 1 << 20, 1 << 20) == errno.EIO
            assert outcome(lower / "b", 0, 1 << 20) == errno.EIO
            os.stat(disk / "one")  # from the kernel's cache: this tells nobody that it is dead, and these do
            for look in (os.listdir, os.statvfs, lambda path: os.stat(path / image.packs[0].hex)):
                with pytest.raises(OSError) as caught:
                    look(disk / "one")
                assert caught.value.errno == errno.ENOTCONN
            umount(str(disk / "one"), MNT_DETACH)
            assert os.listdir(disk / "one") == []
            with fuse_server(disk / "two") as successor, mounted(successor, image, disk / "again") as again:
                for name, content in image.files.items():
                    assert (again / name).read_bytes() == content
                assert outcome(lower / "a", 1 << 20, 1 << 20) == errno.EIO
                forget(lower / "a")
                assert outcome(lower / "a", 0, 4096) in (errno.EIO, data[:4096])


def test_a_server_does_not_start_over_a_dead_mount_and_says_so(disk: Path) -> None:
    with fuse_server(disk / "packs") as server:
        server.kill()
    second = Server(disk / "packs")
    try:
        assert second.hear() is None
        assert second.process.wait(PATIENCE) == 1
        assert "Transport endpoint is not connected" in second.said()
    finally:
        second.close()
    umount(str(disk / "packs"), MNT_DETACH)


@pytest.mark.parametrize("how", ["told", "holder gone"])
def test_the_end_leaves_nothing_and_frees_all_readers(disk: Path, single: LazyImage, how: str) -> None:
    with (
        fuse_server(disk / "packs") as server,
        mounted(server, single, disk / "lower") as lower,
        ThreadPoolExecutor(1) as pool,
    ):
        worker = server.worker(single.packs, lambda want: "hold")
        read = pool.submit(outcome, lower / "a", 0, 4096)
        until(lambda: worker.held)
        if how == "told":
            assert server.end() == 0
        else:
            server.holder.close()
            assert server.process.wait(PATIENCE) == 0
        assert read.result(PATIENCE) == errno.EIO
        assert not (disk / "packs").exists()
        assert outcome(lower / "a", 1 << 20, 4096) == errno.EIO


def test_the_end_before_it_has_mounted(disk: Path) -> None:
    server = Server(disk / "packs")
    try:
        server.holder.close()
        assert server.process.wait(PATIENCE) == 0
        assert not (disk / "packs").exists()
    finally:
        server.close()


def test_a_directory_that_was_there_stays(disk: Path) -> None:
    (disk / "packs").mkdir()
    (disk / "packs/kept").touch()
    with fuse_server(disk / "packs"):
        assert os.listdir(disk / "packs") == []
    assert os.listdir(disk / "packs") == ["kept"]


def test_signals_do_not_end_it(disk: Path, single: LazyImage) -> None:
    with fuse_server(disk / "packs") as server, mounted(server, single, disk / "lower") as lower:
        server.worker(single.packs)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            server.process.send_signal(number)
        assert (lower / "a").read_bytes() == single.files["a"]
        assert server.process.poll() is None


def test_unmounted_by_somebody_else_is_told(disk: Path) -> None:
    with fuse_server(disk / "packs") as server:
        umount(str(disk / "packs"))
        assert server.process.wait(PATIENCE) == 1
        assert "unmounted by somebody else" in server.said()


def test_a_released_pack_is_gone_for_new_mounts_and_stays_for_old_ones(disk: Path, single: LazyImage) -> None:
    pack = single.pack
    with fuse_server(disk / "packs") as server, mounted(server, single, disk / "lower") as lower:
        worker = server.worker(single.packs)
        pack.fill(range(16))
        for _ in range(2):
            assert server.ask({"release": pack.hex}) == {"released": pack.hex}
        assert os.listdir(disk / "packs") == []
        assert not (disk / "packs" / pack.hex).exists()
        assert outcome(lower / "a", 0, 4096) == single.files["a"][:4096]
        assert outcome(lower / "a", 2 << 20, 4096) == errno.EIO
        assert worker.wants == []
        server.guard(pack)
        until(lambda: outcome(lower / "a", 0, 4 << 20) == single.files["a"])


def test_hostile_messages_do_not_end_it(disk: Path, single: LazyImage) -> None:
    pack = single.pack
    with fuse_server(disk / "packs") as server:
        holder = server.holder
        null = os.open("/dev/null", os.O_RDWR)
        try:
            for message, fds in (
                ({}, []),
                ({"guard": None}, []),
                ({"guard": ["x"]}, [null]),
                ({"guard": "../../etc/passwd"}, [null, null]),
                ({"guard": pack.hex}, []),
                ({"guard": pack.hex}, [null] * 16),
                ({"guard": pack.hex}, [pack.frames.fd, pack.data_fd]),
            ):
                holder.send(message, fds)
                if "guard" in message:
                    answer = server.hear()
                    assert answer is not None
                    assert answer["unguarded"] == message["guard"] and answer["why"]
            for message, fds in (
                ({"release": {"a": 1}}, [null]),
                ({"release": None}, []),
                ({"release": "x" * 60_000}, []),
            ):
                assert server.ask(message, fds) == {"released": message["release"]}
            for message, fds in (
                ({"peer": "worker"}, []),
                ({"peer": "worker"}, [null]),
                ({"peer": "worker"}, [null, null]),
                ({"peer": "keeper"}, [null]),
                ({"end": 1}, []),
                ({"end": "true"}, [null]),
                ({"mounted": True}, []),
            ):
                holder.send(message, fds)
            for raw in (b"{", b"\xff\xfe", b"[]", b"[" * 60_000, b'{"guard":', b"1" * 60_000):
                holder._socket.send(raw)
            datagrams, other = Link.pair()
            with datagrams, other:
                holder.send({"peer": "worker"}, [other.fileno()])
                for raw in (b"{", b"[]", b'{"got":[]}', b'{"got":1e400}', b'{"failed":{}}', b'{"stats":{}}', b'"x"'):
                    datagrams._socket.send(raw)
                datagrams.send({"got": 1}, [null] * 16)
                worker = server.worker(single.packs)
        finally:
            os.close(null)
        assert server.stats()["packs"] == 0  # it has heard everything
        open_before = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        with mounted(server, single, disk / "lower") as lower:
            assert (lower / "a").read_bytes() == single.files["a"]
        assert worker.wants
        assert server.ask({"release": pack.hex}) == {"released": pack.hex}
        until(lambda: len(os.listdir(f"/proc/{server.process.pid}/fd")) <= open_before)


def test_counters(disk: Path, single: LazyImage) -> None:
    with fuse_server(disk / "packs") as server, mounted(server, single, disk / "lower") as lower:
        server.worker(single.packs)
        assert (lower / "a").read_bytes() == single.files["a"]
        stats = server.stats()
        assert stats["packs"] == 1
        assert 0 < stats["wants"] <= len(single.pack)
        assert stats["reads"] >= stats["waits"] > 0
        assert (stats["errors"], stats["failed"], stats["outstanding"]) == (0, 0, 0)


def test_memory_is_given_back(disk: Path, single: LazyImage) -> None:
    """What a server holds doesn't grow with what was read or has failed."""
    with fuse_server(disk / "packs") as server, mounted(server, single, disk / "lower") as lower:
        server.worker(single.packs)
        sizes = []
        for _ in range(6):
            for _ in range(10):
                forget(lower / "a", disk / "packs" / single.pack.hex)
                assert (lower / "a").read_bytes() == single.files["a"]
            pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
            sizes.append(pages * resource.getpagesize())
        assert sizes[-1] - sizes[1] < 4 << 20


def test_doctor_says_what_is_missing(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def finding() -> probe.Finding:
        [found] = [found for found in probe.probe(str(disk)) if found.name == "FUSE"]
        return found

    found = finding()
    assert (found.status, found.advice) == ("ok", "")
    assert "libfuse3" in found.detail and "mfusepy" in found.detail
    monkeypatch.setattr(fuse, "LIBRARIES", ("libnothing.so.3",))
    found = finding()
    assert (found.status, found.required) == ("missing", False)
    assert "libfuse 3" in found.detail
    assert "modprobe fuse" in found.advice and "fuse3" in found.advice and "mfusepy" in found.advice


@pytest.mark.case("D01")
def test_readers_throughout_while_workers_fail_stall_and_die(disk: Path) -> None:
    """A fifth of the wants fail, some are never answered, the worker is replaced: every byte is right or an error."""
    dice = random.Random(5)
    with (
        lazy_image(disk / "image", {"a": noise(6 << 20, 7)}, packs=3, frame=16 << 10) as image,
        fuse_server(disk / "packs", deadline=0.5) as server,
        mounted(server, image, disk / "lower") as lower,
    ):
        data = image.files["a"]

        def decide(want: dict[str, Any]) -> str:
            return dice.choices(["fill", "fail", "ignore", "lie"], [70, 20, 5, 5])[0]

        server.worker(image.packs, decide)
        done = threading.Event()
        right, wrong, errors, slow = [], [], [], []

        def read(seed: int) -> None:
            mine = random.Random(seed)
            while not done.is_set():
                offset = mine.randrange(len(data))
                length = mine.choice([1, 4096, 20_000, 200_000])
                started = time.monotonic()
                got = outcome(lower / "a", offset, length, random_access=mine.random() < 0.5)
                if time.monotonic() - started > PATIENCE:
                    slow.append((offset, length))
                if isinstance(got, int):
                    errors.append(got)
                elif got and got == data[offset : offset + len(got)]:  # it ends early where an error follows
                    right.append(len(got))
                else:
                    wrong.append((offset, length))

        with ThreadPoolExecutor(8) as pool:
            readers = [pool.submit(read, seed) for seed in range(8)]
            for _ in range(40):
                old = server.workers[-1]
                server.worker(image.packs, decide)
                old.close()
                for pack in image.packs:  # as good as never read
                    pack.frames.set(dice.randrange(len(pack)), MISSING)
                forget(lower / "a", *(disk / "packs" / pack.hex for pack in image.packs))
                seen = len(right), len(errors)
                until(lambda seen=seen: len(right) > seen[0] and len(errors) > seen[1])
            done.set()
            for reader in readers:
                reader.result(PATIENCE)
        assert (wrong, slow, set(errors)) == ([], [], {errno.EIO})
        server.worker(image.packs)
        until(lambda: outcome(lower / "a", 0, len(data)) == data)
