"""Cold start: from nothing on the node to the end of a program that a container of the image runs.

::

    scripts/setup bench
    python -m benchmarks.images /var/tmp/imgtool-images debian
    python -m benchmarks.coldstart /var/tmp/imgtool-images [--link 5ms-200M] [--rounds 3] [--json FILE]

The image is debian:full: 229 MB of gzip, 641 MB of files, in two layers; the program imports numpy. Both sides fetch
through the same simulated link (:mod:`benchmarks.link`), ours from a file server, containerd's from a registry, and
both run the program with runc and with what they make of the image:

* **imgtool lazy / eager**: ``POST /sandboxes`` to a node service, then ``runc run``.
* **imgtool run**: the same lazily by command line, Python's start included.
* **containerd**: ``ctr images pull --plain-http``, then ``ctr run --rm``; overlayfs snapshotter.

Every run begins with a service that has an empty root and has answered once, what was written before synced, and the
page cache dropped but for the programs. What is served lies in memory. The clock runs until the program's last line
arrives: what is cleared after that is not counted. *Up* is the time until there is something to run in. Bytes and
turns are the link's; writes are those of the whole block device, after a sync.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import containers, service
from benchmarks.fileserver import serving
from benchmarks.harness import (
    Run,
    drop_caches,
    fresh,
    imgtool,
    interleaved,
    median,
    need_root,
    parser,
    save,
    spread,
    table,
    timed,
    tool,
)
from benchmarks.link import Simulated, simulated
from overlay.bundle import write_bundle
from overlay.process import run_config
from overlay.sandbox import Sandboxes
from overlay.service.request import Backend, Mode, SandboxRequest


@dataclass(frozen=True)
class LinkKind:
    """Seconds of a turn, and bits a second, or 0."""

    latency: float
    rate: float


LINKS = {"0ms": LinkKind(0.0, 0.0), "20ms": LinkKind(0.020, 0.0), "5ms-200M": LinkKind(0.005, 200e6)}
COMMAND = "python3 -c 'import numpy; print(numpy.__version__, flush=True)'"
EAGER, LAZY, RIVAL = "imgtool eager", "imgtool lazy (fanotify)", "containerd pull + run"


class Bench:
    """What all runs share. A context manager: it serves, and removes all at the end."""

    def __init__(self, images: Path, tag: str, work: Path, command: Sequence[str]) -> None:
        self._images, self._tag, self._work, self._command = images, tag, work, command
        self._stack = contextlib.ExitStack()
        self.rival = containers.lacking()
        self._count = 0

    def __enter__(self) -> Bench:
        with self._stack as stack:
            # On tmpfs: dropping caches costs the server nothing, which is another machine's.
            served = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="imgtool-cold-")))
            stack.callback(shutil.rmtree, self._work, ignore_errors=True)
            fresh(self._work)
            timed(
                imgtool(
                    *("convert", f"oci:{self._images}:{self._tag}", "--role", "base", "--tag", "image"),
                    *("--store", str(served / "store")),
                )
            )
            self.store = stack.enter_context(serving(served / "store")).removeprefix("http://")
            if self.rival is None:
                self.registry = stack.enter_context(containers.registry(served / "registry"))
                self.reference = containers.push(self._images, self._tag, self.registry)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def by_service(self, kind: LinkKind, mode: Mode, backend: Backend | None = None) -> Run:
        with self._node() as node, self._link(self.store, kind) as link:
            cold = Cold(link)
            request = SandboxRequest(base="image", store=f"http://{link.address}", mode=mode, backend=backend)
            [made] = node.client.create(request)
            cold.is_up()
            sandbox = Sandboxes(str(node.root)).get(made.id)
            bundle = self._work / f"bundle-{self._count}"
            write_bundle(str(bundle), sandbox, run_config(made.raw["run"]), args=self._command)
            runc = tool("runc")
            assert runc is not None
            cold.run_to_the_end([runc, "run", "--bundle", str(bundle), f"imgtool-cold-{self._count}"])
            return cold.result(node.status()["fetch"])

    def by_command(self, kind: LinkKind) -> Run:
        with self._node() as node, self._link(self.store, kind) as link:
            cold = Cold(link)
            where = ("--store", f"http://{link.address}", "--root", str(node.root))
            cold.run_to_the_end(imgtool("run", "-q", "--runtime", "runc", *where, "image", "--", *self._command))
            return cold.result()

    def by_containerd(self, kind: LinkKind) -> Run:
        self._count += 1
        work = self._work / f"containerd-{self._count}"
        try:
            with containers.Containerd(work) as daemon, self._link(self.registry, kind) as link:
                cold = Cold(link)
                reference = f"{link.address}/{self.reference}"
                subprocess.run(daemon.pull(reference), check=True, stdout=subprocess.DEVNULL)
                cold.is_up()
                cold.run_to_the_end(daemon.run(reference, f"cold-{self._count}", self._command))
                return cold.result()
        finally:
            shutil.rmtree(work)

    @contextlib.contextmanager
    def _node(self) -> Iterator[service.Service]:
        self._count += 1
        root = self._work / f"root-{self._count}"
        with service.running(root) as node:
            yield node
        shutil.rmtree(root)

    def _link(self, to: str, kind: LinkKind) -> contextlib.AbstractContextManager[Simulated]:
        return simulated(to, latency=kind.latency, rate=kind.rate)


class Cold:
    """The clock and the counters of one run; it starts when it is made."""

    def __init__(self, link: Simulated) -> None:
        drop_caches()
        for command in (["runc", "--version"], ["ctr", "--help"], ["containerd-shim-runc-v2", "-v"]):
            if program := tool(command[0]):  # programs are hot on a node that is in use
                subprocess.run([program, *command[1:]], capture_output=True)
        subprocess.run(imgtool("run", "--help"), capture_output=True)
        self._link = link
        self._written = _written()
        self._start = time.perf_counter()
        self._up = 0.0

    def is_up(self) -> None:
        self._up = time.perf_counter() - self._start

    def run_to_the_end(self, command: Sequence[str]) -> None:
        """Run it; the clock stops at its first line, and at nothing else."""
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            self._wall = time.perf_counter() - self._start
            process.stdout.read()
        if process.returncode or not line.strip():
            raise SystemExit(f"{command}: exit code {process.returncode}, {line!r}")

    def result(self, fetch: object = None) -> Run:
        counts = self._link.counts()
        os.sync()
        more = {
            "up": self._up,
            "bytes": counts["bytes_down"],
            "turns": counts["turns"],
            "connections": counts["connections"],
            "written": _written() - self._written,
            "fetch": fetch,
        }
        return Run(self._wall, counts["processor_seconds"], 0, more)


def _written() -> int:
    """Bytes that went to block devices since the machine started; the seventh field counts sectors of 512 bytes."""
    stats = (path.read_text().split() for path in Path("/sys/block").glob("*/stat"))
    return 512 * sum(int(fields[6]) for fields in stats)


def main() -> None:
    need_root()
    options = parser(__doc__ or "", rounds=3)
    options.add_argument("--link", choices=LINKS, action="append", help="only this one")
    options.add_argument("--image", default="debian:full", metavar="LAYOUT:TAG")
    options.add_argument("--command", default=COMMAND, help="has to print one line, at its end")
    arguments = options.parse_args()
    layout, _, tag = arguments.image.partition(":")
    results: dict[str, dict[str, list[Run]]] = {}
    with Bench(arguments.images / layout, tag, arguments.work, shlex.split(arguments.command)) as bench:
        for name in arguments.link or LINKS:
            results[name] = interleaved(arms(bench, LINKS[name]), arguments.rounds, warm_up=False)
    report(results)
    if bench.rival:
        print(f"\ncontainerd: {bench.rival}")
    save(arguments.json, {"image": arguments.image, "command": arguments.command, "links": results})


def arms(bench: Bench, kind: LinkKind) -> dict[str, Callable[[], Run]]:
    found: dict[str, Callable[[], Run]] = {
        LAZY: lambda: bench.by_service(kind, "lazy", "fanotify"),
        "imgtool lazy (fuse)": lambda: bench.by_service(kind, "lazy", "fuse"),
        "imgtool run, lazy": lambda: bench.by_command(kind),
        EAGER: lambda: bench.by_service(kind, "eager"),
    }
    if bench.rival is None:
        found[RIVAL] = lambda: bench.by_containerd(kind)
    return found


def _middle(runs: Sequence[Run], key: str) -> float:
    return statistics.median(float(str(run.more[key])) for run in runs)


def report(results: dict[str, dict[str, list[Run]]]) -> None:
    body = []
    for link, arms in results.items():
        for name, runs in arms.items():
            up, fetched, turns, written = (_middle(runs, key) for key in ("up", "bytes", "turns", "written"))
            body.append(
                (
                    *(link, name, *spread([run.wall for run in runs])),
                    f"{up:.2f}" if up else "-",
                    *(f"{fetched / 1e6:.1f}", f"{turns:.0f}", f"{written / 1e6:.0f}"),
                )
            )
    table(("link", "arm", "seconds", "spread", "up", "MB fetched", "turns", "MB written"), body)
    for link, arms in results.items():
        lazy, eager = arms[LAZY], arms[EAGER]
        share = _middle(lazy, "bytes") / _middle(eager, "bytes")
        line = f"\n{link}: lazy is {median(eager) / median(lazy):.2f} times as fast as eager, with {share:.1%} of its "
        line += "bytes"
        if RIVAL in arms:
            line += f", and {median(arms[RIVAL]) / median(lazy):.2f} times as fast as containerd"
        print(line)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
