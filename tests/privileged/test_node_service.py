"""The service as its users meet it: cold and warm starts, restarts, stops, many sandboxes, and what is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.conversions import Site
from support.httpstore import StoreServer, status
from support.nodes import NodeService, eventually, node_service
from support.reading import expected, make_files
from support.sandboxes import mounts_unchanged, node_root

from layerstore.errors import ConflictError, NotFoundError, UsageError
from layerstore.image import Role, load_image
from overlay.service.client import SandboxInfo
from overlay.service.request import SandboxRequest

pytestmark = [pytest.mark.privileged, pytest.mark.usefixtures("mounts_unchanged")]

__all__ = ["mounts_unchanged"]

SIZE = 1 << 20
IMGTOOL = (sys.executable, "-m", "imgtool")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A base with six files of a megabyte, a workspace with two more and a toolkit with one."""
    path = tmp_path_factory.mktemp("node-service")
    site = Site(path)
    make_files(path / "tree/data", files=6, size=SIZE)
    site.convert(f"tree:{path}/tree", tag="it")
    make_files(path / "work/work", files=2, size=SIZE)
    site.convert(f"tree:{path}/work", role=Role.WORKSPACE, base="it", rebase=False, tag="work")
    make_files(path / "tools/tools", files=1, size=SIZE)
    site.convert(f"tree:{path}/tools", role=Role.TOOLKIT, tag="tools")
    return site


@pytest.fixture
def server(site: Site) -> Iterator[StoreServer]:
    with StoreServer(site.store.location) as server:
        yield server


def lazy(server: StoreServer, **fields: object) -> SandboxRequest:
    return SandboxRequest.from_json({"base": "it", "store": server.url, "mode": "lazy", **fields})


def read(sandbox: SandboxInfo, name: str) -> bytes:
    return Path(sandbox.rootfs, "data", name).read_bytes()


def is_right(sandbox: SandboxInfo, name: str) -> bool:
    content = read(sandbox, name)
    return len(content) > SIZE and content == expected(name, 0, len(content))


def test_a_sandbox_starts_with_its_metadata_alone_and_data_come_when_read(
    site: Site, server: StoreServer, tmp_path: Path
) -> None:
    with node_service(node_root(tmp_path)) as (service, client):
        (sandbox,) = client.create(lazy(server))
        assert (sandbox.mode, sandbox.backend, sandbox.condition) == ("lazy", "fanotify", "ok")
        assert sorted(os.listdir(f"{sandbox.rootfs}/data")) == [f"f{number}" for number in range(6)]
        assert client.status().raw["fetch"]["demand"]["requests"] == 0
        assert is_right(sandbox, "f3")
        status = client.status().raw
        assert 0 < status["fetch"]["demand"]["raw"] <= 2 * SIZE  # of seven megabytes
        assert client.sandbox(sandbox.id).raw["demand"]["frames"] == 0  # read by this test, which is no sandbox
        subprocess.run(["chroot", sandbox.rootfs, "/none"], check=False, capture_output=True)
        (other,) = client.create(lazy(server))
        before = client.status().raw["fetch"]["demand"]["requests"]
        assert is_right(other, "f3")
        assert client.status().raw["fetch"]["demand"]["requests"] == before  # one has read it for all
        client.remove_all()
        service.stop()
        assert service.mounts() == [] and service.processes() == []


def test_fifty_sandboxes_at_once_cost_one_warm_up(site: Site, server: StoreServer, tmp_path: Path) -> None:
    """Requests and bytes at the store: those of one cold sandbox, whoever many start together."""
    names = [f"f{number}" for number in range(6)]

    def cold(root: Path, count: int) -> tuple[int, int]:
        server.forget()
        with node_service(node_root(root), "--threads", "4") as (service, client):
            with ThreadPoolExecutor(count) as pool:
                made = list(pool.map(lambda _: _created(service), range(count)))
                assert all(pool.map(lambda sandbox: all(is_right(sandbox, name) for name in names), made))
            status = client.status().raw["fetch"]
            assert status["demand"]["frames"] + status["background"]["frames"] == frames
            client.remove_all()
            service.stop()
        assert server.requests(".plan") == 1
        return server.requests("blobs/"), server.sent()

    def _created(service: NodeService) -> SandboxInfo:
        with service.client() as client:
            return client.create(lazy(server))[0]

    pack = load_image(site.store, "it").layers[0].packs[0]
    frames = -(-pack.raw_size // (256 << 10))
    for name in ("one", "fifty"):
        (tmp_path / name).mkdir()
    _, bytes_of_one = cold(tmp_path / "one", 1)
    requests, sent = cold(tmp_path / "fifty", 50)
    # Each frame once, its index, metadata, manifest and config; which neighbours come together is luck. The name is
    # looked up again by those who come when it has been.
    assert requests <= frames + 6
    assert sent <= bytes_of_one * 1.05 + 20_000


def test_after_a_restart_sandboxes_are_there_again_with_no_store_in_reach(site: Site, tmp_path: Path) -> None:
    root = node_root(tmp_path)
    with NodeService(root) as service:
        with StoreServer(site.store.location) as server, service.client() as client:
            (sandbox,) = client.create(lazy(server, id="box"))
            assert is_right(sandbox, "f0")
            Path(sandbox.rootfs, "written").write_text("kept")
        service.stop()
        assert service.mounts() == []
        with service.start() as client:
            found = client.sandbox("box")
            assert (found.condition, found.mounted) == ("ok", True)
            assert Path(found.rootfs, "written").read_text() == "kept"
            assert is_right(found, "f0")
            assert [info.id for info in client.sandboxes()] == ["box"]
            receipt = client.receipt("box")
            assert receipt["layers"] and receipt["mode"] == "lazy"
            client.remove("box")
            service.stop()


def test_an_eager_sandbox_needs_no_service_any_more(site: Site, tmp_path: Path) -> None:
    root = node_root(tmp_path)
    with NodeService(root) as service:
        with service.client() as client:
            (sandbox,) = client.create(SandboxRequest(base="it", store=site.store.location, mode="eager"))
            assert client.status().raw["backends"]["fanotify"]["guarded_packs"] == 0
        service.stop()
        assert service.processes() == []
        assert is_right(sandbox, "f1")  # it stands, and is whole
        with service.start() as client:
            assert client.sandbox(sandbox.id).condition == "ok"
            client.remove(sandbox.id)
            service.stop()


def test_a_complete_pack_is_let_go_and_costs_no_events(site: Site, server: StoreServer, tmp_path: Path) -> None:
    with node_service(node_root(tmp_path)) as (service, client):
        (sandbox,) = client.create(lazy(server))
        for number in range(6):
            assert is_right(sandbox, f"f{number}")
        eventually(
            lambda: client.status().raw["backends"]["fanotify"]["guarded_packs"] == 0, "the complete pack is released"
        )
        events = client.status().raw["events"]["events"]
        drop_caches()
        assert all(is_right(sandbox, f"f{number}") for number in range(6))
        assert client.status().raw["events"]["events"] == events
        client.remove_all()
        service.stop()


def test_stopping_is_refused_while_somebody_is_in_a_sandbox_that_isnt_whole(
    site: Site, server: StoreServer, tmp_path: Path
) -> None:
    with node_service(node_root(tmp_path)) as (service, client):
        first, second = client.create(lazy(server, count=2))
        with subprocess.Popen(["sleep", "1000"], cwd=first.rootfs) as process:
            with pytest.raises(ConflictError, match=f"sandbox {first.id} is in use by sleep"):
                client.stop()
            assert client.sandbox(second.id).condition == "ok"  # what was unmounted for that is back
            assert is_right(second, "f1")
            assert process.pid in client.stop(force=True).killed
            assert process.wait() == -signal.SIGKILL
        service.wait()
        assert service.mounts() == []


def test_a_forced_stop_ends_who_is_in_a_removed_sandbox_before_it_stops_answering(
    site: Site, server: StoreServer, tmp_path: Path
) -> None:
    """Its mount is detached, and lives as long as it does."""
    with node_service(node_root(tmp_path)) as (service, client):
        (sandbox,) = client.create(lazy(server))
        with subprocess.Popen(["sleep", "1000"], cwd=sandbox.rootfs) as process:
            assert client.remove(sandbox.id).holders
            with pytest.raises(ConflictError, match="uses a removed sandbox"):
                client.stop()
            assert process.poll() is None
            assert process.pid in client.stop(force=True).killed
            assert process.wait() == -signal.SIGKILL
        service.wait()


def test_another_store_of_the_same_image_helps_where_one_has_lost_it(
    site: Site, server: StoreServer, tmp_path: Path
) -> None:
    with node_service(node_root(tmp_path), "--read-deadline", "2") as (service, client):
        (sandbox,) = client.create(lazy(server))
        server.misbehave(status(404), "blobs/")
        with pytest.raises(OSError):
            read(sandbox, "f1")
        client.create(SandboxRequest(base="it", store=site.store.location, mode="lazy"))
        eventually(lambda: readable(sandbox, "f1"), "the other store is asked")
        assert is_right(sandbox, "f1")
        client.remove_all()
        service.stop()


def readable(sandbox: SandboxInfo, name: str) -> bool:
    try:
        read(sandbox, name)
    except OSError:
        return False
    return True


def test_sigterm_unmounts_and_ends(site: Site, server: StoreServer, tmp_path: Path) -> None:
    with node_service(node_root(tmp_path)) as (service, client):
        client.create(lazy(server))
        os.kill(service.pids()["holder"], signal.SIGTERM)
        service.wait()
        assert service.mounts() == []


def test_what_the_service_manager_starts_takes_over_from_a_holder_that_it_does_not_watch(
    site: Site, server: StoreServer, tmp_path: Path
) -> None:
    """As systemd does: its main process was killed, another has taken its place, and systemd starts one of its own."""
    told = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(told)
        manager.setblocking(False)
        with NodeService(node_root(tmp_path), environment={"NOTIFY_SOCKET": told}) as service:
            messages: list[bytes] = []

            def heard(what: bytes) -> bool:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        data, fds, _, _ = socket.recv_fds(manager, 4096, 4)
                        messages.append(data)
                        for fd in fds:
                            os.close(fd)
                return any(what in message for message in messages)

            eventually(lambda: heard(b"READY=1"), "it is ready")
            assert heard(b"FDNAME=group.0") and heard(b"FDNAME=group.1")
            with service.client() as client:
                (sandbox,) = client.create(lazy(server))
            eventually(lambda: heard(b"FDSTORE=1\nFDNAME=" + pack_hex(site).encode()), "the pack is stored")
            service.kill("holder")
            stray = service.pids()["holder"]
            worker = service.pids()["worker"]
            with service.start() as client:
                eventually(lambda: service.pids()["holder"] != stray, "the new one has taken over")
                assert service.pids()["worker"] == worker  # nobody else had to end
                assert is_right(sandbox, "f2")
                client.remove(sandbox.id)
            service.stop()


def pack_hex(site: Site) -> str:
    return load_image(site.store, "it").layers[0].packs[0].digest.hex


def test_there_is_one_service_for_a_root(tmp_path: Path) -> None:
    root = node_root(tmp_path)
    with node_service(root), pytest.raises(AssertionError, match="runs already"):
        second = NodeService(root)
        second._answers = lambda: False  # type: ignore[method-assign]  # the first one would
        second.start()


def test_a_stack_of_base_workspace_and_toolkits_by_description(site: Site, server: StoreServer, tmp_path: Path) -> None:
    receipts = tmp_path / "receipts"
    receipts.mkdir()
    description = {
        "name": "described",
        "isolation": "container",
        "image": {"base": "it", "workspace": "work", "toolkit": ["tools"]},
        "mode": "lazy",
        "store": server.url,
        "resources": {"scratch_gib": 0.1, "cpu": 4},
        "network": {"mode": "none"},
        "lifecycle": {"ttl": "1h"},
        "receipts": str(receipts),
    }
    root = node_root(tmp_path)
    with node_service(root) as (service, client):
        up = subprocess.run(
            [*IMGTOOL, "up", "-f", "-", "--root", root, "--json"],
            input=json.dumps(description).encode(),
            capture_output=True,
            check=True,
        )
        assert b"resources.cpu" in up.stderr and b"network" in up.stderr
        made = json.loads(up.stdout)
        assert made["id"] == "described" and made["mode"] == "lazy" and made["scratch"]
        rootfs = Path(made["rootfs"])
        assert (rootfs / "work/f1").read_bytes()[:100] == expected("f1", 0, 100)
        assert (rootfs / "tools/f0").read_bytes()[:100] == expected("f0", 0, 100)
        (rootfs / "made").write_bytes(b"x" * 5000)
        started = json.loads((receipts / "described.json").read_text())
        assert [image["role"] for image in started["images"]] == ["base", "workspace", "toolkit"]
        assert started["carried"]["network"] == {"mode": "none"} and "resources.cpu" in started["not_ours"]
        assert started["end"] is None and started["ttl"] == 3600
        client.remove("described")
        ended = json.loads((receipts / "described.json").read_text())
        assert ended["end"]["wrote"]["files"] == 1 and ended["end"]["reason"] == "down"
        assert client.receipt("described") == ended
        service.stop()


def test_a_time_to_live_ends_a_sandbox(site: Site, server: StoreServer, tmp_path: Path) -> None:
    with node_service(node_root(tmp_path)) as (service, client):
        client.create(lazy(server, id="short", ttl=0.5))
        eventually(lambda: not client.sandboxes(), "its time is over")
        assert client.receipt("short")["end"]["reason"] == "ttl"
        service.stop()


def test_requests_that_would_leave_the_root_are_refused(site: Site, server: StoreServer, tmp_path: Path) -> None:
    with node_service(node_root(tmp_path)) as (service, client):
        for id in ("../x", "/etc", "a/b", ".", "-x", "x" * 64, "a\0b"):
            with pytest.raises((UsageError, NotFoundError)):
                client.remove(id)
            with pytest.raises(UsageError):
                lazy(server, id=id)
        path = f"{service.run_directory}/node.sock"
        assert os.stat(path).st_mode & 0o777 == 0o600
        assert os.stat(service.run_directory).st_mode & 0o777 == 0o700
        service.stop()


def test_pins_keep_and_a_limit_evicts_the_least_recently_used(site: Site, tmp_path: Path) -> None:
    with (
        StoreServer(site.store.location) as server,
        node_service(node_root(tmp_path), "--limit", "1M") as (
            service,
            client,
        ),
    ):
        client.pin("it", server.url)
        (sandbox,) = client.create(lazy(server))
        assert is_right(sandbox, "f0") and is_right(sandbox, "f1")
        assert client.cache().bytes > 1 << 20  # what is used stays, whatever the limit
        client.remove(sandbox.id)
        assert client.evict(1 << 40) == 0
        client.unpin("it")
        eventually(lambda: client.cache().bytes <= 1 << 20, "the limit is kept again")
        service.stop()


@pytest.mark.timeout(600)
def test_3200_sandboxes_stand_on_one_node_and_nothing_is_left_of_them(
    site: Site, server: StoreServer, tmp_path: Path
) -> None:
    with node_service(node_root(tmp_path)) as (service, client):
        for _ in range(8):
            assert len(client.create(lazy(server, count=400))) == 400
        status = client.status().raw
        assert status["sandboxes"]["total"] == 3200
        assert len(status["layers"]) == 1  # one mount for all of them
        some = client.sandboxes()[1600]
        assert is_right(some, "f5")
        assert len(client.remove_all()) == 3200
        assert service.mounts() == []
        assert os.listdir(f"{service.root}/sandboxes") == []
        service.stop()


def drop_caches() -> None:
    Path("/proc/sys/vm/drop_caches").write_text("1")
