"""Starts of programs in sandboxes whose data lie behind a simulated link: what :mod:`benchmarks.prefetch` measures.

::

    store in memory ─▶ nginx ─▶ link ─▶ node service with a fresh root ─▶ POST /sandboxes ─▶ runc run ─▶ last line

What a node has when the clock starts is a root that was made before and is copied for each start: *nothing*, the
*metadata* images and frame indexes, or *all*. The page cache is dropped, but for programs that any node has in memory.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks import service
from benchmarks.coldstart import LinkKind
from benchmarks.fileserver import serving
from benchmarks.harness import Run, drop_caches, fresh, imgtool, timed, tool
from benchmarks.link import Simulated, simulated
from benchmarks.workloads import Workload
from layerstore.attachment import attachment_name
from layerstore.image import Image, load_image
from layerstore.store.directory import DirectoryStore
from overlay.bundle import write_bundle
from overlay.process import run_config
from overlay.sandbox import Sandboxes
from overlay.service.request import AUTO_PLAN, NO_PLAN, Mode, Record, SandboxRequest
from prefetch.learn.sizes import Sizes, open_sizes
from prefetch.plans.format import Plan
from prefetch.plans.published import publish
from prefetch.plans.relaid import Optimized, optimize
from prefetch.plans.shelf import Shelf
from prefetch.trace.format import Trace, parse_trace
from prefetch.trace.places import ImagePlaces, open_places

Has = Literal["nothing", "metadata", "all"]


@dataclass(frozen=True, slots=True)
class Arm:
    """How a program is started.

    Attributes:
        has: what the node has before.
        mode: of the sandbox.
        planned: its plan is used, else none.
        wait: the plan's data are there before the sandbox is.
        relaid: of the image that was laid anew after the plan.
        hot: what the node has is in its page cache.
    """

    has: Has = "metadata"
    mode: Mode = "lazy"
    planned: bool = False
    wait: bool = False
    relaid: bool = False
    hot: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """A run of a workload: the seed says which."""

    workload: Workload
    seed: int

    @property
    def command(self) -> tuple[str, ...]:
        return self.workload.command(self.seed)

    def __str__(self) -> str:
        return f"{self.workload.name}-{self.seed}"


class Rig:
    """A store behind a link, and roots of nodes. A context manager: it serves, and removes all at the end."""

    def __init__(self, images: Path, work: Path, kind: LinkKind) -> None:
        self.images, self.kind = images, kind
        self._work = work
        self._stack = contextlib.ExitStack()
        self._count = 0

    def __enter__(self) -> Rig:
        runc = tool("runc")
        if runc is None:
            raise SystemExit("runc is not there: scripts/setup test")
        self._runc = runc
        with self._stack as stack:
            stack.callback(shutil.rmtree, self._work, ignore_errors=True)
            fresh(self._work)
            # On tmpfs: dropping caches costs the server nothing, which is another machine's.
            served = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="imgtool-prefetch-"))
            self.store = Path(served, "store")
            self.store.mkdir()
            url = stack.enter_context(serving(self.store)).removeprefix("http://")
            # One link for all starts: nodes remember by which address they have got their data.
            self._link: Simulated = stack.enter_context(simulated(url, latency=self.kind.latency, rate=self.kind.rate))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    # --- images

    def convert(self, source: str, name: str, *, base: str | None = None) -> None:
        """Publish LAYOUT:TAG of the images: a base, or what it adds to one."""
        where = ("--role", "base") if base is None else ("--role", "workspace", "--base", base)
        self.imgtool("convert", f"oci:{self.images}/{source}", *where, "--tag", name)

    def compose(self, base: str, workspace: str, name: str) -> None:
        self.imgtool("compose", "--base", base, "--workspace", workspace, "--tag", name)

    def imgtool(self, *arguments: str) -> None:
        """A command that works on the store itself, without the link."""
        timed(imgtool(*arguments, "--store", str(self.store)))

    def image(self, name: str) -> Image:
        return load_image(DirectoryStore(str(self.store)), name)

    def sizes(self, name: str) -> Sizes:
        return open_sizes(DirectoryStore(str(self.store)), self.image(name))

    def places(self, name: str) -> contextlib.AbstractContextManager[ImagePlaces]:
        return open_places(DirectoryStore(str(self.store)), self.image(name))

    def optimize(self, name: str, plan: Plan, tag: str) -> Optimized:
        return optimize(DirectoryStore(str(self.store)), name, plan, tag=tag)

    @contextlib.contextmanager
    def published(self, plan: Plan) -> Iterator[None]:
        """The store has a plan for its layers as long as the block runs."""
        store = DirectoryStore(str(self.store))
        publish(store, plan)
        try:
            yield
        finally:
            for part in plan.parts:
                name = attachment_name(part.metadata)
                store.delete_reference(name, expected=store.resolve(name))

    # --- nodes

    @contextlib.contextmanager
    def node(self, image: str, has: Has, plan: Plan | None = None) -> Iterator[service.Service]:
        """A service of which the root has so much of an image, and a plan for it."""
        self._count += 1
        root = self._work / f"root-{self._count}"
        if has == "all":
            root = self._root(image, has)  # starts change nothing of it, and a copy would take seconds
        elif has == "metadata":
            timed(["cp", "-a", "--sparse=always", str(self._root(image, has)), str(root)])
        if plan is not None:
            Shelf(str(root)).save(plan)
        try:
            with service.running(root) as node:
                yield node
        finally:
            if has != "all":
                shutil.rmtree(root, ignore_errors=True)

    def _root(self, image: str, has: Has) -> Path:
        """One that had a sandbox of the image; made when it is first wanted."""
        root = self._work / f"{has}-{image}"
        if not root.exists():
            with service.running(root) as node:
                [made] = node.client.create(self.request(image, Arm(mode="eager" if has == "all" else "lazy")))
                node.client.remove(made.id)
        return root

    def request(self, image: str, arm: Arm) -> SandboxRequest:
        return SandboxRequest(
            base=image,
            store=f"http://{self._link.address}",
            mode=arm.mode,
            plan=AUTO_PLAN if arm.planned else NO_PLAN,
            wait_prefetch=arm.wait,
        )

    # --- starts

    def start(self, image: str, job: Job, arm: Arm, plan: Plan | None = None) -> Run:
        """One start: from the request for a sandbox to the last line of the program."""
        with self.node(image, arm.has, plan) as node:
            drop_caches()
            subprocess.run([self._runc, "--version"], capture_output=True)  # programs are hot on a node in use
            if arm.hot:
                for data in sorted((node.root / "cache/packs").glob("*/*/data")):
                    subprocess.run(["cat", str(data)], stdout=subprocess.DEVNULL, check=True)
            return self.run(node, self.request(image, arm), job)

    def run(self, node: service.Service, request: SandboxRequest, job: Job) -> Run:
        """The same on a node that runs, whatever is in its page cache.

        The sandbox is removed afterwards. ``more`` of the result has *up*, seconds of it until there was a sandbox;
        *bytes* and *turns* of the link; *fetched*, the fetcher's counters; *prefetch*, what the plan has brought;
        *trace*, the path of the trace if one was recorded.
        """
        before, fetched = self._link.counts(), _fetched(node)
        start = time.perf_counter()
        [made] = node.client.create(replace(request, command=job.command))
        up = time.perf_counter() - start
        wall = start
        try:
            bundle = node.root.with_name(f"{node.root.name}-bundle")
            sandbox = Sandboxes(str(node.root)).get(made.id)
            write_bundle(str(bundle), sandbox, run_config(made.raw["run"]), args=job.command)
            wall = self._to_the_end([self._runc, "run", "--bundle", str(bundle), f"prefetch-{made.id}"], job) - start
            after = self._link.counts()
            prefetch = node.client.sandbox(made.id).prefetch
        finally:
            shutil.rmtree(bundle, ignore_errors=True)
            removed = node.client.remove(made.id)
        more = {
            "up": up,
            "bytes": after["bytes_down"] - before["bytes_down"],
            "turns": after["turns"] - before["turns"],
            "fetched": {name: _difference(of, fetched[name]) for name, of in _fetched(node).items()},
            "prefetch": prefetch,
            "trace": None if removed.trace is None else removed.trace.path,
        }
        return Run(wall, 0.0, 0, more)

    def _to_the_end(self, command: Sequence[str], job: Job) -> float:
        """Run it; when its last line came. Runtimes take a moment more to clear up, which isn't counted."""
        output, last = "", 0.0
        with tempfile.TemporaryFile() as errors:
            with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    last = time.perf_counter()
                    output += line.decode(errors="replace")
            errors.seek(0)
            said = errors.read().decode(errors="replace")
        if process.returncode or not job.workload.is_done(output):
            raise SystemExit(f"{job}: exit code {process.returncode}, {output[-300:]!r}, {said[-1000:]!r}")
        return last

    def record(self, node: service.Service, image: str, job: Job) -> tuple[Run, Trace]:
        """A run on a node that has everything, and its trace; the file is removed."""
        self._count += 1
        name = f"{job}-{self._count}"
        run = self.run(node, replace(self.request(image, Arm()), record=Record(name)), job)
        path = Path(str(run.more["trace"]))
        data = path.read_bytes()
        path.unlink()
        return run, parse_trace(data, f"trace {name}")


def _fetched(node: service.Service) -> Mapping[str, Mapping[str, int]]:
    fetch = node.status()["fetch"]
    return {name: fetch[name] for name in ("demand", "background")}


def _difference(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in after}
