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
