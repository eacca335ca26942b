"""Packs of the cache under whatever happens to them, in whatever order.

Frames are written, synced, verified; disks fail, bytes rot, processes die with and without somebody who holds what
they had open, machines stop. The rules hold throughout:

* What may be read is right, once what was not verified has been.
* What is recorded was durable before, so that a machine may stop at any time.
* What was synced is there again after anything but rot.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.caches import CacheBench
from support.disks import Disk
from support.faults import fsync_for_free

from layerstore.cache.cache import HELD, Cache
from layerstore.cache.framemap import MISSING, READY
from layerstore.cache.packs import CachedPack
from layerstore.errors import NoSpaceError, UnavailableError
from layerstore.pack.format import BLOCK_SIZE

FRAMES = 6
numbers = st.integers(0, FRAMES - 1)


class Packs(RuleBasedStateMachine):
    """One pack; ``synced`` are frames that a sync has promised, less what has rotted since."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.directory = tempfile.mkdtemp(prefix="imgtool-test-")
        self.stack.callback(shutil.rmtree, self.directory)
        self.cache: Cache | None = None
        self.synced: set[int] = set()
        self.rotten: set[int] = set()

    @initialize(seed=st.integers(0, 1 << 30), used=st.booleans())
    def start(self, seed: int, used: bool) -> None:
        self.stack.enter_context(fsync_for_free())
        self.disk = self.stack.enter_context(Disk(random.Random(seed)).mounted())
        self.bench = CacheBench(os.path.join(self.directory, "node"))
        self.pack = self.bench.make_pack(FRAMES)
        self.used = used
        self.open()

    def teardown(self) -> None:
        if self.cache is not None:
            self.cache.close(clean=False)
        self.stack.close()

    def open(self, held: dict[str, tuple[int, int]] | None = None) -> None:
        self.cache = self.bench.open(held=held or {})
        for files in (held or {}).values():
            for file in files:
                os.close(file)
        if self.used:
            self.cache.use("sandbox", [self.pack.digest.hex])
        self.cached: CachedPack = self.cache.pack(self.pack, self.bench.store)
        assert not self.bench.warnings

    # -- what a fetcher does

    @rule(number=numbers)
    def write(self, number: int) -> None:
        if self.cached.frames.state(number) != READY:
            self.synced.discard(number)  # what is on the disk is written over
        self.bench.fill(self.cached, [number])
        assert self.cached.frames.state(number) == READY

    @rule(number=numbers, written=st.integers(0, BLOCK_SIZE - 1))
    def write_on_a_full_disk(self, number: int, written: int) -> None:
        before = self.cached.frames.state(number)
        real = os.pwrite

        def full(file: int, data: memoryview, offset: int) -> int:
            if not os.readlink(f"/proc/self/fd/{file}").endswith("/data"):
                return real(file, data, offset)
            if len(data) <= BLOCK_SIZE - written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(file, data[:written], offset)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            if before == READY:
                self.bench.fill(self.cached, [number])
            else:
                with pytest.raises(NoSpaceError):
                    self.bench.fill(self.cached, [number])
                assert self.cached.frames.state(number) == MISSING
                self.synced.discard(number)

    @rule(number=numbers)
    def verify(self, number: int) -> None:
        right = self.cached.verify(number)
        assert right == (self.cached.frames.state(number) == READY)
        assert not (right and number in self.rotten)
        if not right:
            self.synced.discard(number)

    @rule()
    def sync(self) -> None:
        self.cached.sync()
        self.synced |= set(self.bench.recorded(self.pack)) - self.rotten
        ready = {number for number, state in enumerate(self.cached.frames.states()) if state == READY}
        assert ready <= self.synced

    @rule(code=st.sampled_from([errno.EIO, errno.ENOSPC]))
    def sync_fails(self, code: int) -> None:
        self.disk.fail_next_sync(code)
        try:
            self.cached.sync()
        except (NoSpaceError, UnavailableError):
            assert self.cached.frames.states().count(READY) <= len(self.synced)
        self.disk.fail_next_sync(0)

    # -- what happens to everybody

    @rule()
    def stop_in_order(self) -> None:
        assert self.cache is not None
        self.cache.close()
        self.synced |= set(self.bench.recorded(self.pack)) - self.rotten
        self.open()

    @rule(rot=st.sets(numbers, max_size=2))
    def process_dies(self, rot: set[int]) -> None:
        assert self.cache is not None
        self.cache.close(clean=False)
        self.decay(rot)
        self.open()

    @rule()
    def process_dies_and_its_descriptors_are_held(self) -> None:
        assert self.cache is not None
        held = {self.cached.hex: (os.dup(self.cached.data_fd), os.dup(self.cached.frames.fd))}
        states = self.cached.frames.states()
        self.cache.close(clean=False)
        self.open(held)
        assert self.cached.frames.states() == states
        self.cache.release(HELD)

    @rule(rot=st.sets(numbers, max_size=2))
    def machine_stops(self, rot: set[int]) -> None:
        assert self.cache is not None
        self.cache.close(clean=False)
        self.disk.crash(self.bench.root)
        self.decay(rot)
        self.open()

    def decay(self, frames: set[int]) -> None:
        for number in frames - self.rotten:
            self.bench.damage(self.pack, number)
            self.disk.settle(self.bench.place(self.pack) / "data")
        self.synced -= frames
        self.rotten |= frames

    @precondition(lambda self: not self.used)
    @rule()
    def evict(self) -> None:
        assert self.cache is not None
        assert self.cache.make_room(1) > 0
        self.synced.clear()
        self.rotten.clear()
        self.cached = self.cache.pack(self.pack, self.bench.store)

    # -- what has to hold

    @invariant()
    def what_may_be_read_is_right(self) -> None:
        if self.cache is not None:
            ready = self.bench.assert_right(self.cached)
            self.rotten -= set(ready)

    @invariant()
    def what_is_recorded_is_durable(self) -> None:
        if self.cache is None:
            return
        durable = self.disk.durable(self.cached.data_path)
        for number in set(self.bench.recorded(self.pack)) & self.synced:
            at = slice(number * BLOCK_SIZE, (number + 1) * BLOCK_SIZE)
            assert durable[at] == self.bench.frame(self.cached, number)

    @invariant()
    def what_was_synced_is_not_lost(self) -> None:
        if self.cache is not None:
            states = self.cached.frames.states()
            assert all(states[number] != MISSING for number in self.synced)


Packs.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPacks = pytest.mark.case("C09", "C10")(Packs.TestCase)
