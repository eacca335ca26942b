from __future__ import annotations
import os, signal, subprocess, time, sys, json
from pathlib import Path
from collections.abc import Iterator
import pytest
from support.conversions import Site
from support.httpstore import StoreServer
from support.nodes import NodeService, eventually, node_service
from support.reading import expected, make_files
from support.sandboxes import mounts_unchanged, node_root
from layerstore.errors import *
from layerstore.image import load_image
from overlay.service.client import SandboxInfo
from overlay.service.request import SandboxRequest
SIZE = 1 << 20

@pytest.fixture(scope="module")
def site(tmp_path_factory):
    path = tmp_path_factory.mktemp("probe")
    site = Site(path)
    make_files(path / "tree/data", files=6, size=SIZE)
    site.convert(f"tree:{path}/tree", tag="it")
    return site

@pytest.fixture
def server(site):
    with StoreServer(site.store.location) as server:
        yield server

def lazy(server, **fields):
    return SandboxRequest.from_json({"base": "it", "store": server.url, "mode": "lazy", **fields})

def look(rootfs, name):
    try:
        content = Path(rootfs, "data", name).read_bytes()
    except OSError as error:
        return f"errno {error.errno}"
    if content == expected(name, 0, len(content)):
        return "right"
    return "ZEROS" if not any(content) else "WRONG/partly zeros"

def test_lost_fuse_then_refused_stop(site, server, tmp_path):
    with node_service(node_root(tmp_path)) as (service, client):
        a, b = client.create(lazy(server, backend="fuse", count=2))
        service.kill("fuse")
        eventually(lambda: "FUSE" in client.sandbox(a.id).condition, "lost")
        with subprocess.Popen(["sleep", "1000"], cwd=b.rootfs) as process:
            with pytest.raises(ConflictError) as info:
                client.stop()
            print("stop:", info.value)
            print("condition", client.sandbox(a.id).condition, look(a.rootfs, "f0"), look(b.rootfs, "f0"))
            process.kill()
        client.remove_all(); service.stop()

def test_generations(site, server, tmp_path):
    with NodeService(node_root(tmp_path)) as service:
        client = service.client()
        for n in range(2):
            client.create(lazy(server, backend="fuse"))
            service.kill("fuse")
            eventually(lambda: all("FUSE" in s.condition for s in client.sandboxes()), "lost")
            client.remove_all()
        (c,) = client.create(lazy(server, backend="fuse"))
        print(client.status().raw["backends"])
        service.stop()
        client = service.start()
        info = client.sandbox(c.id)
        print(info.condition, look(c.rootfs, "f1"))
        client.remove_all(); service.stop()
        print(service.mounts(), os.path.exists(service.run_directory) and os.listdir(service.run_directory))

def test_troubled_then_forced_stop(site, server, tmp_path):
    root = node_root(tmp_path)
    with NodeService(root) as service:
        client = service.client()
        (a,) = client.create(lazy(server))
        for path in Path(root, "cache/meta/sha256").glob("*.uses"): path.write_text("{}")
        service.kill("worker")
        print(client.sandbox(a.id).condition)
        try: print(client.stop(force=True).raw)
        except ImgtoolError as e: print("stop", e)
        time.sleep(1)
        print(service.processes(), look(a.rootfs, "f0") if os.path.ismount(a.rootfs) else "not mounted")

def test_damaged_state_then_forced_stop(site, server, tmp_path):
    root = node_root(tmp_path)
    with NodeService(root) as service:
        client = service.client()
        (a,) = client.create(lazy(server))
        Path(root, "sandboxes", a.id, "state.json").write_text("{}")
        service.kill("worker")
        print([s.id for s in client.sandboxes()])
        try: print(client.stop(force=True).raw)
        except ImgtoolError as e: print("stop", e)
        time.sleep(1)
        print(service.processes(), look(a.rootfs, "f0") if os.path.ismount(a.rootfs) else "not mounted")

def test_damaged_state_total_loss(site, server, tmp_path):
    root = node_root(tmp_path)
    with NodeService(root) as service:
        client = service.client()
        (a,) = client.create(lazy(server))
        Path(root, "sandboxes", a.id, "state.json").write_text("{}")
        service.kill_all()
        print("while dead", look(a.rootfs, "f0"))
        client = service.start()
        (b,) = client.create(lazy(server))
        print("after", b.condition, look(b.rootfs, "f0"), look(b.rootfs, "f1"), "old", look(a.rootfs, "f2"))
        client.remove_all(); client.remove(a.id); service.stop()

def test_suspect_reads_later(site, server, tmp_path):
    root = node_root(tmp_path)
    with NodeService(root) as service:
        client = service.client()
        (a,) = client.create(lazy(server))
        service.kill_all()
        client = service.start()
        print(client.sandbox(a.id).condition, look(a.rootfs, "f2"))
        client.remove_all(); service.stop()

def test_disk_after_worker_kill(site, server, tmp_path):
    root = node_root(tmp_path)
    with NodeService(root) as service:
        client = service.client()
        (a,) = client.create(lazy(server))
        look(a.rootfs, "f0")
        service.kill("worker"); service.kill("keeper"); service.kill("worker")
        pids = service.pids()
        client.remove_all()
        eventually(lambda: client.status().raw["backends"]["fanotify"]["guarded_packs"] == 0, "released")
        print("evicted", client.evict(1 << 40))
        for role, pid in pids.items():
            for fd in os.listdir(f"/proc/{pid}/fd"):
                try: t = os.readlink(f"/proc/{pid}/fd/{fd}")
                except OSError: continue
                if "deleted" in t and "data" in t: print(role, fd, t[-40:], os.stat(f"/proc/{pid}/fd/{fd}").st_blocks)
        service.stop()

def test_fuse_complete_then_stop(site, server, tmp_path):
    root = node_root(tmp_path)
    with NodeService(root) as service:
        client = service.client()
        (a,) = client.create(lazy(server, backend="fuse"))
        for n in range(6): assert look(a.rootfs, f"f{n}") == "right"
        time.sleep(2.5)
        print(client.status().raw["backends"])
        service.stop()
        print(service.mounts())
        client = service.start()
        Path("/proc/sys/vm/drop_caches").write_text("1")
        print(client.sandbox(a.id).condition, look(a.rootfs, "f1"))
        (b,) = client.create(lazy(server, backend="fuse"))
        print(b.condition, look(b.rootfs, "f3"))
        client.remove_all(); service.stop()
        print(service.mounts(), os.path.exists(service.run_directory) and os.listdir(service.run_directory))

def test_zombies_and_fds(site, server, tmp_path):
    root = node_root(tmp_path)
    with NodeService(root) as service:
        client = service.client()
        (a,) = client.create(lazy(server))
        def count():
            p = service.pids()
            z = []
            for s in Path("/proc").glob("[0-9]*/stat"):
                try: t = s.read_text()
                except OSError: continue
                if ") Z " in t and "imgtool" in t: z.append((t.split()[0], t.rpartition(")")[2].split()[1]))
            return {r: len(os.listdir(f"/proc/{q}/fd")) for r, q in p.items()}, z, p
        print(count())
        for n in range(5): service.kill("holder")
        print(count())
        for n in range(5): service.kill("worker")
        print(count())
        for n in range(5): service.kill("keeper")
        print(count())
        client.remove_all(); service.stop()
