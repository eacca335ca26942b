"""Guards: no pack is let go too early, none is kept too long, and nobody waits for a backend who needn't."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from support.caches import CacheBench
from support.keepers import until

from layerstore.cache.cache import Cache
from layerstore.cache.packs import CachedPack
from layerstore.errors import UnavailableError
from overlay.lazy import guards as guards_module
from overlay.lazy.custody import Custody
from overlay.lazy.guards import FuseBackend, Guards


class FakeBackend:
    """Remembers what is guarded. ``gate`` holds up every call while it is clear; ``error`` is raised by calls."""

    def __init__(self, *, name: str = "fanotify", variant: str = "", in_path: bool = False) -> None:
        self.name, self.variant, self.in_path = name, variant, in_path
        self.guarded: dict[str, CachedPack] = {}
        self.calls: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: UnavailableError | None = None
        self.ended = False

    def guard(self, pack: CachedPack) -> str:
        self._call(f"guard {pack.hex[:4]}")
        self.guarded[pack.hex] = pack
        return f"/served/{pack.hex}" if self.in_path else pack.data_path

    def release(self, pack: CachedPack) -> None:
        self._call(f"release {pack.hex[:4]}")
        del self.guarded[pack.hex]

    def is_lost(self) -> bool:
        return self.ended

    def lost(self) -> None:
        self.ended = False
        self.guarded.clear()

    def _call(self, call: str) -> None:
        self.calls.append(call)
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error


class FakeCustody:
    """A holder whose FUSE server starts, and guards, when ``gate`` is set."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.held: list[str] = []
        self.serving = ""
        self.error: UnavailableError | None = None
        self.gate = threading.Event()
        self.gate.set()

    def start_fuse(self, directory: str) -> str:
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error
        self.started.append(self.serving or directory)
        return self.started[-1]

    def hold(self, hex: str, front: str, data: int, frames: int) -> None:
        assert self.gate.wait(20)
        self.held.append(hex)

    def drop(self, hex: str, front: str) -> None:
        self.held.remove(hex)


@pytest.fixture
def bench(tmp_path: Path) -> CacheBench:
    return CacheBench(tmp_path)


@pytest.fixture
def cache(bench: CacheBench) -> Iterator[Cache]:
    with bench.open() as cache:
        yield cache


@contextmanager
def opened(pack: CachedPack) -> Iterator[None]:
    """As a mount has it."""
    with open(pack.data_path, "rb"):
        yield


def quickly(call: Callable[[], object]) -> None:
    """It returns, whatever else is going on."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive(), "it waits"


def test_a_pack_is_guarded_until_it_is_complete_or_neither_used_nor_open(bench: CacheBench, cache: Cache) -> None:
    backend = FakeBackend()
    guards = Guards(backend)
    first, second, third = (cache.pack(bench.make_pack(seed=seed), bench.store) for seed in range(3))
    assert [guards.device(pack, "a") for pack in (first, second)] == [first.data_path, second.data_path]
    bench.fill(third)
    third.sync()
    assert guards.device(third, "a") == third.data_path
    assert set(backend.guarded) == {first.hex, second.hex}
    assert guards.needs([first, third]) and not guards.needs([third]) and not guards.needs([])
    bench.fill(first)
    assert guards.sweep() == []  # it could still be lost by a sync that fails
    first.sync()
    assert guards.sweep() == [first.hex]
    guards.device(second, "b")
    guards.release([first, second, third], "a")
    assert set(backend.guarded) == {second.hex}
    with opened(second):
        guards.release([second], "b")
        assert guards.sweep() == [] and guards.incomplete() == 1
    assert guards.incomplete() == 0
    assert guards.sweep() == [second.hex] and backend.guarded == {}


def test_a_pack_that_was_evicted_before_it_was_let_go_holds_up_nothing(bench: CacheBench, cache: Cache) -> None:
    backend = FakeBackend()
    guards = Guards(backend)
    gone, other = (cache.pack(bench.make_pack(seed=seed), bench.store) for seed in range(2))
    guards.device(gone, "a")
    guards.device(other, "a")
    with opened(gone), opened(other):
        guards.release([gone, other], "a")  # a detached mount has them
        assert set(backend.guarded) == {gone.hex, other.hex}
    assert cache.make_room(1 << 40, keep=[other.hex])
    assert guards.incomplete() == 0
    assert guards.packs() == [other]
    assert sorted(guards.sweep()) == sorted([gone.hex, other.hex])
    assert backend.guarded == {}


def test_one_that_was_made_anew_is_guarded_in_place_of_the_old_one(bench: CacheBench, cache: Cache) -> None:
    backend = FakeBackend()
    guards = Guards(backend)
    stored = bench.make_pack()
    old = cache.pack(stored, bench.store)
    guards.device(old, "a")
    with opened(old):
        guards.release([old], "a")
    assert cache.make_room(1 << 40)
    new = cache.pack(stored, bench.store)
    assert new is not old
    guards.device(new, "b")
    assert guards.sweep() == [] and backend.guarded == {new.hex: new}
    guards.release([new], "b")
    assert backend.guarded == {} and guards.count() == 0


def test_what_could_not_be_guarded_is_let_go_in_case_it_is(bench: CacheBench, cache: Cache) -> None:
    """The holder may have done it, and not said so in time."""
    backend = FakeBackend()
    guards = Guards(backend)
    pack = cache.pack(bench.make_pack(), bench.store)
    backend.error = UnavailableError("no answer")
    with pytest.raises(UnavailableError):
        guards.device(pack, "a")
    backend.guarded[pack.hex] = pack
    assert guards.sweep() == []  # nor is there an answer now
    backend.error = None
    assert guards.sweep() == [pack.hex]
    assert backend.guarded == {} and guards.count() == 0


def test_letting_go_never_raises_and_is_made_up_for(bench: CacheBench, cache: Cache) -> None:
    backend = FakeBackend()
    guards = Guards(backend)
    packs = [cache.pack(bench.make_pack(seed=seed), bench.store) for seed in range(3)]
    for pack in packs:
        guards.device(pack, "a")
    backend.error = UnavailableError("no answer")
    before = len(backend.calls)
    guards.release(packs, "a")
    assert len(backend.calls) == before + 1  # it doesn't wait for each of them
    backend.error = None
    assert sorted(guards.sweep()) == sorted(pack.hex for pack in packs)


def test_nobody_waits_for_a_holder_that_does_not_answer_about_another_pack(bench: CacheBench, cache: Cache) -> None:
    backend = FakeBackend()
    guards = Guards(backend)
    first, second = (cache.pack(bench.make_pack(seed=seed), bench.store) for seed in range(2))
    bench.fill(second)
    second.sync()
    backend.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(guards.device, first, "a")
        until(lambda: backend.calls, "it asks")
        quickly(lambda: guards.count())
        quickly(lambda: guards.device(second, "a"))
        quickly(lambda: guards.release([second], "a"))
        backend.ended = True
        quickly(guards.lost)
        backend.gate.set()
        assert waiting.result() == first.data_path
    assert guards.packs() == [first]  # it was guarded after the loss


def test_a_pack_that_is_served_stays_guarded_for_as_long_as_somebody_uses_it(bench: CacheBench, cache: Cache) -> None:
    """Its mounts read through the server, complete or not; and they are about to open it."""
    backend = FakeBackend(name="fuse", variant="fuse1", in_path=True)
    guards = Guards(backend)
    pack = cache.pack(bench.make_pack(), bench.store)
    path = guards.device(pack, "a")
    assert path == f"/served/{pack.hex}"
    bench.fill(pack)
    pack.sync()
    assert guards.sweep() == [] and pack.hex in backend.guarded
    assert guards.needs([pack])
    assert guards.device(pack, "b") == pack.data_path
    guards.release([pack], "b")
    assert pack.hex in backend.guarded
    guards.release([pack], "a")
    assert backend.guarded == {}


def test_changes_to_one_pack_come_one_after_the_other(bench: CacheBench, cache: Cache) -> None:
    """Else a pack could be let go behind the back of who has just been told that it is guarded."""
    backend = FakeBackend()
    guards = Guards(backend)
    pack = cache.pack(bench.make_pack(), bench.store)

    def use(name: str) -> None:
        for _ in range(50):
            assert guards.device(pack, name) == pack.data_path
            assert backend.guarded[pack.hex] is pack
            time.sleep(0)
            assert pack.hex in backend.guarded
            guards.release([pack], name)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(use, name) for name in "abcd"]:
            done.result()
    assert backend.guarded == {} and guards.count() == 0


def fuse(tmp_path: Path, custody: FakeCustody) -> FuseBackend:
    return FuseBackend(cast(Custody, custody), str(tmp_path / "packs"))


def test_no_two_fuse_servers_have_the_same_variant(tmp_path: Path, bench: CacheBench, cache: Cache) -> None:
    """Layers stay mounted under the variant of a dead server; nothing may be taken for those."""
    custody: Any = FakeCustody()
    pack = cache.pack(bench.make_pack(), bench.store)
    seen = set()
    for _ in range(3):  # workers, none of which knows of those before
        backend = fuse(tmp_path, custody)
        for _ in range(3):  # servers
            path = backend.guard(pack)
            assert path == f"{custody.started[-1]}/{pack.hex}" and backend.variant.startswith("fuse")
            seen.add(backend.variant)
            time.sleep(0.002)  # starting one takes much longer
            backend.lost()
    assert len(seen) == len(set(custody.started)) == 9


def test_a_server_that_runs_is_found_again(
    tmp_path: Path, bench: CacheBench, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    custody = FakeCustody()
    for name in ("9", "17"):
        (tmp_path / "packs" / name).mkdir(parents=True)
    monkeypatch.setattr(guards_module, "_is_served", lambda path: path == f"{tmp_path}/packs/17")
    served = fuse(tmp_path, custody)
    assert served.variant == "fuse17"
    pack = cache.pack(bench.make_pack(), bench.store)
    assert served.guard(pack) == f"{tmp_path}/packs/17/{pack.hex}"
    assert custody.started == [] and os.listdir(tmp_path / "packs") == ["17"]


def test_the_loss_of_a_fuse_server_is_noted_while_somebody_waits_for_it(
    tmp_path: Path, bench: CacheBench, cache: Cache
) -> None:
    custody = FakeCustody()
    backend = fuse(tmp_path, custody)
    guards = Guards(backend)
    pack = cache.pack(bench.make_pack(), bench.store)
    guards.device(pack, "a")
    custody.gate.clear()
    other = cache.pack(bench.make_pack(seed=1), bench.store)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(guards.device, other, "a")
        before = backend.variant
        quickly(guards.lost)
        assert backend.variant != before
        custody.gate.set()
        waiting.result()
    guards.release([pack, other], "a")
    assert guards.device(pack, "b").startswith(backend.mount_point)
    assert custody.started[-1] == backend.mount_point


def test_news_of_a_loss_that_come_twice_or_late_are_about_no_other_server(
    tmp_path: Path, bench: CacheBench, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    custody = FakeCustody()
    served: set[str] = set()
    monkeypatch.setattr(guards_module, "_is_served", served.__contains__)
    backend = fuse(tmp_path, custody)
    guards = Guards(backend)
    pack = cache.pack(bench.make_pack(), bench.store)
    assert not guards.lost()  # none has been started
    guards.device(pack, "a")
    assert guards.lost() and not guards.lost()
    guards.device(pack, "b")
    served.add(backend.mount_point)
    before = backend.variant
    assert not guards.lost() and backend.variant == before and guards.count() == 1
    guards.release([pack], "b")


def test_a_server_that_fails_to_start_leaves_its_name_to_nobody(
    tmp_path: Path, bench: CacheBench, cache: Cache
) -> None:
    custody = FakeCustody()
    backend = fuse(tmp_path, custody)
    pack = cache.pack(bench.make_pack(), bench.store)
    before = backend.variant
    custody.error = UnavailableError("no")
    with pytest.raises(UnavailableError):
        backend.guard(pack)
    custody.error = None
    backend.guard(pack)
    assert backend.variant != before


def test_a_server_that_another_worker_has_started_is_taken(tmp_path: Path, bench: CacheBench, cache: Cache) -> None:
    custody = FakeCustody()
    custody.serving = f"{tmp_path}/packs/123"
    backend = fuse(tmp_path, custody)
    pack = cache.pack(bench.make_pack(), bench.store)
    assert backend.guard(pack) == f"{tmp_path}/packs/123/{pack.hex}"
    assert backend.variant == "fuse123"


def test_mount_points_of_dead_servers_are_cleared(tmp_path: Path) -> None:
    for name in ("1", "2", "3", "else"):
        (tmp_path / "packs" / name).mkdir(parents=True)
    fuse(tmp_path, FakeCustody())
    assert os.listdir(tmp_path / "packs") == ["else"]
