"""Readers run throughout while everything fails that can fail; every byte that they get is compared.

``--node-rounds N`` runs as many rounds as one has time for.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path

import pytest
from support.conversions import Site
from support.httpstore import (
    StoreServer,
    another_range,
    cut_short,
    gzipped,
    ignore_ranges,
    page,
    reset,
    stall,
    status,
    wrong_bytes,
)
from support.nodes import NodeService, eventually
from support.reading import Outcome, Reader, make_files
from support.sandboxes import mounts_unchanged, node_root
from support.tools import lacking, need_tool

from layerstore.cache.format import FramesHeader
from layerstore.errors import ImgtoolError, UnavailableError
from overlay.lazy.choice import fuse_works
from overlay.service.client import Client, SandboxInfo
from overlay.service.request import SandboxRequest

pytestmark = [pytest.mark.privileged, pytest.mark.usefixtures("mounts_unchanged")]

__all__ = ["mounts_unchanged"]

ROUNDS_OF_ONE_CACHE = 6
"""Rounds until the cache is emptied, so that there is something to fetch again."""
READERS = 3
DEADLINE = 3.0
"""Seconds: --read-deadline of the service. A read of 256 KiB may need three frames, one after the other."""
SLACK = 12.0
"""Seconds that a read may take beyond its deadlines on a machine that is starved of processors."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A store with one layer of 24 MB that doesn't compress."""
    path = tmp_path_factory.mktemp("never-zeros")
    make_files(path / "tree/data", files=12, size=2 << 20)
    site = Site(path)
    site.convert(f"tree:{path}/tree", tag="it")
    return site


@dataclass
class Field:
    """Where it all happens: a service, a store behind a server that misbehaves, sandboxes, readers."""

    service: NodeService
    server: StoreServer
    backend: str
    rng: random.Random
    deadline: float
    total: Outcome = field(default_factory=lambda: Outcome(0, 0, 0.0, []))
    client: Client = field(init=False)
    sandbox: SandboxInfo = field(init=False)
    readers: list[Reader] = field(default_factory=list)
    dead: bool = False
    """Whether the sandbox's FUSE server was killed: what it lacks is EIO for good."""

    def __post_init__(self) -> None:
        self.client = self.service.client()

    def begin(self, *, readers: int = READERS) -> None:
        """A sandbox with nothing in the cache, and readers in it."""
        self.client.close()
        self.client = self.service.client()
        made: list[SandboxInfo] = []

        def tried() -> bool:
            try:
                made.extend(
                    self.client.create(
                        SandboxRequest(base="it", store=self.server.url, mode="lazy", backend=self.backend)
                    )
                )
            except UnavailableError:  # killed a moment ago, or its FUSE server was
                return False
            return True

        eventually(tried, "a sandbox can be made")
        self.sandbox = made[0]
        self.dead = False
        directory = f"{self.sandbox.rootfs}/data"
        self.readers = [Reader(directory, self.rng.randrange(1 << 30)) for _ in range(readers)]

    def end(self) -> Outcome:
        """Let the readers end, remove everything, empty the cache; what the readers met."""
        self.server.behave()
        if not self.dead:
            eventually(lambda: all_right(f"{self.sandbox.rootfs}/data"), "everything can be read again")
        self.client.close()
        self.client = self.service.client()
        outcomes = [reader.end(within=3 * self.deadline + SLACK) for reader in self.readers]
        self.readers = []
        eventually(lambda: self._tried(lambda: self.client.remove(self.sandbox.id)), "the sandbox is removed")
        eventually(lambda: self._tried(lambda: self.client.evict(1 << 40)), "the cache is emptied")
        met = Outcome(
            sum(outcome.right for outcome in outcomes),
            sum(outcome.errors for outcome in outcomes),
            max(outcome.longest for outcome in outcomes),
            [wrong for outcome in outcomes for wrong in outcome.wrong],
        )
        self.total = Outcome(
            self.total.right + met.right,
            self.total.errors + met.errors,
            max(self.total.longest, met.longest),
            self.total.wrong + met.wrong,
        )
        return met

    @staticmethod
    def _tried(call: Callable[[], object]) -> bool:
        try:
            call()
        except ImgtoolError:
            return False
        return True

    def kills(self, *roles: str) -> dict[str, Callable[[], None]]:
        """Of each process, and of any two at the same moment."""
        groups = [*combinations(roles, 1), *combinations(roles, 2)]
        return {f"kills {' and '.join(group)}": partial(self.kill, *group) for group in groups}

    def kill(self, *roles: str) -> None:
        if "fuse" in self.service.kill(*roles):
            self.dead = True

    def close(self) -> None:
        self.client.close()
        for reader in self.readers:
            reader.kill()


@contextmanager
def prepared(site: Site, root: str, backend: str, seed: int, *, deadline: float = DEADLINE) -> Iterator[Field]:
    with ExitStack() as stack:
        server = stack.enter_context(StoreServer(site.store.location))
        service = stack.enter_context(NodeService(root, "--read-deadline", str(deadline)))
        field = Field(service, server, backend, random.Random(seed), deadline)
        stack.callback(field.close)
        yield field


def run_rounds(field: Field, rounds: int, actions: dict[str, Callable[[], None]]) -> None:
    """One action a round, at a random moment; the readers of a few rounds end together."""
    names = list(actions)
    for number in range(rounds):
        if number % ROUNDS_OF_ONE_CACHE == 0:
            field.begin()
        time.sleep(field.rng.random() * 0.3)  # not for timing: so that it strikes at any moment
        actions[names[number % len(names)] if number < len(names) else field.rng.choice(names)]()
        if number % ROUNDS_OF_ONE_CACHE == ROUNDS_OF_ONE_CACHE - 1 or number == rounds - 1:
            met = field.end()
            assert not met.wrong, met.wrong
            assert met.longest < 3 * field.deadline + SLACK
    assert field.total.right


def all_right(directory: str) -> bool:
    """Whether all files can be read, and are what they have to be. In a process: it may wait for a while."""
    check = subprocess.run(
        [sys.executable, "-m", "support.reading", directory], cwd=Path(__file__).parents[1], check=False
    )
    assert check.returncode in (0, 1), "wrong bytes"
    return check.returncode == 0


def assert_nothing_left(field: Field) -> None:
    with field.service.client() as client:
        client.remove_all()
    field.service.stop()
    assert field.service.mounts() == []
    assert field.service.processes() == []


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--node-rounds"))


@pytest.mark.timeout(7200)
def test_kills_of_every_process_cost_neither_a_byte_nor_an_error(site: Site, tmp_path: Path, rounds: int) -> None:
    """As long as one of them lives, readers wait; what was read-ahead and denied is repeated by the kernel."""
    with prepared(site, node_root(tmp_path), "fanotify", 1, deadline=30.0) as field:
        run_rounds(field, rounds, field.kills("worker", "keeper", "holder"))
        assert field.total.errors == 0
        assert_nothing_left(field)


@pytest.mark.timeout(7200)
@pytest.mark.case("C10", "C11", "D01")
def test_a_store_that_fails_in_every_way_gives_right_bytes_or_eio(site: Site, tmp_path: Path, rounds: int) -> None:
    with prepared(site, node_root(tmp_path), "fanotify", 2) as field:
        run_rounds(field, rounds, faults(field))
        assert_nothing_left(field)


@pytest.mark.timeout(7200)
def test_kills_and_a_failing_store_together(site: Site, tmp_path: Path, rounds: int) -> None:
    with prepared(site, node_root(tmp_path), "fanotify", 3) as field:
        run_rounds(field, rounds, {**faults(field), **field.kills("worker", "keeper", "holder")})
        assert_nothing_left(field)


@pytest.mark.timeout(7200)
def test_through_fuse_with_kills_of_the_worker_and_a_failing_store(site: Site, tmp_path: Path, rounds: int) -> None:
    need_fuse()
    with prepared(site, node_root(tmp_path), "fuse", 4) as field:
        run_rounds(field, rounds, {**faults(field), **field.kills("worker", "holder", "fuse")})
        assert_nothing_left(field)


def need_fuse() -> None:
    why = fuse_works()
    if why is not None:
        lacking(f"no FUSE: {why}")


def faults(field: Field) -> dict[str, Callable[[], None]]:
    """Every way in which a store or what is before it fails, for a few requests; and one in which it is well again."""
    never = threading.Event()
    kinds = {
        "stalls": stall(never),
        "cuts short": cut_short(1000),
        "resets": reset(2000),
        "ignores ranges": ignore_ranges,
        "returns a wrong frame": wrong_bytes,
        "returns another frame": another_range(4096),
        "a page of a proxy": page(),
        "gzip of a proxy": gzipped,
        "is overloaded": status(503),
        "lost it": status(404),
    }

    def misbehave(fault: Callable[..., None]) -> Callable[[], None]:
        return lambda: field.server.misbehave(fault, "blobs/", times=field.rng.choice((1, 3, 30)))

    return {**{name: misbehave(fault) for name, fault in kinds.items()}, "is well": field.server.behave}


@pytest.mark.timeout(900)
@pytest.mark.case("C06")
def test_a_full_disk_is_eio_then_right_and_control_calls_still_answer(site: Site, tmp_path: Path) -> None:
    """Evicting what nobody uses makes room; where there is none, reads fail, and work again when there is."""
    with small_filesystem(tmp_path, 48 << 20) as root, prepared(site, root, "fanotify", 5) as field:
        filler = Path(root) / "filler"
        field.begin()
        subprocess.run(["fallocate", "-l", str(_free(root) - (6 << 20)), str(filler)], check=True)
        eventually(lambda: field.client.status().raw["events"]["denied"] >= 10, "reads fail for want of space")
        assert [info.id for info in field.client.sandboxes()] == [field.sandbox.id]
        filler.unlink()
        met = field.end()
        assert not met.wrong, met.wrong
        assert met.errors
        field.begin()  # there is room again
        eventually(lambda: recorded_frames(root) > 60, "data come again")
        met = field.end()
        assert not met.wrong, met.wrong
        assert_nothing_left(field)


def recorded_frames(root: str) -> int:
    """Frames that are recorded on disk as present, of all packs."""
    files = [file.read_bytes() for file in Path(root).glob("cache/packs/sha256/*/frames")]
    return sum(content[-FramesHeader.unpack(content).frames :].count(1) for content in files)


@contextmanager
def small_filesystem(path: Path, size: int) -> Iterator[str]:
    """A root on an ext4 of its own."""
    image, mount_point = path / "disk.img", path / "disk"
    with open(image, "wb") as file:
        file.truncate(size)
    need_tool("mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
    mount_point.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(mount_point)], check=True)
    try:
        (mount_point / "node").mkdir()
        yield str(mount_point / "node")
    finally:
        subprocess.run(["umount", "-l", str(mount_point)], check=True)


def _free(path: str) -> int:
    import os

    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


@pytest.mark.timeout(300)
@pytest.mark.case("C09")
def test_after_all_processes_died_at_once_nothing_is_believed_and_the_sandbox_is_suspect(
    site: Site, tmp_path: Path
) -> None:
    """The one way in which zeros can be read: it is said, and nobody new reads through those mounts."""
    root = node_root(tmp_path)
    with prepared(site, root, "fanotify", 6) as field:
        field.begin(readers=0)
        Path(field.sandbox.rootfs, "data/f0").read_bytes()
        eventually(lambda: recorded_frames(root) > 0, "some data are there, durably")
        field.service.kill_all()
        with field.service.start() as client:
            assert client.sandbox(field.sandbox.id).condition.startswith("suspect: nobody answered")
            assert client.receipt(field.sandbox.id)["verification"]["state"] == "suspect"
            assert client.status().raw["cache"]["unverified_frames"] > 0
        first = field.sandbox
        field.begin()
        assert field.sandbox.condition == "ok"
        eventually(
            lambda: field.client.status().raw["fetch"]["verified"] > 0, "frames are verified before they are read"
        )
        met = field.end()
        assert not met.wrong, met.wrong
        assert met.errors == 0
        field.client.remove(first.id)
        assert_nothing_left(field)
