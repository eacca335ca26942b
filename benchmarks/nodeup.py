"""`up` of a cached image through the node service, against containerd: prepare and mount a snapshot of the same image.

::

    scripts/setup bench
    python -m benchmarks.images /var/tmp/imgtool-images debian
    python -m benchmarks.nodeup /var/tmp/imgtool-images [--standing 3200] [--rounds 3] [--json FILE]

The image is debian:workspace: four OCI layers, for us a base and a workspace on top of it. Everything is on the node
before the clock starts, and one sandbox stands already. In every round, by turns:

* **imgtool**: ``POST /sandboxes`` over one connection that stays open, by the Python client, until 1,000 stand; then by
  several connections at once; then 100 at a time until ``--standing`` of them stand; then one by one again. Then all
  are removed: a hundred one by one, the others in one request. A sandbox has its own upper, state and receipt.
* **containerd**: ``Prepare`` of the snapshots API over one gRPC connection and mount(2) of what it answers, until 1,000
  stand; then by several threads. Then all are unmounted and removed, one by one. No container is made of them.

Latencies are those of one call over one connection, mount included. Both keep what they make over a restart, and both
live in a fresh ext4 with a journal (see ``harness.journaled`` for why).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import containers, service
from benchmarks.harness import fresh, imgtool, journaled, need_root, parser, save, spread, table, timed
from overlay.mountapi import mount, umount
from overlay.service.client import Client
from overlay.service.request import SandboxRequest

BATCH = 100
Numbers = Mapping[str, float]


class Ours:
    """The node service with the image in its cache."""

    def __init__(self, node: service.Service, store: Path, alone: int) -> None:
        """``alone`` are made over one connection, before others come."""
        self._node, self._alone = node, alone
        self._request = SandboxRequest(base="full", workspace="repo", store=str(store), mode="eager")
        self.first = node.client.create(self._request)[0]  # keeps the layers mounted, as on a node that is in use
        # In the way that is usual: a layer that is whole needs nobody to answer for it.
        self._request = SandboxRequest(base="full", workspace="repo", store=str(store))

    def round(self, standing: int, clients: int) -> Numbers:
        ids: list[str] = []

        def one(client: Client) -> None:
            ids.append(client.create(self._request)[0].id)

        alone = self._alone
        singles = latencies(lambda: one(self._node.client), alone)
        found = {**summary("up", singles), "up_per_second": alone / sum(singles)}
        several = min(alone, standing - len(ids))
        if several > 0:
            found["up_clients_per_second"] = together(one, clients, several, lambda: Client(str(self._node.root)))
        batch = SandboxRequest.from_json({**self._request.to_json(), "count": BATCH})
        start, before = time.perf_counter(), len(ids)
        while len(ids) < standing:
            ids += [made.id for made in self._node.client.create(batch)]
        if len(ids) > before:
            found["up_batches_per_second"] = (len(ids) - before) / (time.perf_counter() - start)
        found |= summary("up_when_all_stand", latencies(lambda: one(self._node.client), min(BATCH, alone)))
        assert mounted(self._node.root) == len(ids) + 1  # the layers' own mounts are no overlays
        found |= summary("down", [self._down(ids.pop()) for _ in range(min(BATCH, alone))])
        keep = self.first.id
        start, left = time.perf_counter(), len(ids)
        self._node.client.remove_all()
        found["down_all_per_second"] = (left + 1) / (time.perf_counter() - start)
        self.first = self._node.client.create(self._request)[0]
        assert keep != self.first.id and mounted(self._node.root) == 1
        return found

    def _down(self, id: str) -> float:
        start = time.perf_counter()
        self._node.client.remove(id)
        return time.perf_counter() - start


class Theirs:
    """containerd with the image unpacked."""

    def __init__(self, daemon: containers.Containerd, registry: str, reference: str, alone: int) -> None:
        self._alone = alone
        self._snapshots = daemon.snapshots()
        self._targets = daemon.work / "mounts"
        subprocess.run(daemon.pull(f"{registry}/{reference}"), check=True, stdout=subprocess.DEVNULL)
        self._parent = daemon.top()
        self._number = 0
        self._lock = threading.Lock()
        self._up()

    def _up(self, _: object = None) -> str:
        with self._lock:
            self._number += 1
            name = f"box-{self._number}"
        target = self._targets / name
        kind, source, options = self._snapshots.prepare(name, self._parent)
        target.mkdir(parents=True)
        mount(source, str(target), kind, 0, options.encode())
        return name

    def _down(self, name: str) -> float:
        start = time.perf_counter()
        umount(str(self._targets / name))
        (self._targets / name).rmdir()
        self._snapshots.remove(name)
        return time.perf_counter() - start

    def round(self, clients: int) -> Numbers:
        names: list[str] = []

        def one(_: object = None) -> None:
            names.append(self._up())

        alone = self._alone
        singles = latencies(one, alone)
        found = {**summary("up", singles), "up_per_second": alone / sum(singles)}
        found["up_clients_per_second"] = together(one, clients, alone // 2, lambda: contextlib.nullcontext())
        assert mounted(self._targets) == len(names) + 1
        downs = [self._down(name) for name in reversed(names)]
        return {**found, **summary("down", downs), "down_all_per_second": len(downs) / sum(downs)}

    def close(self) -> None:
        for path in self._targets.iterdir():
            self._down(path.name)
        self._snapshots.close()


def latencies(call: Callable[[], object], count: int) -> list[float]:
    found = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def together(
    call: Callable[..., object], clients: int, count: int, connection: Callable[[], contextlib.AbstractContextManager]
) -> float:
    """Calls a second, with so many threads and connections."""

    def work() -> None:
        with connection() as connected:
            for _ in range(count // clients):
                call(connected)

    threads = [threading.Thread(target=work) for _ in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return count // clients * clients / (time.perf_counter() - start)


def summary(name: str, seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        f"{name}_median_ms": 1000 * statistics.median(ordered),
        f"{name}_p95_ms": 1000 * ordered[int(0.95 * len(ordered))],
    }


def mounted(below: Path) -> int:
    prefix = os.fsencode(os.path.realpath(below)) + b"/"
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    return sum(b" - overlay " in line and line.split()[4].startswith(prefix) for line in lines)


def main() -> None:
    need_root()
    options = parser(__doc__ or "", rounds=3)
    options.add_argument("--standing", type=int, default=3200)
    options.add_argument("--alone", type=int, default=1000, help="made over one connection, by both")
    options.add_argument("--clients", type=int, default=4)
    options.add_argument("--in-place", action="store_true", help="in the file system of --work, as it is")
    arguments = options.parse_args()
    layout = arguments.images / "debian"
    rounds: dict[str, list[Numbers]] = {"imgtool": [], "containerd": []}
    with contextlib.ExitStack() as stack:
        work = fresh(arguments.work)
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        if not arguments.in_place:
            work = stack.enter_context(journaled(work / "disk"))
        store = work / "store"
        convert = ("convert", "--store", str(store))
        timed(imgtool(*convert, f"oci:{layout}:full", "--role", "base", "--tag", "full"))
        timed(imgtool(*convert, f"oci:{layout}:workspace", "--role", "workspace", "--base", "full", "--tag", "repo"))
        node = stack.enter_context(service.running(work / "root"))
        arms: dict[str, Callable[[], Numbers]] = {}
        ours = Ours(node, store, arguments.alone)
        arms["imgtool"] = lambda: ours.round(arguments.standing, arguments.clients)
        why = containers.lacking()
        if why is None:
            daemon = stack.enter_context(containers.Containerd(work / "containerd"))
            with containers.registry(work / "registry") as registry:
                theirs = Theirs(daemon, registry, containers.push(layout, "workspace", registry), arguments.alone)
            stack.callback(theirs.close)
            arms["containerd"] = lambda: theirs.round(arguments.clients)
        for number in range(1, arguments.rounds + 1):
            for name, arm in arms.items():
                found = arm()
                rounds[name].append(found)
                print(f"round {number} {name}: median {found['up_median_ms']:.2f} ms", flush=True)
    report(rounds)
    if why:
        print(f"\ncontainerd: {why}")
    save(arguments.json, {"standing": arguments.standing, "clients": arguments.clients, "rounds": rounds})


def report(rounds: Mapping[str, Sequence[Numbers]]) -> None:
    rounds = {name: of for name, of in rounds.items() if of}
    body = []
    for key in rounds["imgtool"][0]:
        row = [key.replace("_", " ")]
        for of in rounds.values():
            values = [found[key] for found in of if key in found]
            row += spread(values) if values else ("-", "-")
        body.append(row)
    table(("", *(cell for name in rounds for cell in (name, "spread"))), body)
    if "containerd" in rounds:
        medians = {name: statistics.median(found["up_median_ms"] for found in of) for name, of in rounds.items()}
        print(f"\nup by imgtool is {medians['containerd'] / medians['imgtool']:.1f} times as fast as containerd")


if __name__ == "__main__":
    main()
