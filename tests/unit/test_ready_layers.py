"""Layers made ready: what is held for them is held exactly as long as somebody stands on them, whatever fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.conversions import Site
from support.keepers import until
from support.reading import make_files

from layerstore.cache.cache import Cache
from layerstore.cache.framemap import READY
from layerstore.cache.packs import CachedPack
from layerstore.errors import ImgtoolError, UnavailableError
from layerstore.image import Layer, load_image
from overlay.lazy.guards import Guards
from overlay.ready import DIRECT, ReadyLayers, Way
from prefetch.fetcher import Fetched, Fetcher


@dataclass
class FakeBackend:
    """Guards by name alone. The ``failing``th call raises; ``gate`` holds up those that let go."""

    name: str = "fanotify"
    variant: str = ""
    in_path: bool = False
    guarded: set[str] = field(default_factory=set)
    calls: int = 0
    failing: int = -1
    gate: threading.Event = field(default_factory=threading.Event)
    waiting: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    def guard(self, pack: CachedPack) -> str:
        self._count()
        self.guarded.add(pack.hex)
        return f"/packs/{self.variant}/{pack.hex}" if self.in_path else pack.data_path

    def release(self, pack: CachedPack) -> None:
        self.waiting += 1
        assert self.gate.wait(20)
        self.waiting -= 1
        self.guarded.discard(pack.hex)

    def is_lost(self) -> bool:
        return True

    def lost(self) -> None:
        self.variant += "x"
        self.guarded.clear()

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.failing:
            raise UnavailableError("injected")


class Bench:
    """A cache over a store with a base of two packs, which are those of two conversions."""

    def __init__(self, path: Path) -> None:
        self.site = Site(path)
        make_files(path / "one/data", files=1, size=600_000)
        self.site.convert(f"tree:{path}/one", tag="one")
        make_files(path / "two/data", files=2, size=600_000)
        self.site.convert(f"tree:{path}/two", tag="two")
        self.store = self.site.store
        self.layer: Layer = load_image(self.store, "two").layers[0]
        assert len(self.layer.packs) == 2
        self.root = str(path / "node")
        self.backend = FakeBackend()
        self.guards = Guards(self.backend)
        self.lazy = Way("lazy", "fanotify", "", self.guards)
        self.eager = Way("eager", "files", "")
        self.open()

    def open(self) -> None:
        self.cache = Cache(self.root)
        self.fetcher = Fetcher(lambda location: self.store, lambda wanted, keep: 0)
        self.layers = ReadyLayers(self.cache, self.fetcher)

    def close(self) -> None:
        self.fetcher.close()
        self.cache.close()

    @property
    def key(self) -> str:
        return self.layer.metadata.hex

    def take(self, way: Way) -> Fetched:
        return self.layers.take(self.layer, self.store, way)[1]

    def users(self) -> set[str]:
        """Who keeps a pack or the metadata image from eviction."""
        return {user for hex in [self.key, *(pack.digest.hex for pack in self.layer.packs)] for user in self.used(hex)}

    def used(self, hex: str) -> list[str]:
        return self.cache.users(hex)

    def assert_nothing_held(self) -> None:
        assert self.layers.users() == {}
        assert self.users() == set()
        assert self.guards.sweep() == [] and self.guards.count() == 0 and self.backend.guarded == set()
        assert self.guards._users == {}
        assert self.cache.make_room(1 << 40) > 0 or not list(Path(self.root).glob("cache/packs/sha256/*"))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    try:
        yield bench
    finally:
        bench.close()


def test_a_layer_is_held_once_for_each_user(bench: Bench) -> None:
    for _ in range(3):
        assert bench.take(bench.lazy).requests <= 1
    assert bench.layers.users() == {bench.key: 3}
    assert bench.backend.guarded == {pack.digest.hex for pack in bench.layer.packs}
    assert bench.layers.needs_answers([bench.key])
    for _ in range(2):
        bench.layers.give_back(bench.key)
    assert len(bench.users()) == 1 and bench.backend.calls == 2
    bench.layers.give_back(bench.key)
    bench.assert_nothing_held()


def test_what_was_whole_and_is_used_lazily_needs_no_guard(bench: Bench) -> None:
    bench.take(bench.eager)
    assert bench.take(bench.lazy) == Fetched()
    assert bench.backend.guarded == set() and not bench.layers.needs_answers([bench.key])
    for _ in range(2):
        bench.layers.give_back(bench.key)
    bench.assert_nothing_held()


@pytest.mark.parametrize("step", range(1, 9))
@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_an_error_in_any_step_leaves_nothing_held(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, mode: str, step: int
) -> None:
    """Also where somebody else uses the layer, whose hold is not touched."""
    left = step

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **keywords: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise UnavailableError("injected")
            return call(*args, **keywords)

        return counted

    for owner, name in (
        (bench.cache, "use"),
        (bench.cache, "pack"),
        (bench.cache.metadata, "ensure"),
        (bench.cache.metadata, "has"),
        (bench.backend, "guard"),
        (bench.fetcher, "run"),
    ):
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    way = bench.lazy if mode == "lazy" else bench.eager
    try:
        bench.take(way)
    except UnavailableError:
        bench.assert_nothing_held()
        left = -1
        bench.take(way)
    else:
        assert step > 7
    left = 1
    other = bench.eager if mode == "lazy" else bench.lazy
    if mode == "lazy":
        with pytest.raises(UnavailableError):
            bench.take(other)
    assert bench.layers.users() == {bench.key: 1} and len(bench.users()) == 1
    left = -1
    bench.layers.give_back(bench.key)
    bench.assert_nothing_held()


def test_an_error_while_it_is_taken_again_leaves_nothing_held(bench: Bench) -> None:
    bench.take(bench.lazy)
    bench.layers.give_back(bench.key)
    bench.backend.calls, bench.backend.failing = 0, 2
    with pytest.raises(UnavailableError):
        bench.layers.retake(bench.key, bench.guards)
    bench.assert_nothing_held()


def test_who_comes_while_the_last_one_goes_has_it_guarded(bench: Bench) -> None:
    bench.take(bench.lazy)
    bench.backend.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        going = pool.submit(bench.layers.give_back, bench.key)
        until(lambda: bench.backend.waiting, "it is letting go")
        coming = pool.submit(bench.take, bench.lazy)
        bench.backend.gate.set()
        going.result()
        coming.result()
    assert bench.backend.guarded == {pack.digest.hex for pack in bench.layer.packs}
    assert bench.users()
    bench.layers.give_back(bench.key)
    bench.assert_nothing_held()


def test_two_who_go_at_once_end_one_hold(bench: Bench) -> None:
    """The first has counted itself out and is about to end the hold when another one comes, and goes before it."""
    bench.take(bench.lazy)
    hold = bench.layers._holds[bench.key]
    with hold.lock, ThreadPoolExecutor(2) as pool:
        first = pool.submit(bench.layers.give_back, bench.key)
        until(lambda: hold.users == 0, "it has counted itself out")
        with bench.layers._entered(bench.key):
            pass
        second = pool.submit(bench.layers.give_back, bench.key)
        until(lambda: hold.users == 0, "so has the second")
        hold.lock.release()
        try:
            first.result()
            second.result()
            bench.take(bench.lazy)  # a successor, which neither of them may take for theirs
        finally:
            hold.lock.acquire()
    assert bench.layers.users() == {bench.key: 1}
    bench.layers.give_back(bench.key)
    bench.assert_nothing_held()


def test_many_come_and_go(bench: Bench) -> None:
    def visit(number: int) -> None:
        for _ in range(40):
            way = bench.eager if number == 0 else bench.lazy
            bench.take(way)
            assert way is bench.eager or bench.backend.guarded or bench.layers._holds[bench.key].whole
            bench.layers.give_back(bench.key)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(visit, number) for number in range(4)]:
            done.result()
    bench.assert_nothing_held()


def test_nobody_waits_for_data_that_another_one_fetches(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    run, may_go_on, fetching = bench.fetcher.run, threading.Event(), threading.Event()

    def slowly(*args: Any, **keywords: Any) -> Fetched:
        fetching.set()
        assert may_go_on.wait(20)
        return run(*args, **keywords)

    monkeypatch.setattr(bench.fetcher, "run", slowly)
    with ThreadPoolExecutor(3) as pool:
        everything = pool.submit(bench.take, bench.eager)
        assert fetching.wait(20)
        pool.submit(bench.take, bench.lazy).result(5)
        assert bench.backend.guarded and bench.layers.needs_answers([bench.key])
        pool.submit(bench.layers.give_back, bench.key).result(5)
        may_go_on.set()
        everything.result()
    assert bench.layers._holds[bench.key].whole
    bench.layers.give_back(bench.key)
    bench.assert_nothing_held()


def test_what_nobody_watches_is_taken_again_only_if_nothing_is_missing(bench: Bench) -> None:
    """Mounted, its holes would read as zeros."""
    bench.take(bench.lazy)
    bench.layers.give_back(bench.key)
    for key in (bench.key, f"{bench.key}.fuse7"):
        with pytest.raises(UnavailableError, match="lacks data"):
            bench.layers.retake(key, None)
    bench.assert_nothing_held()
    bench.take(bench.eager)
    bench.layers.give_back(bench.key)
    assert len(bench.layers.retake(bench.key, None).devices) == 2
    assert not bench.layers.needs_answers([bench.key])
    bench.layers.give_back(bench.key)
    bench.assert_nothing_held()


def test_what_an_unclean_stop_left_is_verified_before_it_is_taken_again_unwatched(bench: Bench) -> None:
    bench.take(bench.eager)
    paths = [Path(pack.data_path) for pack in bench.layers._holds[bench.key].packs]
    bench.layers.give_back(bench.key)
    bench.fetcher.close()
    bench.cache.close(clean=False)
    bench.open()
    assert bench.layers.retake(bench.key, None).devices
    hexes = [pack.digest.hex for pack in bench.layer.packs]
    assert all(set(bench.cache.known(hex).frames.states()) == {READY} for hex in hexes)
    bench.layers.give_back(bench.key)
    bench.fetcher.close()
    bench.cache.close(clean=False)
    with paths[0].open("r+b") as stream:
        stream.write(b"damage")
    bench.open()
    with pytest.raises(UnavailableError, match="lacks data"):
        bench.layers.retake(bench.key, None)
    bench.assert_nothing_held()


def test_a_layer_that_could_not_be_taken_again_needs_answers(bench: Bench) -> None:
    """Nobody knows what it lacks, and it may be mounted."""
    for path in Path(bench.root).glob("cache/meta/sha256/*"):
        path.unlink()
    with pytest.raises(ImgtoolError):
        bench.layers.retake(bench.key, bench.guards)
    assert bench.layers.needs_answers([bench.key])
    assert not bench.layers.needs_answers([f"{bench.key}.{DIRECT}"])  # others answer for those


def test_a_server_that_is_lost_while_its_packs_are_guarded_makes_no_layer_ready(bench: Bench) -> None:
    backend = FakeBackend("fuse", "fuse1", in_path=True)
    guards = Guards(backend)
    way = Way("lazy", "fuse", "", guards)
    guard = backend.guard

    def lost_between(pack: CachedPack) -> str:
        path = guard(pack)
        if backend.calls == 1:
            guards.lost()
        return path

    backend.guard = lost_between  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match="try again"):
        bench.take(way)
    assert bench.layers.users() == {} and bench.users() == set()
    ready, _ = bench.layers.take(bench.layer, bench.store, way)
    assert ready.key == f"{bench.key}.fuse1x" and all(path.startswith("/packs/fuse1x/") for path in ready.devices)
    bench.take(bench.eager)
    bench.layers.give_back(bench.key)
    assert bench.layers.needs_answers([ready.key])  # complete or not: its reads go through the server
    bench.layers.give_back(ready.key)
    assert backend.guarded == set()


def test_packs_in_place_are_held_without_guards(bench: Bench) -> None:
    way = Way(DIRECT, "raw packs", "")
    with pytest.raises(ImgtoolError):
        bench.take(way)
    bench.assert_nothing_held()
    key = f"{bench.key}.{DIRECT}"
    assert bench.layers.retake(key, None).key == key
    assert not bench.layers.needs_answers([key])
    bench.layers.give_back(key)
    bench.assert_nothing_held()
