"""Publishers, copiers and collectors that are killed at random, and what must hold afterwards.

Every round forks two of them over the same store. Each dies either at a system call or request counted beforehand or
whenever its parent's kill happens to arrive. Grace periods are zero throughout, so leases alone keep publishers safe
from collectors.
"""

from __future__ import annotations

import os
import random
import select
import signal
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from layerstore.errors import ConflictError, NotFoundError, UnavailableError
from layerstore.store.collect import collect, plan_collection
from layerstore.store.collector import Patience
from layerstore.store.copying import copy
from layerstore.store.directory import DirectoryStore
from layerstore.store.memory import MemoryStore
from layerstore.store.objects import ObjectStore
from layerstore.store.protocol import PruneStore
from layerstore.store.reach import present_target
from layerstore.store.s3 import S3Bucket
from layerstore.store.s3client import S3Client, S3Url
from support.buckets import BucketBench
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

REFUSALS = ("was expected", "was changed meanwhile")
"""Of who wanted to write a reference: another writer was faster; never that a blob is gone."""
PASSING = ("has been locked by a collector", "was broken off and may still delete", "takes too long at a time")
"""Where there are no locks that end with their holder."""

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
                assert any(text in str(error) for text in REFUSALS), error


def copy_one(store: PruneStore, source: MemoryStore, rng: random.Random) -> None:
    name = rng.choice(list(source.names()))
    try:
        copy(name, source, store, rename=rng.choice(NAMES), replace=True, jobs=2)
    except ConflictError as error:
        assert any(text in str(error) for text in REFUSALS), error


def unpublish_one(store: PruneStore, source: MemoryStore, rng: random.Random) -> None:
    name = rng.choice(NAMES)
    target = present_target(store, name)
    if target is not None:
        try:
            store.delete_reference(name, expected=target)
        except NotFoundError:
            pass  # another was faster
        except ConflictError as error:
            assert any(text in str(error) for text in REFUSALS), error


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


class Ground(Protocol):
    """What is fought over.

    Attributes:
        life: seconds that a child has, at most. Whatever happens in them is repeated with other timing in the next
            round.
        calls: after which a child may be told to die, at most.
    """

    life: float
    calls: int

    @property
    def bench(self) -> DirectoryBench | BucketBench: ...

    def open(self, calls: int | None) -> PruneStore:
        """In a child: the store, for one who dies at that call, if any."""
        ...

    def next_round(self) -> None:
        """Some time passes."""
        ...

    def leftovers(self) -> list[str]:
        """What dead publishers have left, leases too."""
        ...


class DirectoryGround:
    life = 0.03
    calls = 600

    def __init__(self, path: str) -> None:
        self.bench = DirectoryBench(path)

    def open(self, calls: int | None) -> PruneStore:
        store = DirectoryStore(self.bench.store.root, clock=self.bench.clock)
        if calls is not None:
            die_at_call(calls)
        return store

    def next_round(self) -> None:
        pass

    def leftovers(self) -> list[str]:
        return [*os.listdir(self.bench.path("leases")), *self.bench.leftovers()]


class Mortal:
    """A bucket that kills its process just before or after so many requests."""

    def __init__(self, bucket: S3Bucket, calls: int) -> None:
        self._bucket = bucket
        self._left = calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._bucket, name)
        if name in ("location", "now"):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            result = found(*arguments, **named)
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call


class BucketGround:
    """Marks of dead collectors are void, and doubts over, by the next round."""

    life = 0.6
    calls = 160
    _patience = Patience(void=4, trust=2, doubt=4, look=0.02)

    def __init__(self, url: str) -> None:
        self._url = url
        self.bench = BucketBench(S3Bucket(url), patience=self._patience)
        self._unused = S3Client(S3Url.parse(url))  # so that a child need not make one, and shares no connection

    def open(self, calls: int | None) -> PruneStore:
        bucket: Any = S3Bucket(self._url, client=self._unused)
        if calls is not None:
            bucket = Mortal(bucket, calls)
        return ObjectStore(bucket, clock=self.bench.clock, patience=self._patience, threads=4)

    def next_round(self) -> None:
        self.bench.clock.advance(10)

    def leftovers(self) -> list[str]:
        bucket = self.bench.store.bucket
        found = [entry.key for prefix in ("leases/", "probe-") for entry in bucket.entries(prefix)]
        uploads = bucket.abort_uploads(before=1 << 62, keep=(), dry_run=True)
        return found + (["uploads"] if uploads else [])


class Arena:
    """One store, fought over until :meth:`finish`."""

    def __init__(self, ground: Ground, seed: int) -> None:
        self.ground = ground
        self.bench = ground.bench
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
                select.select([child.report], [], [], self._rng.uniform(0, self.ground.life))
            for child in children:
                child.kill()
                assert child.wait() == -9
        assert_sound(self.bench.store)
        self.ground.next_round()

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
        assert self.ground.leftovers() == []
        with ExitStack() as stack:
            children = [stack.enter_context(Child(self._survivor(random_sample(self._rng)))) for _ in range(3)]
            assert [child.wait() for child in children] == [0, 0, 0]
            for child in children:
                unpublish(store, f"p{child.pid}")
        assert_sound(store)

    def _survivor(self, sample: Sample) -> Callable[[Child], None]:
        return lambda child: publish(self.ground.open(None), f"p{os.getpid()}", sample)

    def _work(self, kinds: list[Job]) -> Callable[[Child], None]:
        seed = self._rng.randrange(1 << 32)
        calls = self._rng.randrange(1, self.ground.calls) if self._rng.random() < 0.6 else None

        def work(child: Child) -> None:
            rng = random.Random(seed)
            store = self.ground.open(calls)
            while True:
                try:
                    rng.choice(kinds)(store, self._source, rng)
                except UnavailableError as error:
                    assert isinstance(store, ObjectStore), error
                    assert any(text in str(error) for text in PASSING), error

        return work
