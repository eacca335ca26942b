"""A node whose parts fail, end or come back at the worst moment: what was promised to readers holds all the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.conversions import Site
from support.httpstore import StoreServer
from support.nodes import NodeService, eventually, node_service
from support.reading import expected, make_files
from support.sandboxes import mounts_unchanged, node_root
from support.tools import lacking

from layerstore.errors import ConflictError, NotFoundError, UnavailableError
from overlay.images import Asked
from overlay.lazy.choice import fuse_works
from overlay.node import FILES, Node
from overlay.sandbox import Removal, Sandbox
from overlay.service.metrics import Metrics
from overlay.service.options import NodeOptions
from overlay.service.request import SandboxRequest
from overlay.service.service import Service

pytestmark = [pytest.mark.privileged, pytest.mark.usefixtures("mounts_unchanged")]

__all__ = ["mounts_unchanged"]

SIZE = 300_000
FILES_OF_LAYER = 3


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    path = tmp_path_factory.mktemp("node-races")
    make_files(path / "tree/data", files=FILES_OF_LAYER, size=SIZE)
    site = Site(path)
    site.convert(f"tree:{path}/tree", tag="it")
    return site


@pytest.fixture
def server(site: Site) -> Iterator[StoreServer]:
    with StoreServer(site.store.location) as server:
        yield server


def lazy(server: StoreServer, **fields: object) -> SandboxRequest:
    return SandboxRequest.from_json({"base": "it", "store": server.url, "mode": "lazy", **fields})


def read(rootfs: str, number: int = 0) -> bytes:
    return Path(rootfs, f"data/f{number}").read_bytes()


def is_right(rootfs: str, number: int = 0) -> bool:
    """Right; False if it is an error. What is neither fails the test."""
    try:
        content = read(rootfs, number)
    except OSError:
        return False
    assert content == expected(f"f{number}", 0, len(content)), "zeros" if not any(content) else "wrong bytes"
    return True


def need_fuse() -> None:
    why = fuse_works()
    if why is not None:
        lacking(f"no FUSE: {why}")


# --- one process


class InProcess:
    """A node without a service, and its one image."""

    def __init__(self, site: Site, root: str) -> None:
        self.node = Node(root)
        self.image = self.node.images.find(Asked(site.store.location, "it"))
        self.node.up(self.image, id="first")
        self.key = self.image.layers[0].metadata.hex

    def up(self, id: str) -> Sandbox:
        return self.node.up(self.image, FILES, id=id)

    def read_by_process_in(self, sandbox: Sandbox) -> str | None:
        """The sandbox that a read of such a process is counted for."""
        pack = self.node.cache.known(self.image.layers[0].packs[0].digest.hex)
        with subprocess.Popen(["sleep", "100"], cwd=sandbox.rootfs) as process:
            try:
                return self.node.observe(process.pid, pack, range(1), 0.5, None)
            finally:
                process.kill()


@pytest.fixture
def local(site: Site, tmp_path: Path) -> Iterator[InProcess]:
    local = InProcess(site, node_root(tmp_path))
    try:
        yield local
    finally:
        for sandbox in local.node.sandboxes.list():
            local.node.down(sandbox.id)
        assert local.node.layers.users() == {}
        assert local.node.sandboxes.layers.mounted() == []
        local.node.close()


def test_a_sandbox_that_is_removed_while_it_is_made_holds_nothing(
    local: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = local.node.sandboxes.create

    def removed_at_once(*args: Any, **keywords: Any) -> Sandbox:
        sandbox = create(*args, **keywords)
        assert local.node.down(sandbox.id).existed
        return sandbox

    monkeypatch.setattr(local.node.sandboxes, "create", removed_at_once)
    local.up("second")
    assert local.node.layers.users() == {local.key: 1}
    with pytest.raises(NotFoundError):
        local.node.sandboxes.get("second")


def test_making_and_removing_the_same_ones_all_at_once(local: InProcess) -> None:
    """Whoever comes too late or too early is told so, and in the end nothing is held that isn't there."""
    over = time.monotonic() + 2

    def make() -> None:
        while time.monotonic() < over:
            try:
                local.up("second")
            except ConflictError:
                pass

    def remove() -> None:
        while time.monotonic() < over:
            local.node.down("second")

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for work in (make, remove, make, remove)]:
            done.result()
    local.node.down("second")
    assert local.node.layers.users() == {local.key: 1}
    assert is_right(local.node.sandboxes.get("first").rootfs)


def test_reads_count_for_the_sandbox_that_is_there_now(local: InProcess) -> None:
    """The kernel gives the device number of a removed one to the next."""
    second = local.up("second")
    device = os.stat(second.rootfs).st_dev
    assert local.read_by_process_in(second) == "second"
    assert local.node.demanded("second").frames == 1
    local.node.down("second")
    for _ in range(50):  # others on this machine mount, too
        third = local.up("third")
        if os.stat(third.rootfs).st_dev == device:
            break
        local.node.down("third")
    assert local.read_by_process_in(third) == "third"
    assert local.node.demanded("second").frames == 0
    assert local.node.demanded("third").waited == 0.5
    assert local.read_by_process_in(local.node.sandboxes.get("first")) == "first"


def test_who_stays_in_a_removed_sandbox_is_known(local: InProcess) -> None:
    second = local.up("second")
    with subprocess.Popen(["sleep", "100"], cwd=second.rootfs) as process:
        assert [holder.pid for holder in local.node.down("second").holders] == [process.pid]
        assert [holder.pid for holder in local.node.strays()] == [process.pid]
        process.kill()
    assert local.node.strays() == []
    assert local.node.strays() == [] and local.node._detached == set()


def service_of(local: InProcess) -> Service:
    return Service(
        local.node,
        NodeOptions(),
        {},
        preferred=("eager", "nothing else is tried here"),
        processes=dict,
        events=dict,
        metrics=Metrics(),
        log=lambda event, **fields: None,
    )


def eager(site: Site, **fields: object) -> SandboxRequest:
    return SandboxRequest.from_json({"base": "it", "store": site.store.location, "mode": "eager", **fields})


def names(local: InProcess) -> list[str]:
    return [sandbox.id for sandbox in local.node.sandboxes.list()]


def test_a_service_that_was_idle_does_not_end_under_a_sandbox_that_has_just_been_made(
    local: InProcess, site: Site
) -> None:
    service = service_of(local)
    service.create(eager(site, id="second"))
    with pytest.raises(ConflictError, match="just now"):
        service.stop(force=False, idle=True)
    service.create(eager(site, id="third"))


def test_a_time_to_live_is_that_of_one_sandbox_and_not_of_its_name(local: InProcess, site: Site) -> None:
    """One is removed just when its time is noted, and its name taken by another one."""
    service = service_of(local)
    service.create(eager(site, id="other", ttl=0.001))
    service.create(eager(site, id="second"))
    service._expiry.update(second=time.time() - 1, gone=time.time() - 1)

    def expired() -> bool:
        service._end_expired()
        return not service._expiry

    eventually(expired, "their times are over")
    assert names(local) == ["first", "second"]


def test_the_end_of_one_sandbox_does_not_wait_for_that_of_another(
    local: InProcess, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = service_of(local)
    for id in ("a", "b"):
        service.create(eager(site, id=id, ttl=0.001))
    down = local.node.down

    def failing(id: str, **options: bool) -> Removal:
        if id == "a":
            raise UnavailableError("not now")
        return down(id, **options)

    def left() -> list[str]:
        service._end_expired()
        return names(local)

    with monkeypatch.context() as patch:
        patch.setattr(local.node, "down", failing)
        eventually(lambda: left() == ["a", "first"], "the other one's time is over")
    eventually(lambda: left() == ["first"], "so is the first one's")


def test_what_cannot_be_cleared_keeps_no_service_from_starting(
    local: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing() -> None:
        raise UnavailableError("clear it yourself")

    monkeypatch.setattr(local.node, "recover", failing)
    service = service_of(local)
    service.restore([])
    service.close()
    assert [sandbox["condition"] for sandbox in service.sandboxes()] == ["ok"]


# --- the service


def test_a_sandbox_of_a_fuse_server_that_has_ended_is_never_mounted_over_nothing(
    server: StoreServer, tmp_path: Path
) -> None:
    """What isn't there would read as zeros. It is served anew, under a name of its own, or it isn't mounted."""
    need_fuse()
    with NodeService(node_root(tmp_path)) as service:
        with service.client() as client:
            (first,) = client.create(lazy(server, backend="fuse"))
            service.kill("fuse")
            eventually(lambda: "FUSE server ended" in client.sandbox(first.id).condition, "its loss is noticed")
            (second,) = client.create(lazy(server, backend="fuse"))
            assert not is_right(first.rootfs) and is_right(second.rootfs)
            service.kill("fuse")
            with subprocess.Popen(["sleep", "100"], cwd=second.rootfs) as process:
                with pytest.raises(ConflictError):
                    client.stop()
                assert is_right(first.rootfs)  # nobody was in it: it was unmounted for that, and is back
                assert not is_right(second.rootfs, 1)
                process.kill()
            service.kill("worker")
            assert is_right(first.rootfs)
            assert "FUSE server ended" in client.sandbox(second.id).condition
            (third,) = client.create(lazy(server, backend="fuse"))
            assert is_right(third.rootfs, 1)
        service.stop()
        with service.start() as client:
            for sandbox in client.sandboxes():
                assert sandbox.condition == "ok" and is_right(sandbox.rootfs, 2)
            client.remove_all()
        service.stop()
        assert service.mounts() == [] and not os.path.exists(service.run_directory)


def test_a_layer_that_is_read_through_fuse_is_unmounted_at_a_stop_even_if_it_is_complete(
    server: StoreServer, tmp_path: Path
) -> None:
    need_fuse()
    with NodeService(node_root(tmp_path)) as service:
        with service.client() as client:
            (sandbox,) = client.create(lazy(server, backend="fuse"))
            assert all(is_right(sandbox.rootfs, number) for number in range(FILES_OF_LAYER))
            eventually(lambda: client.status().raw["fetch"]["demand"]["frames"] > 0, "they are counted")
        service.stop()
        assert service.mounts() == []
        with service.start() as client:
            assert client.sandbox(sandbox.id).condition == "ok"
            assert all(is_right(sandbox.rootfs, number) for number in range(FILES_OF_LAYER))
            client.remove_all()
        service.stop()


def test_what_a_fuse_server_reads_from_is_held_by_a_new_holder_too(server: StoreServer, tmp_path: Path) -> None:
    """Were it not, a worker after it would begin with another frame map, and two would say what may be read."""
    need_fuse()
    with node_service(node_root(tmp_path)) as (service, client):
        (sandbox,) = client.create(lazy(server, backend="fuse"))
        assert is_right(sandbox.rootfs)
        service.kill("holder")

        def held() -> bool:
            pid = service.pids()["holder"]
            return any(os.readlink(f"/proc/{pid}/fd/{fd}").endswith("/data") for fd in open_descriptors(pid))

        eventually(held, "the successor has it")
        service.kill("worker")
        assert is_right(sandbox.rootfs, 1)
        client.remove_all()
        service.stop()


def damage_metadata(root: str) -> None:
    for path in Path(root).glob("cache/meta/sha256/*.uses"):
        path.write_text("{}")


def lose_metadata(root: str) -> None:
    for path in Path(root).glob("cache/meta/sha256/*"):
        path.unlink()


def damage_frames(root: str) -> None:
    for path in Path(root).glob("cache/packs/sha256/*/frames"):
        path.write_bytes(b"damage")


def lose_packs(root: str) -> None:
    for path in Path(root).glob("cache/packs/sha256/*"):
        path.rename(f"{root}/{path.name}")


@pytest.mark.parametrize("damage", [damage_metadata, lose_metadata, damage_frames, lose_packs])
def test_a_sandbox_that_the_cache_lacks_something_of_is_named_and_unmounted_at_a_stop(
    server: StoreServer, tmp_path: Path, damage: Callable[[str], None]
) -> None:
    """It is mounted, and its holes would be read as zeros as soon as nobody answers any more."""
    with NodeService(node_root(tmp_path)) as service:
        with service.client() as client:
            first, second = client.create(lazy(server, count=2))
            assert is_right(first.rootfs)
            damage(service.root)
            service.kill("worker")
            assert client.sandbox(first.id).condition.startswith("impaired: ")
            assert "sha256" in client.sandbox(first.id).condition  # which image or pack it is
            is_right(first.rootfs, 1)  # right, or an error
            client.remove(second.id)
        service.stop()
        assert not os.path.ismount(first.rootfs)
        with service.start() as client:
            assert client.sandbox(first.id).condition.startswith("not mounted: ")
            (third,) = client.create(lazy(server))
            assert is_right(third.rootfs, 1)
            client.remove_all()
        service.stop()
        assert service.mounts() == []


def test_a_new_sandbox_never_shares_a_mount_that_nobody_watched(server: StoreServer, tmp_path: Path) -> None:
    """Not that of a sandbox which can't be read any more, either."""
    with NodeService(node_root(tmp_path)) as service:
        with service.client() as client:
            (first,) = client.create(lazy(server))
        service.kill_all()
        state = Path(service.root, "sandboxes", first.id, "state.json")
        state.write_text("{}")
        assert not any(read(first.rootfs)), "something else watches it: this test says nothing"
        with service.start() as client:
            (second,) = client.create(lazy(server))
            assert is_right(second.rootfs)
            client.remove(first.id)
            client.remove(second.id)
        service.stop()
        assert service.mounts() == []


def test_a_stop_is_refused_as_long_as_somebody_reads_what_could_become_zeros(
    server: StoreServer, tmp_path: Path
) -> None:
    """Of a sandbox whose state is damaged, which thus isn't unmounted."""
    with NodeService(node_root(tmp_path)) as service:
        with service.client() as client:
            (first,) = client.create(lazy(server))
            Path(service.root, "sandboxes", first.id, "state.json").write_text("{}")
            service.kill("worker")
        with service.client() as client:
            with pytest.raises(ConflictError):
                client.stop(force=True)
            assert is_right(first.rootfs)
            client.remove(first.id)
        service.stop()
        assert service.mounts() == []


def test_a_process_in_a_removed_sandbox_is_named_and_killed_by_force(server: StoreServer, tmp_path: Path) -> None:
    with node_service(node_root(tmp_path)) as (service, client):
        (first,) = client.create(lazy(server))
        with subprocess.Popen(["sleep", "100"], cwd=first.rootfs) as process:
            client.remove(first.id)
            with pytest.raises(ConflictError, match=rf"sleep \(pid {process.pid}, cwd\)"):
                client.stop()
            assert client.stop(force=True).raw["killed"] == [process.pid]
            assert process.wait() == -signal.SIGKILL
        service.wait()
        assert service.mounts() == []


def previous_release(document: dict[str, Any]) -> None:
    del document["mounts"]
    document["receipt"] = {}


def other_receipt(document: dict[str, Any]) -> None:
    document["receipt"] = {**document["receipt"], "version": 999}


def bad_receipt(document: dict[str, Any]) -> None:
    document["receipt"] = {"magic": "imgtool-receipt"}


def other_boot(document: dict[str, Any]) -> None:
    document["boot"] = "another"


def test_whatever_is_left_of_sandboxes_the_service_starts_and_removes_them(server: StoreServer, tmp_path: Path) -> None:
    changes = {change.__name__: change for change in (previous_release, other_receipt, bad_receipt, other_boot)}
    ids = [name.replace("_", "-") for name in changes]
    with NodeService(node_root(tmp_path)) as service:
        with service.client() as client:
            for id in [*ids, "damaged", "half", "gone"]:
                client.create(lazy(server, id=id))
        service.stop()
        place = Path(service.root, "sandboxes")
        for id, change in zip(ids, changes.values(), strict=True):
            document = json.loads((place / id / "state.json").read_text())
            change(document)
            (place / id / "state.json").write_text(json.dumps(document))
        (place / "damaged/state.json").write_text("{")
        (place / "half/state.json").unlink()
        (place / "gone/upper").rmdir()
        with service.start() as client:
            conditions = {sandbox.id: sandbox.condition for sandbox in client.sandboxes()}
            for id in ("previous-release", "other-receipt", "bad-receipt"):
                assert conditions.pop(id) == "ok" and is_right(f"{place}/{id}/rootfs")
            assert "last start" in conditions.pop("other-boot")
            assert conditions.pop("gone").startswith("not mounted: ")
            assert conditions == {}
            assert "damaged" in service.log.read_text()
            for id in [*ids, "damaged", "half", "gone"]:
                client.remove(id)
            assert os.listdir(place) == [] and client.status().raw["sandboxes"]["total"] == 0
        service.stop()
        assert service.mounts() == []


def test_nobody_keeps_the_space_of_what_was_evicted(server: StoreServer, tmp_path: Path) -> None:
    with node_service(node_root(tmp_path)) as (service, client):
        (first,) = client.create(lazy(server))
        assert is_right(first.rootfs)
        for role in ("worker", "keeper", "holder", "worker"):
            service.kill(role)
        client.remove(first.id)
        eventually(lambda: client.status().raw["backends"]["fanotify"]["guarded_packs"] == 0, "the pack is let go")
        assert client.evict(1 << 40) > SIZE
        assert [pid for pid in service.pids().values() if has_deleted_data(pid)] == []
        service.stop()


def has_deleted_data(pid: int) -> bool:
    return any(
        target.endswith("/data (deleted)")
        for target in (os.readlink(f"/proc/{pid}/fd/{fd}") for fd in open_descriptors(pid))
    )


def open_descriptors(pid: int) -> list[str]:
    return [fd for fd in os.listdir(f"/proc/{pid}/fd") if os.path.lexists(f"/proc/{pid}/fd/{fd}")]


def children_that_ended(pids: list[int]) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state == "Z" and int(parent) in pids:
            found.append(int(path.parent.name))
    return found


def test_kills_leave_no_descriptor_and_no_process_behind(server: StoreServer, tmp_path: Path) -> None:
    with node_service(node_root(tmp_path)) as (service, client):
        (first,) = client.create(lazy(server))
        assert is_right(first.rootfs)

        def counted() -> dict[str, int]:
            def settled() -> bool:
                return set(service.pids()) == {"holder", "keeper", "worker"}

            eventually(settled, "all have said hello")
            return {role: len(open_descriptors(pid)) for role, pid in service.pids().items()}

        for role in ("holder", "keeper", "worker"):
            service.kill(role)
        before = counted()
        for role in ["keeper", "worker", "keeper", "worker", "holder", "holder", "holder"]:
            service.kill(role)
            counted()
        after = counted()
        for role in before:
            assert abs(after[role] - before[role]) <= 3, (before, after)  # a thread more, an event under way
        assert children_that_ended(list(service.pids().values())) == []
        assert is_right(first.rootfs, 1)
        client.remove_all()
        service.stop()


def holder_of(service: NodeService) -> int:
    """As long as the service answers nobody."""
    names = {Path(f"/proc/{pid}/comm").read_text().strip(): pid for pid in service.processes()}
    return names["imgtool-holder"]


def test_a_signal_to_end_that_comes_while_sandboxes_are_found_again_leaves_none_mounted(
    server: StoreServer, tmp_path: Path
) -> None:
    with NodeService(node_root(tmp_path)) as service:
        with service.client() as client:
            client.create(lazy(server, count=150))
        service.stop()
        for moment in (0.0, 0.1):
            stopped = threading.Event()
            place = Path(service.root, "sandboxes")

            def end(moment: float = moment, stopped: threading.Event = stopped, place: Path = place) -> None:
                eventually(lambda: any(map(os.path.ismount, place.glob("*/rootfs"))), "the first one is mounted")
                time.sleep(moment)
                os.kill(holder_of(service), signal.SIGTERM)
                stopped.set()

            thread = threading.Thread(target=end)
            thread.start()
            try:
                with service.start():
                    pass
            except AssertionError:
                pass  # it ended before it had answered
            thread.join()
            assert stopped.is_set()
            service.wait()
            assert service.mounts() == []
        with service.start() as client:
            client.remove_all()
        service.stop()


def test_a_signal_to_end_is_not_lost_while_there_is_no_worker(server: StoreServer, tmp_path: Path) -> None:
    with node_service(node_root(tmp_path)) as (service, client):
        client.create(lazy(server))
        pids = service.pids()
        os.kill(pids["worker"], signal.SIGKILL)
        os.kill(pids["holder"], signal.SIGTERM)
        service.wait()
        assert service.mounts() == []


def test_a_worker_that_hangs_holds_up_neither_keeper_nor_holder(server: StoreServer, tmp_path: Path) -> None:
    with NodeService(node_root(tmp_path), "--read-deadline", "1") as service:
        with service.client() as client:
            (first,) = client.create(lazy(server))
            assert is_right(first.rootfs)
        pids = service.pids()
        os.kill(pids["worker"], signal.SIGSTOP)
        drop_caches()
        assert is_right(first.rootfs)  # what is there is answered by the keeper
        began = time.monotonic()
        with pytest.raises(OSError):
            read(first.rootfs, 2)
        assert time.monotonic() - began < 10
        os.kill(pids["keeper"], signal.SIGKILL)
        drop_caches()
        assert is_right(first.rootfs)
        os.kill(pids["worker"], signal.SIGKILL)
        eventually(lambda: is_right(first.rootfs, 2), "its successor fetches")
        with service.client() as client:
            client.remove_all()
        service.stop()


def drop_caches() -> None:
    Path("/proc/sys/vm/drop_caches").write_text("1")
