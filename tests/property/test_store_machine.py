"""The directory store does what the memory store does, whatever is asked in whatever order."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.faults import fsync_for_free
from support.stores import (
    DAY,
    Bench,
    DirectoryBench,
    MemoryBench,
    Sample,
    all_blobs,
    assert_sound,
    document,
    image,
    index,
    put,
)

from layerstore.digest import Digest
from layerstore.errors import ImgtoolError
from layerstore.store.collect import collect, plan_collection
from layerstore.store.copying import copy
from layerstore.store.protocol import Lease, PruneStore
from layerstore.store.reach import present_target
from layerstore.store.verification import verify

LAYERS = [b"", b"one", b"two" * 5000]
IMAGES = [image(), image(LAYERS[0], LAYERS[1]), image(LAYERS[1], LAYERS[2])]
SAMPLES = [
    *IMAGES,
    index(IMAGES[0], IMAGES[1]),
    document({"layers": [], "subject": IMAGES[2].target.to_json()}, [IMAGES[2]]),
]
BLOBS = {digest: data for sample in SAMPLES for digest, data in sample.blobs.items()}
NAMES = ["a", "a/b", "c:1", "..", "a//b"]

samples = st.sampled_from(SAMPLES)
names = st.sampled_from(NAMES)
digests = st.sampled_from(sorted(BLOBS))
slots = st.integers(0, 2)
ages = st.sampled_from([0, DAY // 2, 2 * DAY])


class Stores(RuleBasedStateMachine):
    """Everything is done to both, and has to come out the same: result, or class of error."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = ExitStack()
        self.patches.enter_context(fsync_for_free())
        self.directory = tempfile.mkdtemp(prefix="imgtool-test-")
        self.benches: tuple[Bench, ...] = (MemoryBench(), DirectoryBench(os.path.join(self.directory, "store")))
        self.leases: tuple[dict[int, Lease], ...] = ({}, {})

    def teardown(self) -> None:
        shutil.rmtree(self.directory)
        self.patches.close()

    def both(self, act: Callable[[PruneStore], object]) -> None:
        self.each(lambda bench, leases: act(bench.store))

    def each(self, act: Callable[[Bench, dict[int, Lease]], object]) -> None:
        outcomes = []
        for bench, leases in zip(self.benches, self.leases, strict=True):
            try:
                outcomes.append(act(bench, leases))
            except ImgtoolError as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1]

    @rule(digest=digests)
    def put(self, digest: Digest) -> None:
        def act(bench: Bench, leases: dict[int, Lease]) -> Digest:
            put(bench.store, BLOBS[digest])
            bench.stamp(digest)
            return digest

        self.each(act)

    @rule(sample=samples)
    def put_all(self, sample: Sample) -> None:
        for digest in sample.blobs:
            self.put(digest)

    @rule(digest=digests, said=digests, size=st.integers(0, 20))
    def put_wrong(self, digest: Digest, said: Digest, size: int) -> None:
        def act(store: PruneStore) -> None:
            with store.upload() as upload:
                upload.write(BLOBS[digest])
                upload.commit(said, size)

        if said != digest or size != len(BLOBS[digest]):
            self.both(act)

    @rule(digest=digests, data=st.sampled_from([b"", b"damaged"]))
    def damage(self, digest: Digest, data: bytes) -> None:
        def act(bench: Bench, leases: dict[int, Lease]) -> None:
            if digest in all_blobs(bench.store):
                bench.damage(digest, data)
                bench.stamp(digest)

        self.each(act)

    @rule(digest=digests, offset=st.integers(-1, 5), length=st.integers(-1, 20_000))
    def read(self, digest: Digest, offset: int, length: int) -> None:
        def act(store: PruneStore) -> bytes:
            with store.open(digest) as blob:
                return blob.read_at(offset, length)

        self.both(act)

    @rule(digest=digests)
    def quarantine(self, digest: Digest) -> None:
        self.both(lambda store: bool(store.quarantine(digest)))

    @rule(slot=slots, seconds=st.sampled_from([-1, 3600, 3 * DAY]))
    def lease(self, slot: int, seconds: int) -> None:
        def act(bench: Bench, leases: dict[int, Lease]) -> None:
            if slot in leases:
                leases.pop(slot).__exit__()
            leases[slot] = bench.store.lease(seconds=seconds)

        self.each(act)

    @rule(slot=slots, chosen=st.sets(digests, max_size=3))
    def pin(self, slot: int, chosen: set[Digest]) -> None:
        self.each(lambda bench, leases: leases[slot].pin(chosen) if slot in leases else None)

    @rule(slot=slots)
    def renew(self, slot: int) -> None:
        self.each(lambda bench, leases: leases[slot].renew() if slot in leases else None)

    @rule(slot=slots)
    def release(self, slot: int) -> None:
        self.each(lambda bench, leases: leases[slot].__exit__() if slot in leases else None)

    @rule(slot=slots, name=names, sample=samples, expected=st.one_of(st.none(), samples), look=st.booleans())
    def refer(self, slot: int, name: str, sample: Sample, expected: Sample | None, look: bool) -> None:
        def act(bench: Bench, leases: dict[int, Lease]) -> None:
            if slot in leases:
                guess = expected.target if expected else None
                before = present_target(bench.store, name) if look else guess
                bench.store.set_reference(
                    name, sample.target, expected=before, lease=leases[slot], reaches=sample.blobs
                )

        self.each(act)

    @rule(name=names, expected=samples, look=st.booleans())
    def unrefer(self, name: str, expected: Sample, look: bool) -> None:
        self.both(lambda store: store.delete_reference(name, expected=store.resolve(name) if look else expected.target))

    @rule(name=names, new=names, replace=st.booleans())
    def copy(self, name: str, new: str, replace: bool) -> None:
        """Within one store: another name for the same."""
        self.both(lambda store: copy(name, store, store, rename=new, replace=replace, jobs=1))

    @rule(hours=st.integers(1, 48))
    def wait(self, hours: int) -> None:
        for bench in self.benches:
            bench.clock.advance(hours * 3600)

    @rule(grace=ages, force=st.booleans())
    def collect(self, grace: int, force: bool) -> None:
        def act(store: PruneStore) -> object:
            plan = plan_collection(store, grace=grace, force=force)
            done = collect(store, plan)
            return (
                [blob.digest for blob in plan.doomed],
                [blob.digest for blob in plan.young],
                [blob.digest for blob in done.deleted],
                plan.references,
                plan.kept,
                plan.kept_bytes,
            )

        self.both(act)

    @rule(older_than=ages, dry_run=st.booleans())
    def reclaim(self, older_than: int, dry_run: bool) -> None:
        self.both(lambda store: store.reclaim(older_than=older_than, dry_run=dry_run) >= 0)

    @rule(quarantine=st.booleans())
    def verify(self, quarantine: bool) -> None:
        def act(store: PruneStore) -> object:
            return [(each.fault, each.digest, each.reference) for each in verify(store, quarantine=quarantine)]

        self.both(act)

    @invariant()
    def they_look_alike(self) -> None:
        self.both(lambda store: [(blob.digest, blob.size) for blob in store.blobs()])
        self.both(lambda store: list(store.references()))
        self.both(lambda store: list(store.names()))
        self.both(lambda store: store.pinned())

    @invariant()
    def references_stand_unless_damaged(self) -> None:
        self.both(assert_sound)


Stores.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestStores = Stores.TestCase
