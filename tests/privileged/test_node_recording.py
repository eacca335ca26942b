"""Recorded sandboxes: what is read is seen, in every mode; and what was promised to readers holds all the same."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.conversions import Site
from support.httpstore import StoreServer
from support.nodes import NodeService, eventually, node_service
from support.reading import Reader, expected, make_files
from support.sandboxes import mounts_unchanged, node_root
from support.tools import CHECKOUT, lacking, need_tool

from layerstore.errors import ConflictError, NotFoundError, UnavailableError
from layerstore.image import load_image
from layerstore.rawpacks import publish_raw
from overlay import mountinfo
from overlay.layerkey import is_recorded, known_key, plain_variant
from overlay.lazy.choice import fuse_works
from overlay.recording.way import EVENTS, PASSTHROUGH
from overlay.service.client import Client, SandboxInfo, TraceInfo
from overlay.service.place import run_directory
from overlay.service.request import Record, SandboxRequest
from prefetch.trace.format import Trace, parse_trace
from prefetch.trace.places import ImagePlaces, open_places

pytestmark = [pytest.mark.privileged, pytest.mark.usefixtures("mounts_unchanged")]

__all__ = ["mounts_unchanged"]

SIZE = 300_000
FILES = 6
WAYS = ("eager", "fanotify", "fuse", "direct")
DEADLINE = 5.0
SEEN = [("fanotify", None), ("fanotify", EVENTS), ("fuse", PASSTHROUGH)]
"""How data are loaded, and how reads are seen: as they are here, or in one way alone."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    path = tmp_path_factory.mktemp("node-recording")
    make_files(path / "tree/data", files=FILES, size=SIZE)
    site = Site(path)
    site.convert(f"tree:{path}/tree", tag="it")
    publish_raw(site.store, ["it"])
    return site


@pytest.fixture
def server(site: Site) -> Iterator[StoreServer]:
    with StoreServer(site.store.location) as server:
        yield server


def asked(way: str, store: str, **fields: object) -> SandboxRequest:
    """A request for this way to reach the data."""
    if way == "fuse" and (why := fuse_works()) is not None:
        lacking(f"no FUSE: {why}")
    how: dict[str, object] = {"mode": way} if way in ("eager", "direct") else {"mode": "lazy", "backend": way}
    return SandboxRequest.from_json({"base": "it", "store": store, **how, **fields})


def is_right(rootfs: str, number: int) -> bool:
    content = Path(rootfs, f"data/f{number}").read_bytes()
    return len(content) > SIZE and content == expected(f"f{number}", 0, len(content))


def comes(rootfs: str, number: int) -> bool:
    """Whether a file can be read: what isn't an error is right."""
    try:
        return is_right(rootfs, number) or pytest.fail("wrong bytes")
    except OSError:
        return False


def all_come(rootfs: str) -> bool:
    return all(comes(rootfs, number) for number in range(FILES))


def recorders(root: str) -> list[int]:
    """Recorders of this root."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"overlay.recording.recorder" in words and any(os.fsencode(run_directory(root)) in word for word in words):
            found.append(int(pid))
    return found


def recorded_mounts(root: str) -> list[str]:
    """Keys of the mounts of layers whose reads are recorded, or were."""
    names = [
        Path(os.fsdecode(mount.target)).parent.name for mount in mountinfo.below(f"{root}/layers", mountinfo.read())
    ]
    return [name for name in names if is_recorded(name)]


def parsed(trace: TraceInfo) -> Trace:
    return parse_trace(Path(trace.path).read_bytes(), trace.path)


def read_files(trace: Trace) -> set[str | None]:
    return {access.path for access in trace.accesses}


def covers(places: ImagePlaces, trace: Trace, path: str) -> bool:
    """Whether all of a file's data is in the trace."""
    found = places.find(path.encode())
    assert found is not None
    read = {
        (access.layer, access.device, block)
        for access in trace.accesses
        for block in range(access.offset, access.end, 4096)
    }
    return all(
        (place.range.layer, place.range.device, block) in read
        for place in places.ranges(found)
        for block in range(place.range.offset, place.range.offset + place.range.length, 4096)
    )


_ONE_WAY = """\
from overlay.recording import way
way.WAYS = ({way!r},)
"""


@contextmanager
def service_that_sees_by(way: str | None, directory: Path, *options: str) -> Iterator[tuple[NodeService, Client]]:
    """A service whose recorders can go this way alone, as on a machine without the others; None: as it is here."""
    environment = {}
    if way is not None:
        (directory / "site").mkdir()
        (directory / "site/sitecustomize.py").write_text(_ONE_WAY.format(way=way))
        environment["PYTHONPATH"] = f"{directory}/site:{CHECKOUT}"
    with NodeService(node_root(directory), *options, environment=environment) as service, service.client() as client:
        yield service, client


@contextmanager
def left_clean(service: NodeService, client: Client) -> Iterator[None]:
    """After the block and a stop nothing of it is left."""
    yield
    client.remove_all()
    service.stop()
    assert service.mounts() == [] and service.processes() == []
    eventually(lambda: recorders(service.root) == [], "recorders end")
    assert not os.path.exists(f"{service.run_directory}/recordings")


@pytest.mark.parametrize("way", WAYS)
def test_what_a_sandbox_reads_is_recorded_and_nobody_else(
    way: str, site: Site, server: StoreServer, tmp_path: Path
) -> None:
    store = site.store.location if way == "direct" else server.url
    with node_service(node_root(tmp_path)) as (service, client), left_clean(service, client):
        (other,) = client.create(asked(way, store))
        assert is_right(other.rootfs, 0) and is_right(other.rootfs, 1)
        request = asked(way, store, id="box", record={"name": "monday"}, command=["cat", "f0"])
        (box,) = client.create(request)
        assert (box.trace, box.condition, box.raw["receipt"]["trace"]) == ("monday", "ok", "monday")
        assert [(item.sandbox, item.name) for item in client.traces()] == [("box", "monday")]
        assert Path(client.traces()[0].path).exists()
        (key,) = recorded_mounts(service.root)
        assert known_key(key)[0] == load_image(site.store, "it").layers[0].metadata.hex
        assert is_right(box.rootfs, 0)  # which the node has had for long
        assert is_right(box.rootfs, 2)
        assert is_right(other.rootfs, 4)
        assert client.status().raw["recordings"][0]["sandbox"] == "box"
        assert "imgtool_recordings 1.0" in client.metrics()
        removal = client.remove("box")
        assert removal.trace is not None and removal.trace.complete
        trace = parsed(removal.trace)
        assert read_files(trace) - {None} == {"data/f0", "data/f2"}
        with open_places(site.store, load_image(site.store, "it")) as places:
            assert covers(places, trace, "data/f0") and covers(places, trace, "data/f2")
        assert removal.trace.bytes == sum(access.length for access in trace.accesses)
        header = trace.header
        assert (header.image, header.mode, header.command) == ("it", box.mode, ("cat", "f0"))
        assert header.manifest == box.image["manifest"]
        assert header.backend == box.backend
        assert client.traces() == [] and recorded_mounts(service.root) == []
        assert (client.receipt("box")["trace"], client.sandbox(other.id).trace) == ("monday", None)
        assert client.status().raw["layers"] == {
            key: 1 for key in client.status().raw["layers"] if not is_recorded(key)
        }, "the other one holds it still, and the recorded one does no more"


@pytest.mark.parametrize(("way", "seen"), SEEN)
def test_who_waits_in_a_recorded_sandbox_is_counted_and_in_its_trace(
    way: str, seen: str | None, server: StoreServer, tmp_path: Path
) -> None:
    with service_that_sees_by(seen, tmp_path) as (service, client), left_clean(service, client):
        (box,) = client.create(asked(way, server.url, id="box", record={}, plan="none"))
        with open(f"{box.rootfs}/data/f3", "rb"):
            subprocess.run([need_tool("cat"), "data/f3"], cwd=box.rootfs, stdout=subprocess.DEVNULL, check=True)
        demand = client.sandbox("box").raw["demand"]
        assert demand["frames"] > 0 and demand["waited"] > 0
        trace = parsed(client.stop_trace("box"))
        assert trace.waits and trace.header.origin == "recorded"
        assert any(access.waited for access in trace.accesses)
        assert {access.comm for access in trace.accesses if access.path == "data/f3"} == {"cat"}
        assert client.sandbox("box").trace is None
        assert is_right(box.rootfs, 5)  # it goes on
        assert "data/f5" not in read_files(parse_trace(Path(f"{service.root}/traces/box.jsonl").read_bytes(), "box"))


@pytest.mark.parametrize(("way", "seen"), SEEN)
def test_a_worker_that_is_killed_leaves_a_recorded_sandbox_guarded_counted_and_recorded(
    way: str, seen: str | None, server: StoreServer, tmp_path: Path
) -> None:
    with service_that_sees_by(seen, tmp_path, "--read-deadline", str(DEADLINE)) as (service, client):
        (box,) = client.create(asked(way, server.url, id="box", record={}))
        assert seen in (None, client.traces()[0].way)
        guarded = client.status().raw["backends"][way]["guarded_packs"]
        assert guarded == 1
        holds = client.status().raw["layers"]
        reader = Reader(f"{box.rootfs}/data", 1)
        for _ in range(2):
            service.kill("worker")
            service.pids()  # until somebody answers again
        outcome = reader.end(within=8 * DEADLINE)
        assert not outcome.wrong and outcome.right
        with service.client() as again, left_clean(service, again):
            found = again.sandbox("box")
            assert (found.condition, found.mounted, found.trace) == ("ok", True, "box")
            assert again.status().raw["layers"] == holds
            assert [plain_variant(known_key(key)[1]) for key in holds] == [known_key(key)[1] for key in holds]
            eventually(lambda: all_come(box.rootfs), "all is there")
            other = again.create(asked(way, server.url))[0]
            assert list(again.status().raw["layers"].values()) == [2]
            assert is_right(other.rootfs, 1)
            removal = again.remove("box")
            assert removal.trace is not None and removal.trace.complete
            assert read_files(parsed(removal.trace)) >= {f"data/f{number}" for number in range(FILES)}


@pytest.mark.parametrize(("way", "seen"), [*SEEN, ("fuse", None), ("fanotify", PASSTHROUGH)])
def test_what_is_missing_is_never_zeros_while_worker_and_recorder_are_killed(
    way: str, seen: str | None, server: StoreServer, tmp_path: Path
) -> None:
    with service_that_sees_by(seen, tmp_path, "--read-deadline", str(DEADLINE)) as (service, client):
        (box,) = client.create(asked(way, server.url, id="box", record={}, plan="none"))
        readers = [Reader(f"{box.rootfs}/data", seed) for seed in range(2)]
        eventually(lambda: Path(f"{service.root}/traces/box.jsonl.part").stat().st_size > 2000, "reads are recorded")
        pids = recorders(service.root)
        assert len(pids) == 1
        in_path = client.traces()[0].way == PASSTHROUGH
        service.kill("worker")
        os.kill(pids[0], signal.SIGKILL)
        service.pids()
        outcomes = [reader.end(within=8 * DEADLINE) for reader in readers]
        assert not any(outcome.wrong for outcome in outcomes)
        assert all(outcome.right for outcome in outcomes)
        with service.client() as again, left_clean(service, again):
            found = again.sandbox("box")
            assert found.trace is None
            if not in_path:  # nothing of the recorder is in the way: who guarded guards as before
                assert found.condition == "ok"
                eventually(lambda: all_come(box.rootfs), "all is there")
            else:  # it was read through the recorder
                assert found.condition.startswith("impaired: the recorder")
                assert errors(box)
            (other,) = again.create(asked(way, server.url))
            assert is_right(other.rootfs, 2)
            removal = again.remove("box")
            assert removal.trace is not None and not removal.trace.complete
            assert parsed(removal.trace).ended is None
            assert removal.trace.accesses > 0


def errors(box: SandboxInfo) -> bool:
    """Whether some file can't be read any more; those in the page cache can."""
    failed = False
    for number in range(FILES):
        Path("/proc/sys/vm/drop_caches").write_text("1")
        failed |= not comes(box.rootfs, number)
    return failed


def test_a_recorder_that_is_killed_under_readers_lets_them_go_on_as_before(server: StoreServer, tmp_path: Path) -> None:
    with node_service(node_root(tmp_path)) as (service, client), left_clean(service, client):
        (box,) = client.create(asked("fanotify", server.url, id="box", record={}, plan="none"))
        reader = Reader(f"{box.rootfs}/data", 3)
        eventually(lambda: Path(f"{service.root}/traces/box.jsonl.part").stat().st_size > 2000, "reads are recorded")
        for pid in recorders(service.root):
            os.kill(pid, signal.SIGKILL)
        assert all(is_right(box.rootfs, number) for number in range(FILES))
        outcome = reader.end(within=30)
        assert (outcome.errors, outcome.wrong) == (0, [])
        assert client.sandbox("box").condition == "ok"
        eventually(lambda: client.sandbox("box").trace is None, "nobody records it")
        trace = client.stop_trace("box")
        assert not trace.complete and trace.accesses > 0
        with pytest.raises(NotFoundError):
            client.stop_trace("box")


@pytest.mark.parametrize(("way", "seen"), [("eager", None), ("direct", PASSTHROUGH), ("fuse", PASSTHROUGH)])
def test_a_sandbox_that_stands_is_recorded_if_nobody_is_in_it(
    way: str, seen: str | None, site: Site, server: StoreServer, tmp_path: Path
) -> None:
    store = site.store.location if way == "direct" else server.url
    with service_that_sees_by(seen, tmp_path) as (service, client), left_clean(service, client):
        (box,) = client.create(asked(way, store, id="box"))
        assert is_right(box.rootfs, 0)
        Path(box.rootfs, "written").write_text("kept")
        with subprocess.Popen(["sleep", "1000"], cwd=box.rootfs) as process:
            with pytest.raises(ConflictError, match=r"is in use by sleep.*imgtool up --record"):
                client.start_trace("box")
            process.kill()
        assert client.sandbox("box").condition == "ok" and recorders(service.root) == []
        recording = client.start_trace("box", "one")
        assert (recording.name, client.sandbox("box").trace) == ("one", "one")
        with pytest.raises(ConflictError, match="recorded already"):
            client.start_trace("box", "two")
        assert Path(box.rootfs, "written").read_text() == "kept"
        assert is_right(box.rootfs, 0)
        subprocess.run([need_tool("cat"), "data/f1"], cwd=box.rootfs, stdout=subprocess.DEVNULL, check=True)
        assert read_files(parsed(client.stop_trace("box"))) - {None} == {"data/f0", "data/f1"}
        with pytest.raises(ConflictError, match="trace one exists"):
            client.start_trace("box", "one")
        assert client.sandbox("box").condition == "ok"
        client.start_trace("box", "two")
        assert is_right(box.rootfs, 3)
        removal = client.remove("box")
        assert removal.trace is not None and read_files(parsed(removal.trace)) - {None} == {"data/f3"}
        with pytest.raises(NotFoundError, match="no sandbox"):
            client.start_trace("box")


def test_what_could_not_be_mounted_again_is_not_unmounted_to_be_recorded(site: Site, tmp_path: Path) -> None:
    with node_service(node_root(tmp_path)) as (service, client), left_clean(service, client):
        (box,) = client.create(asked("direct", site.store.location, id="box"))
        service.kill("worker")
        service.pids()
        with service.client() as again:
            with pytest.raises(ConflictError, match="could not be mounted again"):
                again.start_trace("box")
            assert again.sandbox("box").condition == "ok"
        assert is_right(box.rootfs, 0)


def test_of_those_who_record_a_sandbox_at_the_same_moment_one_does(server: StoreServer, tmp_path: Path) -> None:
    with node_service(node_root(tmp_path)) as (service, client), left_clean(service, client):
        (box,) = client.create(asked("fanotify", server.url, id="box"))

        def start(name: str) -> str | None:
            with service.client() as another:
                try:
                    return another.start_trace("box", name).name
                except ConflictError:
                    return None

        with ThreadPoolExecutor(4) as pool:
            [name] = filter(None, pool.map(start, ("a", "b", "c", "d")))
        assert client.sandbox("box").trace == name
        assert is_right(box.rootfs, 1)
        assert "data/f1" in read_files(parsed(client.stop_trace("box")))


def test_who_is_still_in_a_removed_sandbox_reads_on_whoever_has_its_name(server: StoreServer, tmp_path: Path) -> None:
    with service_that_sees_by(PASSTHROUGH, tmp_path) as (service, client), left_clean(service, client):
        (box,) = client.create(asked("fanotify", server.url, id="box", record={"name": "one"}))
        with open(f"{box.rootfs}/data/f1", "rb", buffering=0) as held:
            assert held.read(1) == expected("f1", 0, 1)
            removal = client.remove("box")
            assert removal.holders and removal.trace is not None and removal.trace.name == "one"
            client.create(asked("fanotify", server.url, id="box"))
            assert client.remove("box").trace is None, "the next one of this name wasn't recorded"
            assert len(recorders(service.root)) == 1
            assert os.pread(held.fileno(), SIZE, 0) == expected("f1", 0, SIZE)


def test_a_stop_completes_what_a_killed_recorder_left(server: StoreServer, tmp_path: Path) -> None:
    with node_service(node_root(tmp_path)) as (service, client):
        (box,) = client.create(asked("eager", server.url, id="box", record={"name": "one"}))
        assert is_right(box.rootfs, 0)
        part = Path(service.root, "traces/one.jsonl.part")
        eventually(lambda: parse_trace(part.read_bytes(), "part").accesses != (), "lines of what was read")
        [pid] = recorders(service.root)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: recorders(service.root) == [], "the end of the recorder")
        service.stop()
        assert not os.path.exists(f"{service.run_directory}/recordings")
        assert os.listdir(f"{service.root}/traces") == ["one.jsonl"]
        with service.start() as again, left_clean(service, again):
            assert again.sandbox("box").condition == "ok"


def test_a_start_that_fails_leaves_no_recording(server: StoreServer, tmp_path: Path) -> None:
    with node_service(node_root(tmp_path)) as (service, client), left_clean(service, client):
        client.create(asked("fanotify", server.url, id="box", record={"name": "one"}))
        for fields, said in (
            ({"id": "box", "record": {}}, "sandbox box exists"),
            ({"id": "other", "record": {"name": "one"}}, "trace one is being recorded"),
            ({"id": "a", "count": 2, "record": {"name": "one"}, "receipts": "/nowhere"}, "receipt"),
        ):
            with pytest.raises((ConflictError, NotFoundError, UnavailableError), match=said):
                client.create(asked("fanotify", server.url, **fields))
        assert [item.sandbox for item in client.traces()] == ["box"]
        assert len(recorders(service.root)) == 1
        assert [info.id for info in client.sandboxes()] == ["box"]
        assert sorted(os.listdir(f"{service.root}/traces")) == ["one.jsonl.part"]
        (two, three) = client.create(asked("fanotify", server.url, id="t", count=2, record={"name": "many"}))
        assert (two.trace, three.trace) == ("many-1", "many-2")


@pytest.mark.parametrize(("way", "seen"), [("eager", None), ("eager", PASSTHROUGH), ("fuse", PASSTHROUGH)])
def test_a_stop_ends_traces_and_a_start_finds_the_sandbox_without(
    way: str, seen: str | None, server: StoreServer, tmp_path: Path
) -> None:
    with service_that_sees_by(seen, tmp_path) as (service, first):
        root = service.root
        (box,) = first.create(asked(way, server.url, id="box", record={}))
        assert is_right(box.rootfs, 1)
        first.close()
        service.stop()
        assert recorders(root) == [] and not os.path.exists(f"{service.run_directory}/recordings")
        trace = parse_trace(Path(f"{root}/traces/box.jsonl").read_bytes(), "box")
        assert trace.ended is not None and read_files(trace) - {None} == {"data/f1"}
        if seen is None:
            assert is_right(box.rootfs, 2)  # it stands, and is whole
        with service.start() as client, left_clean(service, client):
            found = client.sandbox("box")
            assert (found.condition, found.mounted, found.trace) == ("ok", True, None)
            assert is_right(box.rootfs, 3)
            client.start_trace("box", "again")
            assert is_right(box.rootfs, 4)
            assert read_files(parsed(client.stop_trace("box"))) - {None} == {"data/f4"}


def test_all_killed_at_once_makes_a_recorded_sandbox_suspect_as_any(server: StoreServer, tmp_path: Path) -> None:
    """Nobody answered for what is missing: the mount of its own doesn't hide that."""
    root = node_root(tmp_path)
    with NodeService(root) as service:
        with service.client() as client:
            client.create(asked("fanotify", server.url, id="box", record={}, plan="none"))
        service.kill_all()
        with service.start() as client:
            assert client.sandbox("box").condition.startswith("suspect")
            assert client.sandbox("box").trace == "box"
            (other,) = client.create(asked("fanotify", server.url))
            assert all(is_right(other.rootfs, number) for number in range(FILES))
            with left_clean(service, client):
                assert client.remove("box").trace is not None


def test_a_recording_is_asked_for_as_the_client_asks(server: StoreServer, tmp_path: Path) -> None:
    with node_service(node_root(tmp_path)) as (service, client), left_clean(service, client):
        request = SandboxRequest(base="it", store=server.url, mode="eager", record=Record("typed"), count=1)
        (box,) = client.create(request)
        assert box.trace == "typed"
