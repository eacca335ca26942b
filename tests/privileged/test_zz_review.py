from __future__ import annotations
import sys; sys.path.insert(0, "/work/main/tests/privileged")
import threading, time, os, signal
from pathlib import Path
import pytest
from test_node_recording import *  # noqa
from test_node_recording import asked, site, server, is_right, left_clean, service_that_sees_by, recorders
from layerstore.errors import ImgtoolError

def test_direct_after_restart(site, tmp_path):
    with service_that_sees_by(None, tmp_path) as (service, client), left_clean(service, client):
        (box,) = client.create(asked("direct", site.store.location, id="box"))
        assert is_right(box.rootfs, 0)
        service.kill("worker")
        service.pids()
        client = service.client()
        print(client.sandbox("box").condition)
        try:
            print("REC", client.start_trace("box"))
        except ImgtoolError as e:
            print("ERR", type(e), e)
        b = client.sandbox("box")
        print(b.condition, os.path.ismount(box.rootfs))
        try:
            print("read", is_right(box.rootfs, 1))
        except OSError as e:
            print("OS", e)

@pytest.mark.parametrize("seen", [None, "passthrough"])
def test_concurrent_records(seen, server, tmp_path):
    with service_that_sees_by(seen, tmp_path) as (service, client), left_clean(service, client):
        (box,) = client.create(asked("eager" if seen is None else "fanotify", server.url, id="box"))
        out = []
        def go(n):
            c = service.client()
            try:
                out.append(c.start_trace("box", f"t{n}"))
            except ImgtoolError as e:
                out.append(repr(e))
        ts = [threading.Thread(target=go, args=(n,)) for n in range(4)]
        [t.start() for t in ts]; [t.join() for t in ts]
        for o in out: print(o)
        print(client.sandbox("box").condition, client.sandbox("box").trace, [t.name for t in client.traces()])
        print(all(is_right(box.rootfs, n) for n in range(3)))
        time.sleep(3)
        print(client.sandbox("box").condition, client.sandbox("box").trace, [t.name for t in client.traces()])
        print(os.listdir(f"{service.root}/traces"))
        print(is_right(box.rootfs, 4))

import random
@pytest.mark.parametrize("seen", [None, "events", "passthrough"])
@pytest.mark.parametrize("way", ["fanotify", "fuse"])
def test_chaos(way, seen, site, server, tmp_path):
    if (way, seen) == ("fuse", "events"):
        return
    random.seed(5)
    bad = []
    with service_that_sees_by(seen, tmp_path) as (service, client):
        until = time.monotonic() + 16
        errs = {}
        def note(what, e):
            k = f"{what}: {type(e).__name__}: {str(e)[:110]}"
            errs[k] = errs.get(k, 0) + 1
        def worker(n):
            rnd = random.Random(n)
            while time.monotonic() < until:
                try:
                    with service.client() as c:
                        id = f"s{rnd.randrange(3)}"
                        what = rnd.choice(["up", "uprec", "rec", "stop", "down", "down", "rec", "ps"])
                        try:
                            if what == "up": c.create(asked(way, server.url, id=id))
                            if what == "uprec": c.create(asked(way, server.url, id=id, record={"name": f"n{rnd.random()}"}))
                            if what == "rec": c.start_trace(id, f"n{rnd.random()}")
                            if what == "stop": c.stop_trace(id)
                            if what == "down": c.remove(id)
                            if what == "ps": c.sandboxes(); c.traces()
                        except ImgtoolError as e:
                            note(what, e)
                except Exception as e:
                    note("conn", e)
        def reader(n):
            rnd = random.Random(100+n)
            while time.monotonic() < until:
                id = f"s{rnd.randrange(3)}"
                try:
                    p = Path(service.root, f"sandboxes/{id}/rootfs/data/f{rnd.randrange(6)}")
                    b = p.read_bytes()
                    if b != expected(p.name, 0, len(b)): bad.append(str(p))
                except OSError as e:
                    note("read", OSError(e.errno))
        ts = [threading.Thread(target=worker, args=(n,)) for n in range(4)] + [threading.Thread(target=reader, args=(n,)) for n in range(2)]
        [t.start() for t in ts]
        if os.environ.get("KILL"):
            while time.monotonic() < until - 3:
                time.sleep(random.uniform(1, 2.5))
                try: service.kill("worker")
                except Exception as e: note("kill", e)
        [t.join() for t in ts]
        for k, v in sorted(errs.items()): print(v, k)
        print("BAD", bad)
        client = service.client()
        print([(s.id, s.condition, s.trace) for s in client.sandboxes()])
        client.remove_all()
        print("users", client.status().raw["layers"], client.status().raw["prefetch"], client.status().raw["recordings"])
        t=time.monotonic(); 
        try:
            service.stop()
        except BaseException as e: print("STOP", e)
        print("stop took", time.monotonic()-t)
        print("mounts", service.mounts(), "procs", service.processes())
        time.sleep(2.5)
        print("recorders", recorders(service.root), os.path.exists(f"{service.run_directory}/recordings"))
        print("PARTS", [n for n in os.listdir(f"{service.root}/traces") if not n.endswith(".jsonl")])
        print("LOG", "\n".join(l for l in service.log.read_text().splitlines() if "rror" in l or "Traceback" in l or "File \"" in l or "ailed" in l)[:3000])
        assert not bad
