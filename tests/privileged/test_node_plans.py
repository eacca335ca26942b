"""Plans at a real node: what is there before it is read, and that nothing about a plan ever stops a start."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.conversions import Site
from support.httpstore import StoreServer, stall, status
from support.nodes import NodeService, eventually, node_service
from support.planned import plan_of, plan_of_files
from support.reading import expected, make_files
from support.sandboxes import mounts_unchanged, node_root
from support.tools import lacking, need_tool

from layerstore.errors import NotFoundError
from layerstore.image import Role, load_image
from overlay.lazy.choice import fuse_works
from overlay.service.client import Client, SandboxInfo
from overlay.service.request import SandboxRequest
from prefetch.plans.published import publish
from prefetch.plans.shelf import Shelf

pytestmark = [pytest.mark.privileged, pytest.mark.usefixtures("mounts_unchanged")]

__all__ = ["mounts_unchanged"]

SIZE = 1 << 20
FILES = 6


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A base of six files, a workspace over it with two more, and an image with neither's data."""
    path = tmp_path_factory.mktemp("node-plans")
    site = Site(path)
    make_files(path / "tree/data", files=FILES, size=SIZE)
    site.convert(f"tree:{path}/tree", tag="it")
    (path / "work/work").mkdir(parents=True)
    for name in ("w0", "w1"):
        (path / "work/work" / name).write_bytes(expected(name, 0, SIZE))
    site.convert(f"tree:{path}/work", role=Role.WORKSPACE, base="it", rebase=False, tag="work")
    (path / "other").mkdir()
    (path / "other/x").write_bytes(expected("x", 0, SIZE))
    site.convert(f"tree:{path}/other", tag="other")
    return site


@pytest.fixture
def server(site: Site) -> Iterator[StoreServer]:
    with StoreServer(site.store.location) as server:
        yield server


def lazy(server: StoreServer, **fields: object) -> SandboxRequest:
    return SandboxRequest.from_json({"base": "it", "store": server.url, "mode": "lazy", **fields})


def is_right(sandbox: SandboxInfo, name: str, directory: str = "data") -> bool:
    content = Path(sandbox.rootfs, directory, name).read_bytes()
    return len(content) >= SIZE and content == expected(name, 0, len(content))


def read_inside(sandbox: SandboxInfo, *names: str) -> None:
    """By a process that is in it, so that what it waits for is counted."""
    subprocess.run([need_tool("cat"), *names], cwd=sandbox.rootfs, stdout=subprocess.DEVNULL, check=True)


def save(root: str, site: Site, name: str, *paths: str, image: str = "it") -> None:
    found = load_image(site.store, image)
    Shelf(root).save(plan_of_files(site.store, found, paths, name=name) if paths else plan_of(found, name=name))


def done(client: Client, id: str) -> bool:
    prefetch = client.sandbox(id).prefetch
    return prefetch is not None and prefetch["state"] == "done"


@pytest.mark.case("P03")
@pytest.mark.parametrize("backend", ["fanotify", "fuse"])
def test_what_the_plan_names_is_there_before_it_is_read_and_counted(
    backend: str, site: Site, server: StoreServer, tmp_path: Path
) -> None:
    if backend == "fuse" and (why := fuse_works()) is not None:
        lacking(f"no FUSE: {why}")
    root = node_root(tmp_path)
    save(root, site, "tests", "data/f1", "data/f4")
    with node_service(root) as (service, client):
        (box,) = client.create(lazy(server, id="box", backend=backend, wait_prefetch=True))
        assert box.prefetch is not None
        assert (box.prefetch["plan"], box.prefetch["asked"], box.prefetch["state"]) == ("tests", "auto", "done")
        planned = box.prefetch["planned"]
        assert planned == box.prefetch["brought"] >= 8, "four frames and a bit for each file"
        assert box.prefetch["used"] == box.prefetch["left"] == box.prefetch["failed"] == 0
        assert client.status().raw["fetch"]["background"]["frames"] == planned, "bytes fetched are those of the plan"
        receipt = box.raw["receipt"]
        assert receipt["plan"]["plans"] == box.prefetch["plans"]
        assert receipt["plan"]["matched_bytes"] == receipt["plan"]["planned_bytes"] > 2 * SIZE
        read_inside(box, "data/f1")
        assert is_right(box, "f1")
        found = client.sandbox("box")
        assert found.prefetch is not None and found.raw["demand"]["frames"] == 0
        assert 4 <= found.prefetch["used"] < planned
        read_inside(box, "data/f0")  # which the plan doesn't name
        assert client.sandbox("box").raw["demand"]["frames"] > 0
        status = client.status().raw["prefetch"]
        assert (status["brought"], status["replays"]) == (planned, 0)
        assert status["problems"] == {"damaged": 0, "unmatched": 0, "failed": 0}
        metrics = client.metrics()
        assert f'imgtool_prefetch_frames_total{{outcome="brought"}} {planned}.0' in metrics
        client.remove("box")
        ended = client.receipt("box")["end"]["prefetch"]
        assert (ended["brought"], ended["used"]) == (planned, found.prefetch["used"])
        assert f'imgtool_prefetch_frames_total{{outcome="brought"}} {planned}.0' in client.metrics()
        service.stop()


def test_modes_that_load_nothing_lazily_replay_nothing_and_none_is_none(
    site: Site, server: StoreServer, tmp_path: Path
) -> None:
    root = node_root(tmp_path)
    save(root, site, "tests")
    with node_service(root) as (service, client):
        eager = SandboxRequest(base="it", store=server.url, mode="eager", plan="tests", wait_prefetch=True)
        assert client.create(eager)[0].prefetch is None
        client.remove_all()
        client.evict(1 << 40)
        (none,) = client.create(lazy(server, plan="none"))
        assert (none.prefetch, none.raw["receipt"]["plan"]) == (None, None)
        with pytest.raises(NotFoundError, match="no plan 'gone' on this node"):
            client.create(lazy(server, plan="gone"))
        assert [info.id for info in client.sandboxes()] == [none.id]
        client.remove_all()
        service.stop()


@pytest.mark.case("P03")
def test_a_plan_that_can_not_be_used_never_stops_a_start(site: Site, server: StoreServer, tmp_path: Path) -> None:
    root = node_root(tmp_path)
    save(root, site, "good", "data/f2")
    save(root, site, "foreign", image="other")
    Path(root, "plans/broken.json").write_bytes(b'{"magic": "imgtool plan", "version": 1')
    Path(root, "plans/later.json").write_bytes(b'{"magic": "imgtool plan", "version": 99, "incompatible": []}')
    with node_service(root) as (service, client):
        for plan, state, problems in (
            ("broken", "none", 1),
            ("later", "none", 1),
            ("foreign", "none", 1),
            ("auto", "done", 2),
        ):
            (box,) = client.create(lazy(server, plan=plan, wait_prefetch=True))
            assert box.prefetch is not None and box.condition == "ok"
            assert (box.prefetch["state"], len(box.prefetch["problems"])) == (state, problems), plan
            assert is_right(box, "f5")
        assert client.status().raw["prefetch"]["problems"] == {"damaged": 2, "unmatched": 1, "failed": 0}
        assert 'imgtool_plan_problems_total{kind="damaged"} 2.0' in client.metrics()
        client.remove_all()
        service.stop()
    assert "broken.json" in service.log.read_text()


def test_a_stack_has_the_plans_of_its_layers_whoever_published_them(
    site: Site, server: StoreServer, tmp_path: Path
) -> None:
    root = node_root(tmp_path)
    save(root, site, "base", "data/f3")
    with node_service(root) as (service, client):
        publish(site.store, plan_of(load_image(site.store, "work"), name="published"))
        try:
            (box,) = client.create(lazy(server, id="box", workspace="work", wait_prefetch=True))
            assert box.prefetch is not None
            assert sorted(plan["name"] for plan in box.prefetch["plans"]) == ["base", "published"]
            assert (box.prefetch["state"], box.prefetch["problems"]) == ("done", [])
            assert is_right(box, "w1", "work") and is_right(box, "f3")
            client.remove("box")
            server.misbehave(status(503), ".plan")  # it is kept: nobody asks again
            (again,) = client.create(lazy(server, workspace="work", wait_prefetch=True))
            assert again.prefetch is not None and len(again.prefetch["plans"]) == 2
            assert client.status().raw["prefetch"]["problems"]["failed"] == 0
        finally:
            for name in [name for name in site.store.names() if name.endswith(".plan")]:
                site.store.delete_reference(name, expected=site.store.resolve(name))
        client.remove_all()
        service.stop()


def test_a_store_that_hangs_when_it_is_asked_for_a_plan_holds_up_nothing(
    site: Site, server: StoreServer, tmp_path: Path
) -> None:
    answer = threading.Event()
    server.misbehave(stall(answer), ".plan")
    with node_service(node_root(tmp_path)) as (service, client):
        (box,) = client.create(lazy(server, id="box"))
        assert box.prefetch is not None and box.prefetch["state"] == "looking"
        assert is_right(box, "f0")
        assert server.stalled.acquire(timeout=20), "it was asked"
        client.remove("box")
        client.create(lazy(server, id="next"))
        client.remove_all()
        service.stop()  # while it hangs
        assert service.mounts() == []
    answer.set()


def test_sandboxes_share_a_replay_that_ends_with_the_last_of_them(
    site: Site, server: StoreServer, tmp_path: Path
) -> None:
    root = node_root(tmp_path)
    save(root, site, "tests")
    answer = threading.Event()
    with node_service(root, "--threads", "4") as (service, client):
        client.remove(client.create(lazy(server, plan="none"))[0].id)  # metadata and index are here
        server.misbehave(stall(answer), "blobs/")
        made = client.create(lazy(server, count=3))
        assert client.status().raw["prefetch"]["replays"] == 1
        assert all(box.prefetch is not None and box.prefetch["state"] == "running" for box in made)
        for box in made[:2]:
            client.remove(box.id)
        assert client.status().raw["prefetch"]["replays"] == 1
        client.remove(made[2].id)
        assert client.status().raw["prefetch"]["replays"] == 0
        answer.set()
        eventually(lambda: client.status().raw["fetch"]["in_flight"] == 0, "what was asked for has come")
        assert client.status().raw["fetch"]["queued_background"] == 0, "and the rest is not wanted"
        service.stop()


def test_readers_come_before_a_plan_and_a_failing_store_ends_it(
    site: Site, server: StoreServer, tmp_path: Path
) -> None:
    root = node_root(tmp_path)
    save(root, site, "tests")
    with node_service(root, "--read-deadline", "10") as (service, client):
        client.remove(client.create(lazy(server, plan="none"))[0].id)
        server.misbehave(status(404), "blobs/")
        (box,) = client.create(lazy(server, id="box", wait_prefetch=True))
        assert box.prefetch is not None and box.prefetch["state"] != "running"
        assert (box.prefetch["brought"], box.prefetch["failed"] > 0, box.condition) == (0, True, "ok")
        assert box.prefetch["problems"]
        server.behave()
        eventually(lambda: readable(box, "f4"), "readers get it as if there had been no plan")
        client.remove_all()
        service.stop()


def readable(box: SandboxInfo, name: str) -> bool:
    try:
        return is_right(box, name)
    except OSError:
        return False


def test_a_stop_waits_for_nobody_who_waits_for_a_plan(site: Site, server: StoreServer, tmp_path: Path) -> None:
    root = node_root(tmp_path)
    save(root, site, "tests")
    with node_service(root, "--prefetch-bandwidth", "1000") as (service, client):
        client.remove(client.create(lazy(server, plan="none"))[0].id)
        with ThreadPoolExecutor(1) as pool, service.client() as another:
            made = pool.submit(another.create, lazy(server, id="box", wait_prefetch=True))
            eventually(lambda: client.status().raw["prefetch"]["replays"] == 1, "it is replayed")
            assert not made.done()
            try:
                service.stop()
            except BaseException:
                service.kill_all()  # or it would be waited for, for long
                raise
            assert made.result()[0].id == "box"
        assert service.mounts() == []
        with service.start() as again:
            assert is_right(again.sandbox("box"), "f0")
            again.remove_all()
            service.stop()


def test_a_new_worker_resumes_no_replay_and_says_nothing_wrong(site: Site, server: StoreServer, tmp_path: Path) -> None:
    root = node_root(tmp_path)
    save(root, site, "tests", "data/f1")
    with NodeService(root) as service:
        with service.client() as client:
            client.create(lazy(server, id="box"))
            eventually(lambda: done(client, "box"), "the plan is here")
        service.kill("worker")
        service.pids()
        with service.client() as client:
            found = client.sandbox("box")
            assert (found.condition, found.prefetch) == ("ok", None)
            assert found.raw["receipt"]["plan"]["plans"][0]["name"] == "tests"
            assert client.status().raw["prefetch"]["planned"] == 0
            assert "imgtool_prefetch_replays 0.0" in client.metrics()
            assert is_right(found, "f1")
            (other,) = client.create(lazy(server, wait_prefetch=True))
            assert other.prefetch is not None
            assert other.prefetch["present"] == other.prefetch["planned"] > 0
            client.remove("box")
            assert client.receipt("box")["end"]["prefetch"] is None
            client.remove_all()
            service.stop()


def test_what_is_recorded_can_be_planned(site: Site, server: StoreServer, tmp_path: Path) -> None:
    """Both at once: what a plan has brought is in the trace when it is read, without a wait."""
    root = node_root(tmp_path)
    save(root, site, "tests", "data/f2")
    with node_service(root) as (service, client):
        (box,) = client.create(lazy(server, id="box", record={}, wait_prefetch=True))
        read_inside(box, "data/f2")
        trace = client.stop_trace("box")
        assert trace.accesses and trace.bytes >= SIZE
        assert client.sandbox("box").raw["demand"]["events"] == 0
        client.remove_all()
        service.stop()
