"""Kill -9 at random points of conversions, beside others and beside a collector."""

from __future__ import annotations

import os
import random
import select
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.children import Child, die_at_call
from support.conversions import Site, noise
from support.faults import fsync_for_free
from support.layouts import compress
from support.stores import DAY, SteppedClock, all_blobs, assert_sound
from support.tars import directory, file, hardlink, tar, whiteout

from layerstore.audit import ContentCheck
from layerstore.compose import plan_stack, publish_stack
from layerstore.errors import ConflictError, NotFoundError
from layerstore.image import Role
from layerstore.store.clock import FileClock
from layerstore.store.collect import collect, plan_collection
from layerstore.store.verification import verify

ROUNDS = 40
MOST_CALLS = 250
LONGEST_LIFE = 0.15
"""Seconds, in which a child does a few conversions."""


@pytest.fixture(autouse=True)
def impatience() -> Iterator[None]:
    with fsync_for_free():
        yield


class Works:
    """A store, and the sources that children convert into it."""

    def __init__(self, path: Path) -> None:
        Site(path)
        self.clock = SteppedClock(FileClock(str(path / "store" / "clock")))
        self.site = Site(path, clock=self.clock)
        data = [noise(60_000 + 5000 * number, number) for number in range(8)]
        base = tar(directory("etc"), *(file(f"f{number}", content) for number, content in enumerate(data[:4])))
        self.sources = [
            self.site.raw_tar(tar(*(file(f"x{number}", data[number]) for number in order)))
            for order in ((0, 1, 2), (2, 3, 4), (4, 5, 6, 7), (7, 0))
        ]
        self.sources.append(self.site.raw_tar(compress(tar(file("z", noise(300_000, 9))), "gzip")))
        self.base = self.site.image([base])
        self.work = self.site.image([base, tar(whiteout("f1"), hardlink("g", "f2"), file("new", data[6]))])

    def convert_some(self, rng: random.Random) -> None:
        """What a build machine does. Names are shared, so a slower one may find that it was overtaken."""
        site = self.site
        try:
            match rng.randrange(4):
                case 0:
                    site.convert(self.base, tag="base")
                    site.convert(self.work, Role.WORKSPACE, base="base", tag="work")
                    publish_stack(site.store, plan_stack(site.store, base="base", workspace="work"), tag="env")
                case _:
                    source = rng.choice(self.sources)
                    site.convert(source, dedup=rng.random() < 0.8, tag=f"tag{rng.randrange(5)}")
        except ConflictError as error:
            assert "was expected" in str(error) or "was made over" in str(error), error
        except NotFoundError as error:
            assert "reference" in str(error), error

    def collect_some(self, rng: random.Random) -> None:
        store = self.site.store
        if rng.random() < 0.5:
            name = f"tag{rng.randrange(5)}"
            try:
                store.delete_reference(name, expected=store.resolve(name))
            except (NotFoundError, ConflictError):
                pass
        collect(store, plan_collection(store, grace=0, force=True), hold=rng.choice([0.001, 5.0]))

    def child(self, rng: random.Random, job: Callable[[random.Random], None]) -> Child:
        seed = rng.randrange(1 << 32)
        calls = rng.randrange(MOST_CALLS) if rng.random() < 0.5 else None

        def work(child: Child) -> None:
            own = random.Random(seed)
            if calls is not None:
                die_at_call(calls)
            while True:
                job(own)

        return Child(work)


@pytest.mark.case("C03", "G01", "G07")
@pytest.mark.timeout(0)
def test_however_conversions_die_the_store_stays_sound(tmp_path: Path) -> None:
    seed = time.time_ns()
    print(f"seed {seed}")  # shown if it fails; timing decides as much as the seed
    rng = random.Random(seed)
    works = Works(tmp_path)
    store = works.site.store
    for number in range(ROUNDS):
        jobs = [works.convert_some, rng.choice([works.convert_some, works.collect_some])]
        with ExitStack() as stack:
            children = [stack.enter_context(works.child(rng, job)) for job in jobs]
            for child in rng.sample(children, 2):
                select.select([child.report], [], [], rng.uniform(0, LONGEST_LIFE))
            for child in children:
                child.kill()
                assert child.wait() == -9
        assert_sound(store)
        if number % 8 == 7:
            assert list(verify(store, check=ContentCheck())) == []

    # Three at once after all that, as impatient users do.
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child(lambda child: works.site.convert(works.base, tag=f"survivor{os.getpid()}")))
            for _ in range(3)
        ]
        assert [child.wait() for child in children] == [0, 0, 0]
        names = [f"survivor{child.pid}" for child in children]
    assert len({store.resolve(name).digest for name in names}) <= 3
    assert len({str(works.site.rows(name)) for name in names}) == 1

    works.clock.advance(2 * DAY)
    collect(store, plan_collection(store, grace=0))
    assert works.site.leftovers() == []
    assert os.listdir(os.path.join(store.root, "tmp")) == []
    assert all_blobs(store) == assert_sound(store)
    assert list(verify(store, check=ContentCheck())) == []


@pytest.mark.case("C03")
def test_publishers_of_the_same_image_under_one_name_all_succeed(tmp_path: Path) -> None:
    site = Site(tmp_path)
    source = site.tar(*(file(f"f{number}", noise(300_000, number)) for number in range(20)))
    with ExitStack() as stack:
        children = [stack.enter_context(Child(lambda child: site.convert(source, tag="one"))) for _ in range(4)]
        assert [child.wait() for child in children] == [0] * 4
    assert list(site.store.names()) == ["one"]
    assert list(verify(site.store, check=ContentCheck())) == []
    assert site.leftovers() == []
