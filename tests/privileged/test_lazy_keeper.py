"""The keeper and the real kernel: a read of a pack that isn't there is right, or fails, whoever dies meanwhile."""

from __future__ import annotations

import errno
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import sandboxes
from support.keepers import Keeper, Reader, Worker, until
from support.lazy_images import FRAME, LazyImage, SparsePack, lazy_image, noise
from support.sandboxes import file

from layerstore.cache.framemap import MISSING, FrameMap
from overlay import mountinfo
from overlay.erofs import mount_erofs
from overlay.lazy import fanotify
from overlay.lazy.descriptors import LowNumbers
from overlay.lazy.journal import CAPACITY, Record
from overlay.lazy.link import MAX_DESCRIPTORS, Link, Message
from overlay.mountapi import MNT_DETACH, umount
from overlay.overlayfs import mount_overlay

pytestmark = [pytest.mark.privileged, pytest.mark.usefixtures("mounts_unchanged")]
mounts_unchanged = sandboxes.mounts_unchanged

MANY = {f"f{number:02}": noise(FRAME, number) for number in range(32)}
"""Files of a frame each."""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """A directory on ext4; whatever a test mounts below it is unmounted, the latest first."""
    sandboxes.node_root(tmp_path)
    yield tmp_path
    for mounted in mountinfo.below(os.fsencode(tmp_path), mountinfo.read()):
        umount(mounted.target, MNT_DETACH)


@dataclass
class Site:
    """A lazy image that is mounted under a keeper's eyes."""

    image: LazyImage
    keeper: Keeper
    mount: Path

    def worker(self, answer: Any = None) -> Worker:
        return Worker(self.keeper.connect(), self.image.packs, answer)

    def reader(self, name: str, *range_: int, how: str = "read") -> Reader:
        return Reader(self.mount / name, *range_, how=how)

    def pending(self) -> int:
        """How many events wait, as the journal says."""
        return len(self.keeper.journal.records())


@contextmanager
def site(here: Path, files: Any = None, *, packs: int = 1, extra: Any = None, **options: Any) -> Iterator[Site]:
    with ExitStack() as stack:
        image = stack.enter_context(lazy_image(here, files, packs=packs, extra=extra))
        keeper = stack.enter_context(Keeper(here, **options)).start()
        for pack in image.packs:
            keeper.guard(pack)
        (here / "lower").mkdir()
        mount_erofs(str(image.image), [str(pack.path) for pack in image.packs], str(here / "lower"))
        stack.callback(umount, str(here / "lower"), MNT_DETACH)
        yield Site(image, keeper, here / "lower")


def nothing(want: Message) -> None:
    """A worker that hangs."""


# --- right bytes


@pytest.mark.parametrize("how", ["read", "mmap"])
@pytest.mark.parametrize("packs", [1, 3])
def test_readers_get_the_right_bytes(here: Path, packs: int, how: str) -> None:
    with site(here, packs=packs) as at, at.worker() as worker:
        for name, data in at.image.files.items():
            assert at.reader(name, how=how).outcome() == data
        fetched = sum(want["count"] for want in worker.wants)
        assert fetched == sum(len(pack) for pack in at.image.packs), "each frame once"
        assert at.pending() == 0
        assert at.reader("a", 70_000, 5000, how=how).outcome() == at.image.files["a"][70_000:75_000]


def test_only_what_is_read_is_wanted_and_on_whose_behalf(here: Path) -> None:
    with site(here, MANY) as at, at.worker() as worker:
        with at.reader("f10", 4096, 4096) as reader:
            assert reader.outcome() == MANY["f10"][4096:8192]
        assert [(want["pack"], want["first"], want["count"]) for want in worker.wants] == [(at.image.pack.hex, 10, 1)]
        assert worker.wants[0]["pid"] == reader.pid
        touched = [number for number, byte in enumerate(at.image.pack.frames.touched()) if byte]
        assert touched == [10], "what was asked for is known, whether it was there or not"
        at.image.pack.fill([20])
        assert at.reader("f20", 0, 4096).outcome() == MANY["f20"][:4096]
        assert at.image.pack.frames.touched()[20] == 1
        assert 0 < worker.wants[0]["deadline"] - time.monotonic() <= at.keeper.deadline


def test_programs_and_libraries_run_from_the_mount_and_from_an_overlay_above(here: Path) -> None:
    program = Path(shutil.which("sha256sum") or "").read_bytes()
    with site(here, extra={b"program": file(program, 0o755)}) as at, at.worker():
        for name in ("upper", "work", "merged"):
            (here / name).mkdir()
        mount_overlay([str(at.mount)], str(here / "upper"), str(here / "work"), str(here / "merged"), volatile=True)
        by_lower = subprocess.run([at.mount / "program", at.mount / "a"], capture_output=True, text=True, timeout=60)
        by_overlay = subprocess.run(
            [here / "merged/program", here / "merged/b"], capture_output=True, text=True, timeout=60
        )
        expected = subprocess.run(["sha256sum"], input=at.image.files["a"], capture_output=True, timeout=60).stdout
        assert by_lower.stdout.split()[0] == expected.decode().split()[0]
        assert (by_overlay.returncode, by_overlay.stderr) == (0, "")
        assert Reader(here / "merged/b", how="mmap").outcome() == at.image.files["b"]
        umount(str(here / "merged"))


def test_many_readers_of_a_frame_want_it_once(here: Path) -> None:
    with site(here, MANY) as at, ExitStack() as stack:
        waiting = [stack.enter_context(at.reader("f03")) for _ in range(64)]
        until(lambda: at.pending() > 0, "an event")
        for reader in waiting:
            reader.reading()
        with at.worker() as worker:
            assert [reader.outcome() for reader in waiting] == [MANY["f03"]] * 64
            assert [(want["first"], want["count"]) for want in worker.wants] == [(3, 1)]


def test_a_complete_pack_costs_nothing_after_its_release(here: Path) -> None:
    with site(here) as at:
        at.image.pack.fill()
        link = at.keeper.connect()
        with link:
            assert at.reader("a").outcome() == at.image.files["a"]
            before = at.keeper.stats(link)
            assert before["events"] == before["allowed"] > 0
            assert (before["waited"], before["denied"], before["pending"], before["packs"]) == (0, 0, 0, 1)
            at.keeper.release(at.image.pack)
            assert at.reader("b").outcome() == at.image.files["b"]
            after = at.keeper.stats(link)
        assert after == before | {"packs": 0}
        at.keeper.release(at.image.pack)


@pytest.mark.parametrize("complete", [True, False])
def test_an_event_that_is_in_the_queue_when_its_pack_is_released(here: Path, complete: bool) -> None:
    """Of an incomplete pack that happens when nothing is mounted over it: somebody looks into the cache."""
    with site(here, MANY) as at:
        pack = at.image.pack
        pack.fill(None if complete else range(3))
        os.kill(at.keeper.pid, signal.SIGSTOP)
        at.keeper.holder.send({"release": pack.hex})
        with Reader(pack.path, 4 * FRAME, FRAME) as reader:
            until(lambda: select.select([at.keeper.group], [], [], 0)[0], "its event")
            os.kill(at.keeper.pid, signal.SIGCONT)
            assert at.keeper.holder.receive() == ({"released": pack.hex}, [])
            assert reader.outcome() == (MANY["f04"] if complete else errno.EPERM)
        if not complete:
            assert at.keeper.log("denied")[0]["why"] == "was released"
        assert at.pending() == 0


# --- failure


@pytest.mark.parametrize("how", ["read", "mmap"])
@pytest.mark.parametrize("there_is_a_worker", [True, False])
def test_a_read_fails_at_its_deadline_once_and_is_right_when_the_store_is_well(
    here: Path, there_is_a_worker: bool, how: str
) -> None:
    failure = errno.EIO if how == "read" else -signal.SIGBUS
    with site(here, MANY, deadline=2.0) as at, ExitStack() as stack:
        if there_is_a_worker:
            stack.enter_context(at.worker(nothing))
        reader = at.reader("f07", how=how).reading()
        started = time.monotonic()
        assert reader.outcome() == failure
        assert time.monotonic() - started < 3.9, "one deadline, not one for each try of the kernel"
        assert at.keeper.log("denied")
        assert at.pending() == 0
        stack.close()
        with at.worker():
            until(lambda: at.reader("f07", how=how).outcome() == MANY["f07"], "the right bytes", 10)
            assert at.reader("f08", how=how).outcome() == MANY["f08"]


def test_a_failure_of_the_store_is_the_readers_at_once(here: Path) -> None:
    with site(here, MANY) as at:
        with at.worker(lambda want: {"failed": want["want"], "why": "wrong\nframe \udcff"}):
            started = time.monotonic()
            assert at.reader("f07").outcome() == errno.EIO
            assert time.monotonic() - started < at.keeper.deadline
        assert at.keeper.log("denied")[0]["why"] == "wrong\\x0aframe \\xff"


def test_a_worker_that_says_got_and_has_not_is_not_believed(here: Path) -> None:
    with site(here, MANY) as at, at.worker(lambda want: {"got": want["want"]}) as worker:
        assert at.reader("f07").outcome() == errno.EIO
        assert len(worker.wants) == 3


def test_a_read_of_what_is_there_does_not_suffer_from_what_is_not(here: Path) -> None:
    """A read-ahead that reaches into a frame which fails is denied; the kernel then asks for what is really needed."""
    data = noise(4 * FRAME, 1)
    with site(here, {"f": data}) as at, at.worker(lambda want: {"failed": want["want"], "why": "no"}):
        at.image.pack.fill([0, 2])
        assert at.reader("f", FRAME - 8192, 8192).outcome() == data[FRAME - 8192 : FRAME]
        assert at.reader("f", 3 * FRAME - 8192, 8192, how="mmap").outcome() == data[3 * FRAME - 8192 : 3 * FRAME]
        assert at.reader("f", 3 * FRAME - 8192, 8193).outcome() == errno.EIO


def test_readers_that_are_killed_hold_nothing_up(here: Path) -> None:
    with site(here, MANY) as at:
        killed = [at.reader("f05", how=how).reading() for how in ("read", "read", "mmap")]
        until(lambda: at.pending() > 0, "an event")
        for reader in killed:
            started = time.monotonic()
            reader.kill()
            assert time.monotonic() - started < 5
        with at.worker():
            assert at.reader("f05").outcome() == MANY["f05"]
            until(lambda: at.pending() == 0, "the answer of what nobody waits for")


def test_more_readers_than_the_journal_has_room_for(here: Path) -> None:
    """The kernel has no number for their events, and denies them."""
    with site(here, MANY, capacity=40) as at, ExitStack() as stack:
        waiting = {name: stack.enter_context(at.reader(name, 0, 4096)) for name in MANY}
        waiting |= {name + "+": stack.enter_context(at.reader(name, 40_960, 4096)) for name in MANY}
        for reader in waiting.values():
            reader.reading()
        until(lambda: at.keeper.log("denied"), "a denial")
        with at.worker():
            outcomes = {name: reader.outcome() for name, reader in waiting.items()}
            assert at.reader("f31").outcome() == MANY["f31"]
        right = {name for name, outcome in outcomes.items() if outcome != errno.EIO}
        assert 5 < len(right) < len(waiting)
        for name in right:
            start = 40_960 if name.endswith("+") else 0
            assert outcomes[name] == MANY[name[:3]][start : start + 4096]


# --- workers come and go


def test_readers_wait_for_the_next_worker(here: Path) -> None:
    with (
        site(here, MANY) as at,
        at.worker(nothing) as dying,
        at.reader("f01") as one,
        at.reader("f02", how="mmap") as two,
    ):
        until(lambda: len(dying.wants) == 2, "both wants")
        dying.close()
        until(lambda: at.keeper.log("worker gone"), "the keeper's notice")
        assert not one.ended
        with at.reader("f03") as three, at.worker() as worker:
            assert (one.outcome(), two.outcome(), three.outcome()) == (MANY["f01"], MANY["f02"], MANY["f03"])
            assert {want["first"] for want in worker.wants} >= {1, 2, 3}


def test_a_worker_is_replaced_while_it_lives(here: Path) -> None:
    with site(here, MANY) as at, at.worker(nothing), at.reader("f01") as reader, at.worker():
        assert reader.outcome() == MANY["f01"]


# --- keepers come and go


def test_nobody_reads_anything_while_there_is_no_keeper(here: Path) -> None:
    with site(here, MANY) as at:
        at.keeper.kill()
        with at.reader("f01") as one, at.reader("f02", how="mmap") as two:
            one.reading(), two.reading()
            with pytest.raises(AssertionError, match="stuck"):
                one.outcome(0.3)
            assert not two.ended
            at.keeper.start(at.image.packs)
            with at.worker():
                assert two.outcome() == MANY["f02"]
                assert at.reader("f01").outcome() == MANY["f01"]


def test_a_successor_goes_on_with_what_was_written_down(here: Path) -> None:
    with site(here, MANY) as at, ExitStack() as stack:
        names = list(MANY)[:12]
        waiting = [stack.enter_context(at.reader(name, how="mmap" if name < "f04" else "read")) for name in names]
        until(lambda: at.pending() == len(names), "all events")
        at.image.pack.fill([0, 5])
        before = at.keeper.journal.records()
        at.keeper.kill()
        at.keeper.start(at.image.packs)
        more = [stack.enter_context(at.reader(name)) for name in list(MANY)[12:24]]
        until(lambda: at.pending() == 22, "the new events, and those of before that are not ready")
        after = at.keeper.journal.records()
        kept = {number: record for number, record in before.items() if record.offset // FRAME not in (0, 5)}
        assert {number: after[number] for number in kept} == kept, "with the deadlines that they had"
        with at.worker() as worker:
            outcomes = [reader.outcome() for reader in (*waiting, *more)]
            assert outcomes == [MANY[name] for name in list(MANY)[:24]]
            assert {want["first"] for want in worker.wants} == set(range(24)) - {0, 5}
        assert at.keeper.log("took over")[-1]["events"] == 12
        assert at.pending() == 0


def test_a_successor_denies_what_was_read_and_not_written_down(here: Path) -> None:
    """The kernel repeats read-aheads, so no reader notices."""
    with site(here, MANY) as at, ExitStack() as stack:
        at.keeper.kill()
        names = list(MANY)[:8]
        waiting = [stack.enter_context(at.reader(name)) for name in names]
        events = []
        until(lambda: events.extend(_read(at.keeper.group)) or len(events) >= 8, "all events")
        at.keeper.journal.high = max(event.number for event in events) + 1
        for event in events[:4]:  # what a keeper does first
            record = Record(
                event.pid, event.offset, event.length, time.monotonic() + 10, bytes.fromhex(at.image.pack.hex)
            )
            at.keeper.journal.put(event.number, record)
        for event in events:
            os.close(event.number)
        at.keeper.start(at.image.packs)
        with at.worker():
            assert [reader.outcome() for reader in waiting] == [MANY[name] for name in names]
        assert at.keeper.log("took over") == [{"event": "took over", "level": "info", "events": 4}]
        [line, *_] = at.keeper.log("denied")
        assert line["why"] == "was read and not written down"


def _read(group: int) -> list[fanotify.Event]:
    try:
        return list(fanotify.read(group))
    except BlockingIOError:
        return []


def test_what_was_written_down_of_an_unknown_pack_is_denied(here: Path) -> None:
    with site(here, MANY) as at, at.reader("f01") as reader:
        until(lambda: at.pending() == 1, "the event")
        at.keeper.kill()
        at.keeper.start()
        assert reader.outcome() == errno.EIO, "its repetition is an event of an unknown file"
        assert at.reader("f02").outcome() == errno.EIO
        at.keeper.guard(at.image.pack)
        with at.worker():
            assert at.reader("f01").outcome() == MANY["f01"]


def test_killed_again_and_again_no_keeper_lets_a_wrong_byte_through(here: Path) -> None:
    data = noise(3 << 20, 5)
    chance = random.Random(11)
    with site(here, {"f": data}, deadline=20.0) as at:

        def slow(want: Message) -> Message | None:
            time.sleep(chance.random() / 200)
            return worker.fill(want)

        read = 0
        for _ in range(15):
            for start in range(0, len(data), FRAME):
                with (at.mount / "f").open("rb") as stream:
                    os.posix_fadvise(stream.fileno(), start, FRAME, os.POSIX_FADV_DONTNEED)
            for number in chance.sample(range(len(at.image.pack)), 20):
                _unfill(at.image.pack, number)
            with ExitStack() as stack:
                starts = [chance.randrange(len(data) - 100_000) for _ in range(6)]
                waiting = [
                    stack.enter_context(at.reader("f", start, 100_000, how=chance.choice(["read", "mmap"])))
                    for start in starts
                ]
                worker = stack.enter_context(at.worker(slow))
                for reader in waiting[: chance.randrange(7)]:
                    reader.reading()
                at.keeper.kill()
                at.keeper.start(at.image.packs)
                worker = stack.enter_context(at.worker(slow))
                for start, reader in zip(starts, waiting, strict=True):
                    outcome = reader.outcome()
                    if isinstance(outcome, bytes):
                        assert outcome == data[start : start + 100_000]
                        read += 1
                    else:
                        assert outcome in (errno.EIO, -signal.SIGBUS)
        assert read > 60
        assert at.pending() == 0


def _unfill(pack: SparsePack, number: int) -> None:
    """Forget a frame that nobody has in the page cache: as if it had never been there."""
    pack.frames.set(number, MISSING)
    os.pwrite(pack.data_fd, bytes(len(pack.raw(number))), number * pack.frame)


def test_the_end_of_the_holder_ends_a_keeper_that_hands_on_everything(here: Path) -> None:
    with site(here, MANY) as at, at.reader("f01") as reader:
        until(lambda: at.pending() == 1, "the event")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(at.keeper.pid, number)
        at.keeper.guard(at.image.pack)
        assert at.keeper.log("ended") == []
        assert at.keeper.wait() == 0
        first, second = at.keeper.log("ended")
        assert first["packs"] == second["packs"] == [at.image.pack.hex]
        floor = LowNumbers(CAPACITY).floor
        kept = [fd for fd in second["open"] if fd >= floor]
        assert len(kept) == 4, "group, journal, data and frame map"
        assert second["open"] == [0, 1, 2, *kept]
        assert not reader.ended
        at.keeper.start(at.image.packs)
        with at.worker():
            assert reader.outcome() == MANY["f01"]


def test_a_keeper_goes_on_under_another_holder(here: Path) -> None:
    with site(here, MANY) as at, at.reader("f01") as one:
        until(lambda: at.pending() == 1, "the event")
        at.keeper.end_holder()
        until(lambda: at.keeper.log("took over"), "the second run")
        with at.reader("f02") as two, at.worker():
            assert (one.outcome(), two.outcome()) == (MANY["f01"], MANY["f02"])
        at.image.pack.fill()
        at.keeper.release(at.image.pack)


def test_no_event_has_a_number_that_a_successor_would_not_try(here: Path) -> None:
    """Each pack has a low number as well, which mmap takes for itself."""
    with site(here, MANY) as at, ExitStack() as stack:
        for number in range(300):
            pack = SparsePack(here / f"pack{number}", noise(64, number))
            stack.callback(pack.close)
            at.keeper.guard(pack)
        for name in ("f01", "f02", "f03"):
            stack.enter_context(at.reader(name))
        until(lambda: at.pending() == 3, "the events")
        highest = max(at.keeper.journal.records())
        assert highest > 300
        assert at.keeper.journal.high > highest + 1, "known before the event was read, not after"
        with at.worker():
            assert at.reader("f01").outcome() == MANY["f01"]


# --- packs come and go


def test_a_pack_that_was_thrown_away_and_made_anew(here: Path) -> None:
    """Whoever has the old file gets no zeros from it."""
    with site(here, MANY) as at:
        old = at.image.pack
        old.fill([1])
        os.unlink(old.path)
        new = SparsePack(old.path, old.data)
        try:
            at.keeper.guard(new)
            at.keeper.guard(new)
            (here / "again").mkdir()
            mount_erofs(str(at.image.image), [str(new.path)], str(here / "again"))
            with at.worker(
                lambda want: new.fill(range(want["first"], want["first"] + want["count"])) or {"got": want["want"]}
            ):
                assert Reader(here / "again/f02").outcome() == MANY["f02"]
                assert at.reader("f02").outcome() == errno.EIO
            umount(str(here / "again"))
        finally:
            new.close()


def test_what_cannot_be_guarded(here: Path) -> None:
    with site(here, MANY) as at, ExitStack() as stack:
        keeper, pack = at.keeper, at.image.pack
        data, frames = pack.descriptors
        other = SparsePack(here / "other", noise(100_000, 9))
        stack.callback(other.close)
        memory = os.memfd_create("memory")
        stack.callback(os.close, memory)
        folder = os.open(here, os.O_RDONLY)
        stack.callback(os.close, folder)
        broken = os.memfd_create("broken")
        stack.callback(os.close, broken)
        os.write(broken, os.pread(frames, 100, 0))
        for hex, fds, why in [
            (pack.hex, [], "0 descriptors, where data and frame map belong"),
            (pack.hex, [data], "1 descriptors, where"),
            (pack.hex, [data, frames, frames], "3 descriptors, where"),
            (pack.hex, [frames, data], "not a frame map"),
            (pack.hex, [data, broken], "does not hold 32 frames"),
            (pack.hex, [other.data_fd, other.frames.fd], f"the frame map is that of pack {other.hex}"),
            (other.hex, [data, other.frames.fd], f"guarded as that of pack {pack.hex}"),
            (other.hex, [folder, other.frames.fd], "in no regular file"),
            (other.hex, [memory, other.frames.fd], "fanotify_mark: Operation not supported"),
            ("../x", [data, frames], "the frame map is that of pack"),
        ]:
            answer = keeper.tell({"guard": hex}, fds)
            assert answer["unguarded"] == hex
            assert why in answer["why"]
        assert keeper.log("unexpected") == []
        keeper.guard(other)
        with at.worker():
            assert at.reader("f01").outcome() == MANY["f01"]


def test_hostile_messages_of_both_sides(here: Path) -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    with site(here, MANY) as at, at.reader("f01") as reader:
        until(lambda: at.pending() == 1, "the event")
        before = len(os.listdir(f"/proc/{at.keeper.pid}/fd"))
        holder = socket.socket(fileno=os.dup(at.keeper.holder.fileno()))
        with holder:
            for data in (b"{", b"[]", b"null", b"1e999", b"\xff", b"[" * 60_000, b'{"guard": 1}', b'{"release": null}'):
                holder.send(data)
        for message in (
            {},
            {"guard": None},
            {"peer": "worker"},
            {"peer": "nobody"},
            {"peer": ["worker"]},
            {"got": 1},
            {"no such": {"a": [1]}},
        ):
            at.keeper.holder.send(message, [null] * 3)
        for fds in ([null] * MAX_DESCRIPTORS, [null] * (MAX_DESCRIPTORS + 1)):
            at.keeper.holder.send({"guard": at.image.pack.hex}, fds)
        answer = at.keeper.holder.receive()
        assert answer is not None
        assert answer[0]["unguarded"] == at.image.pack.hex
        assert at.keeper.tell({"release": "x" * 10_000}) == {"released": "x" * 10_000}
        assert not reader.ended
        with at.keeper.connect() as link:
            raw = socket.socket(fileno=os.dup(link.fileno()))
            with raw:
                for data in (
                    b"{",
                    b"[1]",
                    b"\0",
                    b"{}",
                    b'{"got": 1e99}',
                    b'{"got": {}}',
                    b"x" * 65_000,
                    b"x" * 100_000,
                ):
                    raw.send(data)
            for message in (
                {"got": True},
                {"got": None},
                {"got": "1"},
                {"failed": -1},
                {"got": 1 << 80},
                {"stats": "x"},
            ):
                link.send(message, [null] * 2)
            assert at.keeper.stats(link)["pending"] == 1
        with Link.adopt(_not_a_socket(at.keeper)) as _:
            pass
        with at.worker():
            assert reader.outcome() == MANY["f01"]
        until(lambda: len(os.listdir(f"/proc/{at.keeper.pid}/fd")) <= before, "as few descriptors as before")
    os.close(null)


def _not_a_socket(keeper: Keeper) -> int:
    """Give the keeper something else as the link to the worker; a descriptor for the caller."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours, its = os.pipe()
    keeper.holder.send({"peer": "worker"}, [its])
    os.close(ours)
    os.close(its)
    other.close()
    return one.detach()


def test_an_inherited_pack_that_is_none_hurts_only_its_readers(here: Path) -> None:
    with site(here, MANY) as at:
        at.keeper.kill()
        broken = FrameMap.create(b"x" * 32, 4096, [0], bytes([MISSING]))
        try:
            other = SparsePack(here / "other", noise(100_000, 9))
            other.frames, frames = broken, other.frames
            at.keeper.start([other, at.image.pack])
            with at.worker():
                assert at.reader("f01").outcome() == MANY["f01"]
            until(lambda: at.keeper.log("not guarded"), "the log line")
            frames.close()
        finally:
            other.close()
