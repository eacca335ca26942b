"""The holder: whatever ends, hangs or comes twice, what it holds stays open, and what it says is done is done."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.holders import Holders, Pack, Talk
from support.keepers import until

from overlay.lazy import holder as holder_module
from overlay.lazy.holdings import take_over
from overlay.lazy.rendezvous import FUSE, HOLDER, KEEPER, LOCK_OF, SOCKET, WORKER, Entrance, alone, connect


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Holders]:
    with Holders(tmp_path) as node:
        yield node


def alone_with(node: Holders, worker: Talk) -> None:
    """Until the holder has met its keeper, and forgotten the worker that it had started."""
    node.settle()
    until(lambda: not node.processes()[WORKER], "that one has ended")
    worker.ask({"status": 0})


def guarded(node: Holders) -> int:
    return len(node.notes.lines("guarded"))


# --- what the worker asks for


def test_a_pack_is_held_when_the_keeper_guards_it_and_no_longer_than_that(node: Holders) -> None:
    holder = node.start()
    with node.connect() as worker:
        pack = node.pack()
        alone_with(node, worker)
        before = node.descriptors(holder), node.descriptors(node.pid(KEEPER))
        for number in range(0, 200, 2):
            assert worker.hold(number, pack) == {"done": number}
            assert guarded(node) == number // 2 + 1
            assert worker.drop(number + 1, pack) == {"done": number + 1}
        assert (node.descriptors(holder), node.descriptors(node.pid(KEEPER))) == before


def test_what_is_asked_about_one_pack_is_answered_in_this_order(node: Holders) -> None:
    """A hold that comes while a drop is under way is not done when that drop is."""
    holder = node.start()
    with node.connect() as worker:
        pack = node.pack()
        alone_with(node, worker)
        before = node.descriptors(holder)
        worker.hold(1, pack)
        node.notes.let("keeper waits")
        worker.send({"drop": 2, "pack": pack.hex, "with": KEEPER})
        worker.send({"hold": 3, "pack": pack.hex, "with": KEEPER}, pack)
        worker.send({"drop": 4, "pack": pack.hex, "with": KEEPER})
        worker.send({"hold": 5, "pack": pack.hex, "with": KEEPER}, pack)
        assert worker.is_silent()
        node.notes.let("keeper waits", so=False)
        for number, count in ((2, 1), (3, 2), (4, 2), (5, 3)):
            assert worker.hear() == {"done": number}
            assert guarded(node) >= count
        assert node.descriptors(holder) == before + 2
        node.kill(KEEPER)
        until(lambda: node.notes.lines("keeper")[-1].endswith(pack.hex), "the next one guards it")


def test_an_answer_to_a_worker_that_has_ended_is_not_for_its_successor(node: Holders) -> None:
    """Both number their requests from one."""
    node.start()
    node.pid(KEEPER)
    first, second = node.pack(1), node.pack(2)
    node.notes.let("keeper waits")

    def worker() -> None:
        with node.connect() as talk:
            talk.send({"hold": 1, "pack": first.hex, "with": KEEPER}, first)
            talk.send({"hold": 2, "pack": first.hex, "with": KEEPER}, first)
            talk.send({"status": 3})
            talk.hear()

    assert os.waitpid(node.fork(worker), 0)[1] == 0
    with node.connect() as talk:
        talk.send({"hold": 1, "pack": second.hex, "with": KEEPER}, second)
        talk.send({"hold": 2, "pack": first.hex, "with": KEEPER}, first)
        node.notes.let("keeper waits", so=False)
        done = {}
        for _ in range(2):
            number = talk.hear()["done"]
            done[number] = node.notes.lines("guarded")
        assert any(line.endswith(second.hex) for line in done[1])
        assert sum(line.endswith(first.hex) for line in done[2]) == 2


def test_a_keeper_that_ends_before_it_has_answered_is_asked_again(node: Holders) -> None:
    node.start()
    with node.connect() as worker:
        first, second = node.pack(1), node.pack(2)
        worker.hold(1, first)
        node.notes.let("keeper waits")
        worker.send({"drop": 2, "pack": first.hex, "with": KEEPER})
        worker.send({"hold": 3, "pack": second.hex, "with": KEEPER}, second)
        node.kill(KEEPER)
        node.notes.let("keeper waits", so=False)
        assert sorted(worker.hear()["done"] for _ in range(2)) == [2, 3]
        assert second.hex in node.notes.lines("guarded")[-1]


def test_what_is_refused_is_not_held_unless_it_was(node: Holders) -> None:
    holder = node.start()
    with node.connect() as worker:
        first, second = node.pack(1), node.pack(2)
        alone_with(node, worker)
        worker.hold(1, first)
        node.notes.let("keeper refuses")
        before = node.descriptors(holder)
        assert worker.hold(2, second) == {"failed": 2, "why": "told so"}
        assert node.descriptors(holder) == before
        assert "failed" in worker.hold(3, first)  # as it was, it is guarded still
        assert node.descriptors(holder) == before
        node.kill(KEEPER)
        until(lambda: node.notes.lines("keeper")[-1].endswith(f" {first.hex}"), "so the next one guards it, too")


def test_a_pack_that_was_made_anew_takes_the_place_of_the_old_one_outside_too(node: Holders) -> None:
    holder = node.start(stored=True)
    with node.connect() as worker:
        old, new = node.pack(1), node.pack(1)
        alone_with(node, worker)
        worker.hold(1, old)
        before = node.descriptors(holder)
        worker.hold(2, old)
        worker.hold(3, new)
        assert node.descriptors(holder) == before
        kinds = [line.split()[:2] for line in (*node.notes.lines("store"), *node.notes.lines("remove"))]
        assert kinds.count(["store", old.hex]) == 3 and kinds.count(["remove", old.hex]) == 1
        stored = node.notes.lines(f"store {old.hex}")
        assert stored[0] == stored[1] != stored[2]


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"hold": 1},
        {"hold": "x", "pack": "y", "with": KEEPER},
        {"hold": 1, "pack": "y", "with": KEEPER},
        {"drop": 1},
        {"drop": 1, "pack": "z", "with": "nobody"},
        {"start": None},
    ],
)
def test_messages_that_make_no_sense_end_nothing_and_keep_nothing_open(
    node: Holders, message: dict[str, object]
) -> None:
    holder = node.start()
    with node.connect() as worker:
        pack = node.pack()
        alone_with(node, worker)
        worker.hold(8, pack)
        before = node.descriptors(holder)
        worker.send(message)
        worker.link.send(message, [pack.data, pack.data, pack.data])
        assert worker.ask({"status": 9})["pids"][HOLDER] == holder
        assert node.descriptors(holder) == before


# --- what goes wrong


def test_failing_to_start_a_process_is_no_end(node: Holders) -> None:
    """Were it one, the group would be closed, and readers get zeros."""
    fork = os.fork
    left = 3

    def failing() -> int:
        nonlocal left
        left -= 1
        if left >= 0:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return fork()

    def before() -> None:
        os.fork = failing
        holder_module._AGAIN = 0.05

    holder = node.start(before)
    node.pid(KEEPER)
    node.pid(WORKER)
    assert node.pid(HOLDER) == holder
    assert len(node.notes.lines("log not started")) == 3


def test_neither_is_a_lack_of_descriptors(node: Holders) -> None:
    holder = node.start()
    node.pid(KEEPER)
    with node.connect() as worker:
        worker.ask({"status": 1})
        node.settle()
        node.limit_descriptors(holder, 3)
        stranger = connect(str(node.directory), "stranger")
        until(lambda: node.notes.lines("log unexpected"), "it can't accept anybody")
        node.kill(KEEPER)
        until(lambda: node.notes.lines("log not started"), "it can't watch another one")
        node.limit_descriptors(holder, 1000)
        node.pid(KEEPER)
        assert stranger is not None
        stranger.close()
        assert worker.ask({"status": 2})["pids"][HOLDER] == holder
    assert node.processes()["zombies"] == []


def test_a_process_that_fails_at_once_is_started_ever_more_seldom(node: Holders) -> None:
    node.notes.let("workers fail")
    node.start(patient=True)
    until(lambda: len(node.notes.lines("worker")) == 4, "a few are started")
    began = time.monotonic()
    assert [line.rpartition("=")[2] for line in node.notes.lines("log ended")][:3] == ["0.0", "0.1", "0.5"]
    until(lambda: len(node.notes.lines("log ended")) == 4, "and that ends")
    assert node.notes.lines("log ended")[3].endswith("=2.0")
    node.notes.let("workers fail", so=False)
    until(lambda: len(node.notes.lines("worker")) == 5, "the next one works")
    assert time.monotonic() - began > 1


def test_a_worker_that_does_not_read_holds_up_nobody(node: Holders) -> None:
    holder = node.start()
    keeper = node.pid(KEEPER)

    def hang() -> None:
        with node.connect() as talk:
            for number in range(1000):
                talk.send({"status": number})
            node.notes.add("hangs")
            signal.pause()

    worker = node.fork(hang)
    until(lambda: node.notes.lines("hangs"), "it has asked, and hears nothing")
    os.kill(keeper, signal.SIGKILL)
    until(lambda: node.processes()[KEEPER] not in ([], [keeper]), "there is another keeper")
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    with node.connect() as talk:
        assert talk.hold(1, node.pack()) == {"done": 1}
    assert node.pid(KEEPER) and os.path.exists(f"/proc/{holder}")


def test_one_that_reads_late_hears_everything(node: Holders) -> None:
    node.start()
    with node.connect() as worker:
        for number in range(1000):
            worker.send({"status": number})
        assert [worker.hear()["done"] for _ in range(1000)] == list(range(1000))
        assert worker.hold(1, node.pack()) == {"done": 1}


def test_one_that_never_reads_is_ended(node: Holders) -> None:
    node.start()

    def hang() -> None:
        with node.connect() as talk:
            while True:
                talk.send({"status": 1})

    _, status = os.waitpid(node.fork(hang), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    with node.connect() as talk:
        assert "pids" in talk.ask({"status": 1})


# --- kills


def counted(node: Holders) -> list[int]:
    """Descriptors of each, once all have said hello."""
    node.settle()
    return [node.descriptors(node.pid(role)) for role in (HOLDER, KEEPER, WORKER)]


def test_kills_leave_nothing_open_and_nobody_unreaped(node: Holders) -> None:
    node.start()
    packs = [node.pack(number) for number in range(3)]
    node.as_worker(lambda worker: [worker.hold(number, pack) for number, pack in enumerate(packs)])
    node.notes.let("workers say hello")
    for role in (WORKER, HOLDER, KEEPER):
        node.kill(role)
        node.pid(role)
    before: list[int] = []
    for _ in range(100):
        for role in (KEEPER, WORKER):
            node.kill(role)
            node.pid(role)
        before = before or counted(node)
    after = counted(node)
    assert max(abs(one - other) for one, other in zip(before, after, strict=True)) <= 1, (before, after)
    assert node.processes()["zombies"] == []
    assert node.notes.lines("keeper")[-1].split()[2:] == [pack.hex for pack in packs]


def test_killed_holders_are_succeeded_one_by_one_and_leave_no_zombies(node: Holders) -> None:
    node.start()
    pack = node.pack()
    with node.connect() as worker:
        worker.hold(1, pack)
    keeper = node.pid(KEEPER)
    counts = []
    for _ in range(6):
        node.kill(HOLDER)
        node.pid(HOLDER)
        with node.connect() as worker:
            assert worker.ask({"status": 1})["pids"][HOLDER] == node.pid(HOLDER)
        counts.append(node.descriptors(keeper))
    assert node.pid(KEEPER) == keeper
    assert node.processes()["zombies"] == []
    assert counts[-1] <= counts[0] + 1


def test_of_many_successors_one_remains(node: Holders) -> None:
    """A machine is so busy that the keeper gives its successors up, one after the other, before they listen."""
    node.start()
    with node.connect() as worker:
        worker.hold(1, node.pack())
    node.pid(KEEPER)
    node.notes.let("successors are slow")
    node.kill(HOLDER)
    until(lambda: len(node.processes()[HOLDER]) > 1, "several are under way")
    node.notes.let("successors are slow", so=False)
    with node.connect() as worker:
        assert worker.ask({"status": 1})["pids"][HOLDER] == node.pid(HOLDER)
        assert worker.hold(2, node.pack(2)) == {"done": 2}
    assert len(node.processes()[KEEPER]) == 1
    assert node.processes()["zombies"] == []


def test_there_are_never_two_keepers(node: Holders) -> None:
    """One doesn't get the processor for so long that a holder starts another one."""
    node.start()
    keeper = node.pid(KEEPER)
    until(lambda: node.notes.lines("keeper"), "it works")
    os.kill(keeper, signal.SIGSTOP)
    node.kill(HOLDER)
    holder = node.start(found=True)  # as a worker would
    until(lambda: len([line for line in node.notes.lines("log ended") if "keeper" in line]) > 1, "others are tried")
    assert {line.split()[1] for line in node.notes.lines("keeper")} == {str(keeper)}
    os.kill(keeper, signal.SIGCONT)

    def is_back() -> bool:
        with node.connect() as worker:
            return bool(worker.ask({"status": 1})["pids"].get(KEEPER) == keeper)

    until(is_back, "it is the keeper again")
    with node.connect() as worker:
        assert worker.hold(1, node.pack()) == {"done": 1}
    assert node.pid(KEEPER) == keeper and os.path.exists(f"/proc/{holder}")
    assert {line.split()[1] for line in node.notes.lines("keeper")} == {str(keeper)}


# --- handing over


def test_who_takes_over_is_found_by_everybody_at_any_moment(node: Holders) -> None:
    first = node.start()
    pack = node.pack()
    with node.connect() as worker:
        worker.hold(1, pack)
    keeper = node.pid(KEEPER)
    over = threading.Event()
    missed = []

    def look() -> None:
        while not over.is_set():
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.setblocking(False)
                try:
                    stranger.connect(f"{node.directory}/{SOCKET}")
                except BlockingIOError:
                    time.sleep(0.001)  # they are many, and it is busy
                except OSError as error:
                    missed.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        second = node.start(taking_over=True, stored=True)
        os.waitpid(first, 0)
        until(lambda: len(node.notes.lines("log found role=keeper")) == 1, "the keeper has said hello to it")
    finally:
        over.set()
        thread.join()
    assert missed == []
    assert node.pid(KEEPER) == keeper and node.pid(HOLDER) == second
    with node.connect() as worker:
        assert worker.ask({"status": 1})["pids"][HOLDER] == second
        assert worker.drop(2, pack) == {"done": 2}
    assert node.notes.lines("tell") == ["tell READY=1"]
    assert node.notes.lines(f"store {pack.hex}") and node.notes.lines("store group")


@pytest.mark.parametrize("moment", ["before it listens", "when it listens", "when nobody waits any more"])
def test_whoever_dies_while_it_takes_over_changes_nothing(node: Holders, moment: str) -> None:
    first = node.start()
    pack = node.pack()
    with node.connect() as worker:
        worker.hold(1, pack)

    def dying() -> None:
        holdings = take_over(str(node.directory))
        if moment == "when nobody waits any more":
            assert holdings.predecessor is not None
            holdings.predecessor.close()
            time.sleep(0.2)
        if moment != "before it listens":
            Entrance(str(node.directory))
        os._exit(9)

    os.waitpid(node.fork(dying), 0)
    if moment == "when nobody waits any more":
        node.kill(KEEPER)  # its successor finds the way
    with node.connect() as worker:
        assert worker.ask({"status": 1})["pids"][HOLDER] == first
        assert worker.drop(2, pack) == {"done": 2}


def test_a_lock_is_one_processs_and_ends_with_it(node: Holders) -> None:
    def hold() -> None:
        alone(str(node.directory), "x")
        node.notes.add("locked")
        if os.fork() == 0:
            signal.pause()
        signal.pause()

    parent = node.fork(hold)
    until(lambda: node.notes.lines("locked"), "it has it")
    with pytest.raises(Exception, match="another process is the x already"):
        alone(str(node.directory), "x")
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    os.close(alone(str(node.directory), "x"))  # its child has the descriptor still


# --- the end


def test_a_signal_to_end_reaches_the_worker_that_comes_next(node: Holders) -> None:
    holder = node.start(stored=True)
    os.kill(holder, signal.SIGTERM)
    until(lambda: node.notes.lines("tell STOPPING=1"), "it is heard")
    for _ in range(2):
        with node.connect() as worker:
            assert worker.hear("stop") == {"stop": True}


def test_it_ends_with_everything_when_the_mounts_are_gone(node: Holders) -> None:
    holder = node.start(stored=True)

    def worker() -> None:
        with node.connect() as talk:
            talk.hold(1, node.pack())
            assert talk.ask({"stopped": 2}) == {"done": 2}

    os.waitpid(node.fork(worker), 0)
    _, status = os.waitpid(holder, 0)
    assert status == 0 and not node.directory.exists()
    assert not any(node.processes()[role] for role in (KEEPER, WORKER, FUSE))
    assert {"remove group", f"remove {(1).to_bytes(32, 'big').hex()}"} <= set(node.notes.lines("remove"))


# --- FUSE


def start_fuse(node: Holders, worker: Talk, number: int, name: str) -> dict[str, object]:
    return worker.ask({"start": number, "service": FUSE, "directory": f"{node.directory}/packs/{name}"})


def test_a_fuse_server_is_started_and_its_loss_is_told(node: Holders) -> None:
    holder = node.start()
    with node.connect() as worker:
        directory = f"{node.directory}/packs/1"
        assert start_fuse(node, worker, 1, "1") == {"done": 1, "directory": directory}
        assert start_fuse(node, worker, 2, "2") == {"done": 2, "directory": directory}  # it serves that
        before = node.descriptors(holder)
        assert worker.hold(3, node.pack(1), FUSE) == {"done": 3}
        node.notes.let("fuse waits")
        worker.send({"hold": 4, "pack": node.pack(2).hex, "with": FUSE}, node.packs[-1])
        worker.send({"drop": 5, "pack": node.packs[0].hex, "with": FUSE})
        node.kill(FUSE)
        node.notes.let("fuse waits", so=False)
        said = [worker.hear("done", "failed", "lost") for _ in range(3)]
        assert {"failed": 4, "why": "the FUSE server ended"} in said and {"done": 5} in said
        assert said[-1] == {"lost": FUSE}
        assert node.descriptors(holder) <= before
        assert worker.hold(6, node.pack(3), FUSE) == {"failed": 6, "why": "no FUSE server runs"}
        assert worker.hear("lost") == {"lost": FUSE}
        assert worker.drop(7, node.packs[-1], FUSE) == {"done": 7}
        assert start_fuse(node, worker, 8, "8")["directory"] == f"{node.directory}/packs/8"


def test_one_that_does_not_start_is_said_so(node: Holders) -> None:
    node.start()
    node.notes.let("fuse fails")
    with node.connect() as worker:
        assert start_fuse(node, worker, 1, "1") == {"failed": 1, "why": "the FUSE server ended"}


def test_nobody_has_open_what_is_not_his(node: Holders) -> None:
    """It would take space on the disk after the pack was evicted."""
    node.start()
    one, other = node.pack(1), node.pack(2)

    def work(worker: Talk) -> None:
        worker.hold(1, one)
        start_fuse(node, worker, 2, "1")
        worker.hold(3, other, FUSE)

    node.as_worker(work)
    node.kill(KEEPER)
    node.settle()

    def has(role: str, pack: Pack) -> int:
        directory = f"/proc/{node.pid(role)}/fd"
        names = [os.path.realpath(f"{directory}/{fd}") for fd in os.listdir(directory)]
        return names.count(os.path.realpath(f"/proc/self/fd/{pack.data}"))

    found = {role: (has(role, one), has(role, other)) for role in (HOLDER, KEEPER, FUSE, WORKER)}
    assert found == {HOLDER: (1, 1), KEEPER: (1, 0), FUSE: (0, 1), WORKER: (1, 1)}


def test_a_fuse_server_that_is_gone_with_its_holder_is_missed(node: Holders) -> None:
    node.start()
    with node.connect() as worker:
        start_fuse(node, worker, 1, "1")
    node.kill(HOLDER, FUSE)
    with node.connect() as worker:
        worker.send({"hold": 1, "pack": node.pack().hex, "with": FUSE}, node.packs[-1])
        assert worker.hear() == {"failed": 1, "why": "the FUSE server ended"}
        assert worker.hear("lost") == {"lost": FUSE}
    assert LOCK_OF.format(KEEPER) in os.listdir(node.directory)


def test_packs_that_a_fuse_server_has_are_held_by_a_successor(node: Holders) -> None:
    holder = node.start()
    pack, other = node.pack(1), node.pack(2)

    def serve() -> None:
        link = connect(str(node.directory), FUSE)
        assert link is not None
        link.send({"mounted": True, "directory": f"{node.directory}/packs/1"})
        link.send({"has": pack.hex}, pack.fds)
        link.send({"has": pack.hex}, other.fds)  # what is known already counts
        signal.pause()

    def held(pack: Pack) -> int:
        names = [os.path.realpath(f"/proc/{holder}/fd/{fd}") for fd in os.listdir(f"/proc/{holder}/fd")]
        return names.count(os.path.realpath(f"/proc/self/fd/{pack.data}"))

    before = held(pack), held(other)
    server = node.fork(serve)
    until(lambda: held(pack) > before[0], "it holds them")
    with node.connect() as worker:
        assert str(start_fuse(node, worker, 1, "2")["directory"]).endswith("/1")
        assert (held(pack), held(other)) == (before[0] + 1, before[1])
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
