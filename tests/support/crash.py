"""Publishers, copiers and collectors that are killed at random, and what must hold afterwards.

Every round forks two of them over the same store. Each dies either at a system call counted beforehand or whenever its
parent's kill happens to arrive. Grace periods are zero throughout, so leases alone keep publishers safe from
collectors.
"""

from __future__ import annotations

import os
import random
import select
from collections.abc import Callable
from contextlib import ExitStack

from layerstore.errors import ConflictError, NotFoundError
from layerstore.store.collect import collect, plan_collection
from layerstore.store.copying import copy
from layerstore.store.directory import DirectoryStore
from layerstore.store.memory import MemoryStore
from layerstore.store.protocol import PruneStore
from layerstore.store.reach import present_target
from support.children import Child, die_at_call
from support.stores import (
    DAY,
    DirectoryBench,
    Sample,
    all_blobs,
    assert_sound,
    document,
    image,
    index,
    publish,
    put_missing,
    unpublish,
)

NAMES = [f"name{number}" for number in range(6)]
LAYERS = [bytes([number]) * (1 + number**4 % 40_000) for number in range(12)]
"""Few, so that images share them and collectors meet publishers of what they delete."""

MOST_CALLS = 600
LONGEST_LIFE = 0.03
"""Seconds. Whatever happens in this time is repeated with other timing in the next round."""

Job = Callable[[PruneStore, MemoryStore, random.Random], None]


def random_sample(rng: random.Random) -> Sample:
    first, second = (image(*rng.sample(LAYERS, 3), config=b'{"n":%d}' % rng.randrange(4)) for _ in range(2))
    kind = rng.randrange(4)
    if kind == 0:
        return index(first, second)
    if kind == 1:
        return document({"layers": [], "subject": second.target.to_json()}, [second])
    return first


def publish_some(store: PruneStore, source: MemoryStore, rng: random.Random) -> None:
    sample = random_sample(rng)
    with store.scratch(), store.lease() as lease:
        if rng.random() < 0.5:
            lease.pin(sample.blobs)
        else:
            for digest in sample.blobs:
                lease.pin([digest])
        put_missing(store, sample)
        lease.renew()
        for name in rng.sample(NAMES, 2):
            try:
                store.set_reference(
                    name, sample.target, expected=present_target(store, name), lease=lease, reaches=sample.blobs
                )
            except ConflictError as error:
                assert "was expected" in str(error), error  # another writer was faster; never that a blob is gone


def copy_one(store: PruneStore, source: MemoryStore, rng: random.Random) -> None:
    name = rng.choice(list(source.names()))
    try:
        copy(name, source, store, rename=rng.choice(NAMES), replace=True, jobs=2)
    except ConflictError as error:
        assert "was expected" in str(error), error


def unpublish_one(store: PruneStore, source: MemoryStore, rng: random.Random) -> None:
    name = rng.choice(NAMES)
    target = present_target(store, name)
    if target is not None:
        try:
            store.delete_reference(name, expected=target)
        except NotFoundError:
            pass  # another was faster
        except ConflictError as error:
            assert "was expected" in str(error), error


def collect_all(store: PruneStore, source: MemoryStore, rng: random.Random) -> None:
    plan = plan_collection(store, grace=0, force=True)
    collect(store, plan, hold=rng.choice([0.0, 0.001, 5.0]))


PUBLISHERS: list[Job] = [publish_some, publish_some, copy_one]
COLLECTORS: list[Job] = [collect_all, collect_all, unpublish_one]

ENCOUNTERS = [
    (PUBLISHERS, COLLECTORS),
    (PUBLISHERS, COLLECTORS),
    (PUBLISHERS, PUBLISHERS),
    (COLLECTORS, COLLECTORS),
]


class Arena:
    """One store, fought over until :meth:`finish`."""

    def __init__(self, path: str, seed: int) -> None:
        self.bench = DirectoryBench(path)
        self._rng = random.Random(seed)
        self._source = MemoryStore()
        for number in range(4):
            publish(self._source, f"source{number}", random_sample(self._rng))

    def round(self) -> None:
        """Two children, both killed; then every reference must stand."""
        with ExitStack() as stack:
            jobs = self._rng.choice(ENCOUNTERS)
            children = [stack.enter_context(Child(self._work(kinds))) for kinds in jobs]
            # Returns early if both have died at their call: select sees the pipes of the dead as readable.
            for child in self._rng.sample(children, 2):
                select.select([child.report], [], [], self._rng.uniform(0, LONGEST_LIFE))
            for child in children:
                child.kill()
                assert child.wait() == -9
        assert_sound(self.bench.store)

    def finish(self) -> None:
        """Survivors publish and collect as ever; after the leases of the dead have expired nothing of them is left."""
        store = self.bench.store
        reached = assert_sound(store)
        with_leases = reached | store.pinned()
        plan = plan_collection(store, grace=0, force=True)
        collect(store, plan)
        assert all_blobs(store) == with_leases & all_blobs(store)
        assert assert_sound(store) == reached
        self.bench.clock.advance(2 * DAY)
        collect(store, plan_collection(store, grace=0, force=True))
        assert all_blobs(store) == reached
        assert os.listdir(self.bench.path("leases")) == []
        assert self.bench.leftovers() == []
        with ExitStack() as stack:
            children = [stack.enter_context(Child(self._survivor(random_sample(self._rng)))) for _ in range(3)]
            assert [child.wait() for child in children] == [0, 0, 0]
            for child in children:
                unpublish(store, f"p{child.pid}")
        assert_sound(store)

    def _survivor(self, sample: Sample) -> Callable[[Child], None]:
        return lambda child: publish(self.bench.store, f"p{os.getpid()}", sample)

    def _work(self, kinds: list[Job]) -> Callable[[Child], None]:
        seed = self._rng.randrange(1 << 32)
        calls = self._rng.randrange(MOST_CALLS) if self._rng.random() < 0.6 else None

        def work(child: Child) -> None:
            rng = random.Random(seed)
            store = DirectoryStore(self.bench.store.root, clock=self.bench.clock)
            if calls is not None:
                die_at_call(calls)
            while True:
                rng.choice(kinds)(store, self._source, rng)

        return work
