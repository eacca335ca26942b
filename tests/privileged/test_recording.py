"""Recordings of real mounts: what was read is seen, by every way, whoever dies; and readers get the right bytes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.fuse_server import need_fuse
from support.keepers import Keeper, Reader, Worker
from support.lazy_images import lazy_image, noise
from support.mounts import require_file_backed_erofs
from support.recording import (
    BLOCK,
    Site,
    blocks,
    forget,
    header_of,
    need_way,
    pread,
    read_trace,
    recorded,
    site_in,
    until,
)
from support.sandboxes import layer_with
from support.sharedfs import shared
from support.tools import CHECKOUT

from layerstore.errors import ConflictError, MalformedError, NotFoundError, UnsupportedError, UsageError
from overlay.layers import MountableLayer
from overlay.lazy import fanotify
from overlay.mountapi import AT_FDCWD, OPEN_TREE_CLOEXEC, OPEN_TREE_CLONE, mount_id, open_tree
from overlay.recording.recordings import Recordings
from overlay.recording.way import EVENTS, PASSTHROUGH, TRACEPOINTS, WAYS
from prefetch.trace.format import Access

pytestmark = pytest.mark.privileged

A, B = noise(1 << 20, 1), noise(300_001, 2)


@pytest.fixture(autouse=True)
def needs() -> None:
    require_file_backed_erofs()
    need_fuse()


@pytest.fixture
def top() -> Iterator[Path]:
    """On a real file system, by a short path."""
    with tempfile.TemporaryDirectory(prefix="imgtool-test-", dir="/var/tmp") as path:
        yield Path(path)


@pytest.fixture
def site(top: Path) -> Iterator[Site]:
    with site_in(top) as made:
        yield made


@pytest.fixture
def layer(top: Path) -> MountableLayer:
    """``a`` is the pack's first MiB, ``b`` what follows."""
    return layer_with(top / "layer", {b"a": A, b"b": B})


def shown(accesses: Sequence[Access]) -> list[tuple[str | None, int, int]]:
    return [(access.path, access.file_offset, access.length) for access in accesses]


@pytest.mark.parametrize("way", WAYS)
def test_what_was_read_is_what_is_recorded_in_order(site: Site, layer: MountableLayer, way: str) -> None:
    recording = site.start([layer], way)
    assert (recording.id, recording.name, recording.way) == ("box", "it", way)
    assert recording.variant.startswith("via-" if way == PASSTHROUGH else "rec-")
    [lower] = site.mount([layer], recording)
    assert pread(lower / "b", 9 * BLOCK + 5, 10) == B[9 * BLOCK + 5 : 9 * BLOCK + 15]
    assert pread(lower / "a", 200 * BLOCK, 2 * BLOCK) == A[200 * BLOCK : 202 * BLOCK]
    assert pread(lower / "b", 0, 1) == B[:1]
    assert pread(lower / "a", 200 * BLOCK, BLOCK) == A[200 * BLOCK : 201 * BLOCK]  # of the page cache
    stopped, trace = site.stop()
    assert trace.header == header_of([layer])
    start = len(A) // BLOCK
    assert blocks(trace) == [(0, 1, start + 9), (0, 1, 200), (0, 1, 201), (0, 1, start)]
    pieces = shown(trace.accesses)
    assert pieces[0] == ("b", 9 * BLOCK, BLOCK)
    assert pieces[-1] == ("b", 0, BLOCK)
    assert pieces[1:-1] in ([("a", 200 * BLOCK, 2 * BLOCK)], [("a", (200 + n) * BLOCK, BLOCK) for n in range(2)])
    assert {access.comm for access in trace.accesses} == {Path("/proc/self/comm").read_text().strip()}
    assert [access.at for access in trace.accesses] == sorted(access.at for access in trace.accesses)
    assert trace.ended is not None
    assert trace.accesses[-1].at <= trace.ended
    assert (stopped.name, stopped.path) == ("it", str(site.traces / "it.jsonl"))
    assert (stopped.accesses, stopped.bytes, stopped.complete) == (len(trace.accesses), 4 * BLOCK, True)
    assert os.listdir(site.traces) == ["it.jsonl"]
    assert site.warnings == []
    assert pread(lower / "a", 0, len(A)) == A  # the sandbox goes on


@pytest.mark.parametrize("way", WAYS)
def test_nobody_else_is_recorded(site: Site, layer: MountableLayer, way: str) -> None:
    [before] = site.mount([layer])
    recording = site.start([layer], way)
    [lower] = site.mount([layer], recording)
    [after] = site.mount([layer])
    for other in (before, after):
        assert (other / "a").read_bytes() == A
    assert Path(os.fsdecode(layer.devices[0])).read_bytes()[: len(A)] == A
    assert pread(lower / "b", 0, BLOCK) == B[:BLOCK]
    _, trace = site.stop()
    assert shown(trace.accesses) == [("b", 0, BLOCK)]


@pytest.mark.parametrize("way", WAYS)
def test_a_pack_of_several_layers_is_told_apart(site: Site, top: Path, way: str) -> None:
    one = layer_with(top / "one", {b"a": A})
    two = layer_with(top / "two", {b"other/name": A, b"x": b"small"})
    two = MountableLayer(two.digest, two.image, one.devices)  # the same content: one file of the cache
    recording = site.start([one, two], way)
    lower, upper = site.mount([one, two], recording)
    assert pread(upper / "other/name", 5 * BLOCK, BLOCK) == A[5 * BLOCK : 6 * BLOCK]
    assert pread(lower / "a", 7 * BLOCK, BLOCK) == A[7 * BLOCK : 8 * BLOCK]
    _, trace = site.stop()
    assert [(access.layer, access.path, access.offset // BLOCK) for access in trace.accesses] == [
        (1, "other/name", 5),
        (0, "a", 7),
    ]


@pytest.mark.parametrize("way", WAYS)
def test_many_packs(site: Site, top: Path, way: str) -> None:
    """More than one message has descriptors for."""
    layer = layer_with(top / "layer", {b"a": A}, packs=40)
    recording = site.start([layer], way)
    [lower] = site.mount([layer], recording)
    assert (lower / "a").read_bytes() == A
    _, trace = site.stop()
    read = blocks(trace)
    assert len(read) == len(set(read)) == len(A) // BLOCK
    assert {access.device for access in trace.accesses} == set(range(1, 41))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_read_again_counts_again(site: Site, layer: MountableLayer, way: str) -> None:
    recording = site.start([layer], way)
    [lower] = site.mount([layer], recording)
    for _ in range(3):
        assert pread(lower / "a", 0, BLOCK) == A[:BLOCK]
        forget(lower / "a")
    _, trace = site.stop()
    assert [(access.path, access.times) for access in trace.accesses] == [("a", 3)]


def test_all_ways_see_the_same(site: Site, top: Path) -> None:
    layer = layer_with(top / "layer", {b"a": A, b"b": B, b"c": noise(70_000, 3), b"small": b"x"}, packs=3)
    seen = {}
    for way in WAYS:
        recording = site.start([layer], way, name=way)
        [lower] = site.mount([layer], recording)
        for name, offset in (("c", 0), ("a", 500_000), ("b", 299_000), ("small", 0)):
            with (lower / name).open("rb") as stream:
                stream.seek(offset)
                stream.read(50_000)
        _, trace = site.stop()
        site.unmount()
        seen[way] = set(blocks(trace))
        assert {access.path for access in trace.accesses} == {"a", "b", "c"}
    assert seen[TRACEPOINTS] == seen[EVENTS] == seen[PASSTHROUGH]


@pytest.mark.parametrize("way", [TRACEPOINTS, EVENTS])
def test_lazy_packs_are_guarded_and_recorded(site: Site, top: Path, way: str) -> None:
    with lazy_image(top / "image", {"a": A, "b": B}) as image, Keeper(top) as keeper:
        keeper.start()
        for pack in image.packs:
            keeper.guard(pack)
        layer = MountableLayer(image.image.name, str(image.image), tuple(str(pack.path) for pack in image.packs))
        recording = site.start([layer], way)
        [lower] = site.mount([layer], recording)
        with Worker(keeper.connect(), image.packs) as worker:
            for name, data in image.files.items():
                with Reader(lower / name) as reader:
                    assert reader.outcome() == data
            assert worker.wants
        _, trace = site.stop()
        assert len(set(blocks(trace))) == len(image.pack.data) // BLOCK
        site.unmount()


def test_a_guard_goes_on_when_the_recorder_dies(site: Site, top: Path) -> None:
    """The kernel lets the recorder's events go, and not the keeper's: never zeros."""
    with lazy_image(top / "image", {"a": A}) as image, Keeper(top) as keeper:
        keeper.start()
        keeper.guard(image.pack)
        layer = MountableLayer(image.image.name, str(image.image), (str(image.pack.path),))
        recording = site.start([layer], EVENTS)
        [lower] = site.mount([layer], recording)
        with Reader(lower / "a", 0, BLOCK) as waiting:
            waiting.reading()
            os.kill(site.recorder(), signal.SIGKILL)
            until(lambda: not site.recorders(), "the end of the recorder")
            with Reader(lower / "a", 512 << 10, BLOCK) as later:
                later.reading()
                assert not waiting.ended
                with Worker(keeper.connect(), image.packs):
                    assert waiting.outcome() == A[:BLOCK]
                    assert later.outcome() == A[512 << 10 :][:BLOCK]
        site.recordings.stop("box")
        site.unmount()


@pytest.mark.parametrize("way", [TRACEPOINTS, EVENTS])
def test_a_recorder_that_is_killed_stops_nobody_and_leaves_what_it_has_seen(
    site: Site, layer: MountableLayer, way: str
) -> None:
    recording = site.start([layer], way)
    [lower] = site.mount([layer], recording)
    assert pread(lower / "b", 0, BLOCK) == B[:BLOCK]
    until(lambda: site.part().accesses, "lines of what was read")
    pid = site.recorder()
    os.kill(pid, signal.SIGSTOP)
    with Reader(lower / "a") as reader:
        reader.reading()
        os.kill(pid, signal.SIGKILL)
        assert reader.outcome() == A
    until(lambda: not site.recorders(), "the end of the recorder")
    part = site.part()
    assert [(access.offset, access.path) for access in part.accesses] == [(len(A), None)]
    assert part.ended is None
    assert site.recordings.active() == []
    site.recordings.waited("box", 1.0)  # nobody hears it
    stopped, trace = site.stop()
    assert not stopped.complete
    assert trace.ended is None
    assert shown(trace.accesses) == [("b", 0, BLOCK)]
    assert "its recorder ended" in site.warnings[0]
    assert os.listdir(site.traces) == ["it.jsonl"]
    assert (lower / "b").read_bytes() == B


def test_the_next_worker_completes_what_a_killed_recorder_left(site: Site, layer: MountableLayer) -> None:
    recording = site.start([layer], EVENTS)
    [lower] = site.mount([layer], recording)
    pread(lower / "b", 0, BLOCK)
    until(lambda: site.part().accesses, "lines of what was read")
    os.kill(site.recorder(), signal.SIGKILL)
    until(lambda: not site.recorders(), "the end of the recorder")
    assert site.again().active() == []
    stopped, trace = site.stop()
    assert shown(trace.accesses) == [("b", 0, BLOCK)]
    assert not stopped.complete
    with pytest.raises(NotFoundError, match="not recorded"):
        site.recordings.stop("box")


def test_a_passthrough_that_is_killed_gives_errors_and_never_zeros(site: Site, layer: MountableLayer) -> None:
    recording = site.start([layer], PASSTHROUGH)
    [lower] = site.mount([layer], recording)
    assert pread(lower / "a", 0, BLOCK) == A[:BLOCK]
    until(lambda: site.part().accesses, "lines of what was read")
    os.kill(site.recorder(), signal.SIGKILL)
    until(lambda: not site.recorders(), "the end of the recorder")
    with pytest.raises(OSError) as caught:
        pread(lower / "b", 0, BLOCK)
    assert caught.value.errno == errno.EIO
    stopped, trace = site.stop()
    assert (stopped.complete, shown(trace.accesses)) == (False, [("a", 0, BLOCK)])


_WORKER = """
import os, sys, time
sys.path.insert(0, "tests")
from pathlib import Path
from overlay.layers import MountableLayer
from support.recording import Site, Recordings
top, image, device, way, mount = sys.argv[1:]
site = Site(Path(top), Recordings(top + "/root", run=top + "/run"))
layer = MountableLayer(os.path.basename(image), image, (device,))
recording = site.start([layer], way)
if mount == "mount":
    site.mount([layer], recording)
print("up", flush=True)
time.sleep(600)
"""


def killed_worker(site: Site, layer: MountableLayer, way: str, *, mount: bool, before: str = "") -> None:
    """A worker that starts a recording, and is killed with its process group. ``before`` is executed by it first."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", before + _WORKER, str(site.top), str(layer.image), str(layer.devices[0]), way),
            "mount" if mount else "",
        ],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("way", WAYS)
def test_a_recorder_outlives_its_worker(site: Site, layer: MountableLayer, way: str) -> None:
    killed_worker(site, layer, way, mount=True)
    site.mounted.append(str(site.top / "mnt-0"))
    [found] = site.again().active()
    assert (found.id, found.name, found.way, found.devices) == ("box", "it", way, ())
    found.mounted()
    assert pread(site.top / "mnt-0/b", 0, BLOCK) == B[:BLOCK]
    with pytest.raises(ConflictError, match="recorded already"):
        site.start([layer], way, name="other")
    site.recordings.waited("box", 0.5)
    stopped, trace = site.stop()
    assert stopped.complete
    assert shown(trace.accesses) == [("b", 0, BLOCK)]
    assert len(trace.waits) == 1


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_of_a_worker_that_was_killed_before_it_mounted(
    site: Site, layer: MountableLayer, way: str
) -> None:
    killed_worker(site, layer, way, mount=False)
    until(lambda: not site.left(), "the end of the recorder")
    assert os.listdir(site.traces) == []


_KILLED_AT_ONCE = """\
import os, signal
from overlay.recording import recordings
real = recordings.spawned
def spawned(*arguments):
    real(*arguments)
    print("up", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
recordings.spawned = spawned
"""


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_of_a_worker_that_was_killed_before_its_recorder_stood(
    site: Site, layer: MountableLayer, way: str
) -> None:
    need_way(way, site.top)
    killed_worker(site, layer, way, mount=False, before=_KILLED_AT_ONCE)
    until(lambda: not site.left(), "the end of the recorder")
    assert os.listdir(site.traces) == []


def test_what_killed_recorders_left_is_swept(site: Site, layer: MountableLayer) -> None:
    for id in ("box", "unread"):
        [lower] = site.mount([layer], site.start([layer], PASSTHROUGH, id, id))
        if id == "box":
            assert pread(lower / "b", 0, BLOCK) == B[:BLOCK]
            until(lambda: site.part("box").accesses, "lines of what was read")
    for pid in site.recorders():
        os.kill(pid, signal.SIGKILL)
    until(lambda: not site.recorders(), "the end of the recorders")
    site.unmount()
    live = site.start([layer], EVENTS, "live", "live")
    site.mount([layer], live)
    recordings = site.again()
    recordings.sweep(lambda id: True)
    assert sorted(os.listdir(site.traces)) == [f"{name}.jsonl.part" for name in ("box", "live", "unread")]
    recordings.sweep(lambda id: False)
    assert sorted(os.listdir(site.traces)) == ["box.jsonl", "live.jsonl.part"]
    assert shown(read_trace(site.traces / "box.jsonl").accesses) == [("b", 0, BLOCK)]
    assert [recording.id for recording in recordings.active()] == ["live"]
    recordings.discard("live")


def test_who_is_found_while_it_ends_is_not_known_afterwards(
    site: Site, layer: MountableLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.mount([layer], site.start([layer], None))
    find = site.recordings._find

    def slow() -> object:
        found = find()
        site.stop()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(site.recordings, "_find", slow)
        site.recordings.active()
    with pytest.raises(NotFoundError, match="not recorded"):
        site.recordings.stop("box")


@pytest.mark.parametrize("way", WAYS)
def test_it_ends_when_its_last_mount_is_gone(site: Site, layer: MountableLayer, way: str) -> None:
    recording = site.start([layer], way)
    [lower] = site.mount([layer], recording)
    assert pread(lower / "b", 0, BLOCK) == B[:BLOCK]
    site.unmount()
    until(lambda: not site.left(), "the end of the recorder")
    assert site.recordings.active() == []
    stopped, trace = site.stop()
    assert (stopped.accesses, stopped.bytes, stopped.complete) == (1, BLOCK, True)
    assert shown(trace.accesses) == [("b", 0, BLOCK)]


@pytest.mark.parametrize("way", WAYS)
def test_signals(site: Site, layer: MountableLayer, way: str) -> None:
    """Those of a terminal are not its business; SIGTERM completes the trace, and harms nobody who reads."""
    recording = site.start([layer], way)
    [lower] = site.mount([layer], recording)
    pid = site.recorder()
    assert os.getsid(pid) == pid
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    assert pread(lower / "b", 0, BLOCK) == B[:BLOCK]
    os.kill(pid, signal.SIGTERM)
    until(lambda: (site.traces / "it.jsonl").exists(), "the trace")
    assert shown(read_trace(site.traces / "it.jsonl").accesses) == [("b", 0, BLOCK)]
    assert (lower / "a").read_bytes() == A
    if way != PASSTHROUGH:
        until(lambda: not site.left() or site.left() == [f"mount {lower}"], "the end of the recorder")
    stopped, _ = site.stop()
    assert (stopped.accesses, stopped.complete) == (1, True)


@pytest.mark.parametrize("way", WAYS)
def test_a_recorder_has_nothing_of_its_worker(site: Site, layer: MountableLayer, way: str) -> None:
    """Not even what the worker's other children inherit; nor has the worker anything of it, once it has mounted."""
    mine = site.top / "mine"
    mine.touch()
    before = set(os.listdir("/proc/self/fd"))
    fd = os.open(mine, os.O_RDONLY)
    os.set_inheritable(fd, True)
    try:
        recording = site.start([layer], way)
        site.mount([layer], recording)
        pid = site.recorder()
        open_there = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
    finally:
        os.close(fd)
    assert str(mine) not in open_there
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert f"{site.traces}/it.jsonl.part" in open_there
    site.stop()
    site.recordings.release("box")
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_passthrough_serves_on_until_it_is_released(site: Site, layer: MountableLayer) -> None:
    recording = site.start([layer], PASSTHROUGH)
    [lower] = site.mount([layer], recording)
    assert pread(lower / "b", 0, BLOCK) == B[:BLOCK]
    stopped, _ = site.stop()
    assert stopped.accesses == 1
    assert site.recordings.active() == []
    assert (lower / "a").read_bytes() == A
    with pytest.raises(ConflictError, match="still reads"):
        site.start([layer], None, name="second")
    site.recordings.release("box")
    assert not site.recorders()
    with pytest.raises(OSError) as caught:
        pread(lower / "b", 200_000, BLOCK)
    assert caught.value.errno == errno.EIO
    site.recordings.release("box")


def test_a_sandbox_can_be_recorded_again(site: Site, layer: MountableLayer) -> None:
    for name in ("one", "two"):
        recording = site.start([layer], PASSTHROUGH, name=name)
        [lower] = site.mount([layer], recording)
        assert pread(lower / "a", 0, BLOCK) == A[:BLOCK]
        assert site.stop()[0].accesses == 1
        site.unmount()
    assert sorted(os.listdir(site.traces)) == ["one.jsonl", "two.jsonl"]


def test_waits_are_written_and_belong_to_what_was_read(site: Site, layer: MountableLayer) -> None:
    recording = site.start([layer], EVENTS)
    [lower] = site.mount([layer], recording)
    pread(lower / "b", 0, BLOCK)
    site.recordings.waited("box", 0.0005)
    site.recordings.waited("another", 1.0)
    stopped, trace = site.stop()
    [wait] = trace.waits
    assert wait.end - wait.start in range(499, 502)
    [access] = trace.accesses
    if abs(access.at - wait.start) < 4000:  # a machine that is very busy takes longer between the two calls
        assert access.waited == wait.end - wait.start
    assert stopped.complete


def test_the_trace_grows_while_things_happen(site: Site, layer: MountableLayer) -> None:
    recording = site.start([layer], None)
    assert site.part().accesses == ()
    [lower] = site.mount([layer], recording)
    for number in range(3):
        pread(lower / "a", number << 16, BLOCK)
        until(lambda number=number: len(site.part().accesses) == number + 1, "a line of what was read")
    assert not (site.traces / "it.jsonl").exists()
    assert site.part().waits == ()
    site.recordings.discard("box")
    assert os.listdir(site.traces) == []
    assert not site.recorders()
    site.recordings.discard("box")


@pytest.mark.parametrize("way", WAYS)
def test_refusals_leave_nothing(site: Site, layer: MountableLayer, way: str) -> None:
    recording = site.start([layer], way)
    with pytest.raises(ConflictError, match="recorded already"):
        site.start([layer], way, name="other")
    with pytest.raises(ConflictError, match="is being recorded"):
        site.start([layer], way, id="another")
    site.mount([layer], recording)
    site.stop()
    with pytest.raises(ConflictError, match="trace it exists"):
        site.start([layer], way, id="another")
    for name in ("", "a/b", "../up", ".hidden", "sha256:00", "x" * 241):
        with pytest.raises(UsageError):
            site.start([layer], way, id="another", name=name)
    with pytest.raises(UsageError, match="by magic"):
        site.start([layer], "magic", id="another", name="x")
    gone = MountableLayer(layer.digest, layer.image, ("/var/tmp/imgtool-test-missing/pack-" + "0" * 64,))
    if way != TRACEPOINTS:  # nothing is opened for those
        with pytest.raises(NotFoundError, match="missing"):
            site.start([gone], way, id="another", name="x")
    with pytest.raises(ConflictError, match="other packs"):
        site.recordings.start("another", "x", header_of([layer]), recorded([layer, layer]))
    with pytest.raises(NotFoundError, match="not recorded"):
        site.recordings.stop("another")
    assert os.listdir(site.traces) == ["it.jsonl"]


def test_a_name_that_appears_meanwhile_is_kept(site: Site, layer: MountableLayer) -> None:
    recording = site.start([layer], None)
    [lower] = site.mount([layer], recording)
    pread(lower / "a", 0, BLOCK)
    (site.traces / "it.jsonl").write_text("somebody else's")
    with pytest.raises(ConflictError, match="appeared meanwhile"):
        site.recordings.stop("box")
    assert (site.traces / "it.jsonl").read_text() == "somebody else's"
    assert len(site.part().accesses) == 1


def test_paths_are_missing_where_a_metadata_image_is_gone(site: Site, layer: MountableLayer) -> None:
    recording = site.start([layer], EVENTS)
    [lower] = site.mount([layer], recording)
    pread(lower / "a", 0, BLOCK)
    os.rename(layer.image, f"{layer.image}.gone")
    _, trace = site.stop()
    assert shown(trace.accesses) == [(None, 0, BLOCK)]
    assert "its paths are missing" in site.warnings[0]


def test_mounts_are_found_where_a_node_has_them(site: Site, layer: MountableLayer) -> None:
    recording = site.start([layer], TRACEPOINTS)
    with pytest.raises(NotFoundError, match="find the mounts"):
        recording.mounted()
    place = site.top / f"root/layers/{layer.digest}.fuse7.{recording.variant}/mnt"
    place.mkdir(parents=True)
    with pytest.raises(NotFoundError, match="no layer is mounted there"):
        recording.mounted()
    [lower] = site.mount([layer])
    subprocess.run(["mount", "--bind", lower, place], check=True)
    try:
        recording.mounted()
        recording.mounted(["/missing"])  # it knows already
        pread(place / "a", 0, BLOCK)
        _, trace = site.stop()
    finally:
        subprocess.run(["umount", place], check=True)
    assert shown(trace.accesses) == [("a", 0, BLOCK)]


def test_packs_without_events_are_seen_otherwise(site: Site, top: Path) -> None:
    layer = layer_with(top / "layer", {b"a": A})
    with shared("fuse", top / "far") as far:
        name = Path(os.fsdecode(layer.devices[0])).name
        os.rename(layer.devices[0], far.backing / name)
        there = MountableLayer(layer.digest, layer.image, (str(far.path / name),))
        with pytest.raises(UnsupportedError, match=r"events: .*not supported"):
            site.start([there], EVENTS)
        assert os.listdir(site.traces) == []
        for way in (TRACEPOINTS, PASSTHROUGH):
            recording = site.start([there], way, name=way)
            [lower] = site.mount([there], recording)
            assert pread(lower / "a", 0, 2 * BLOCK) == A[: 2 * BLOCK]
            _, trace = site.stop()
            assert set(blocks(trace)) == {(0, 1, 0), (0, 1, 1)}
            site.unmount()
            site.recordings.release("box")


def test_a_layer_without_packs(site: Site, top: Path) -> None:
    layer = layer_with(top / "layer", {b"small": b"x"})
    (top / "root/sandboxes/box").mkdir(parents=True)
    for way in WAYS:
        recording = site.start([layer], way, name=way)
        [lower] = site.mount([layer], recording)
        assert (lower / "small").read_bytes() == b"x"
        stopped, trace = site.stop()
        assert (stopped.accesses, trace.accesses, stopped.complete) == (0, (), True)
        site.unmount()
        site.recordings.release("box")


def test_what_another_release_left_is_not_understood_and_not_in_the_way(site: Site, layer: MountableLayer) -> None:
    recording = site.start([layer], EVENTS)
    directory = next((site.run).rglob("spec.json")).parent
    site.mount([layer], recording)
    site.recordings.discard("box")
    directory.mkdir(parents=True)
    (directory / "spec.json").write_text('{"version": 2}')
    assert Recordings(str(site.top / "root"), run=str(site.run)).active() == []
    with pytest.raises(NotFoundError):
        site.recordings.stop("box")
    site.start([layer], EVENTS)
    site.recordings.discard("box")


def test_a_damaged_part_is_an_error(site: Site, layer: MountableLayer) -> None:
    recording = site.start([layer], EVENTS)
    site.mount([layer], recording)
    os.kill(site.recorder(), signal.SIGKILL)
    until(lambda: not site.recorders(), "the end of the recorder")
    (site.traces / "it.jsonl.part").write_bytes(b"{}\n")
    with pytest.raises(MalformedError, match="not a trace"):
        site.recordings.stop("box")
    site.recordings.release("box")


def test_a_mount_that_is_attached_nowhere_can_be_marked(top: Path) -> None:
    """What the way of events rests on: the mark lives as long as a file is open through the mount, and no longer."""
    path = top / "file"
    path.write_bytes(b"x" * BLOCK)
    group = fanotify.init()
    try:
        clones = [open_tree(AT_FDCWD, str(path), OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC) for _ in range(2)]
        for clone in clones:
            fanotify.mark_mount(group, clone)
        assert mount_id(clones[0]) != mount_id(clones[1])
        assert fanotify.marked_mounts(group) == 2
        with Reader(Path(f"/proc/{os.getpid()}/fd/{clones[0]}"), 0, BLOCK) as reader:
            reader.reading()
            until(lambda: _answered(group, {mount_id(clones[0])}) or reader.ended, "an event")
            assert reader.outcome() == b"x" * BLOCK
        assert path.read_bytes() == b"x" * BLOCK
        with pytest.raises(BlockingIOError):
            next(fanotify.read(group))
        with open(f"/proc/self/fd/{clones[0]}", "rb"):
            for clone in clones:
                os.close(clone)
            until(lambda: fanotify.marked_mounts(group) == 1, "the end of the mount that nobody uses")
        until(lambda: fanotify.marked_mounts(group) == 0, "the end of the other one")
    finally:
        os.close(group)


def _answered(group: int, mounts: set[int]) -> bool:
    try:
        events = list(fanotify.read(group))
    except BlockingIOError:
        return False
    for event in events:
        assert mount_id(event.number) in mounts
        assert event.offset == 0
        assert fanotify.respond(group, event.number, True)
        os.close(event.number)
    return bool(events)
