"""Whatever the problem, a choice fits and is no worse than the simple ones; whatever fails, a destination is sound."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from support.mirrors import Moody
from support.stores import assert_sound, image, index, publish

from layerstore.digest import Digest
from layerstore.errors import (
    CorruptError,
    ImgtoolError,
    MalformedError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
)
from layerstore.store.failover import FailoverStore
from layerstore.store.memory import MemoryStore
from layerstore.store.protocol import Store
from layerstore.store.retrying import RetryingStore
from layerstore.store.verified import VerifiedStore
from layerstore.sync.budget import Candidate, all_bytes, choose, curve
from layerstore.sync.contents import survey
from layerstore.sync.run import Done, sync
from layerstore.sync.selection import select
from layerstore.sync.usage import parse_usage

BLOBS = [Digest.of(b"%d" % number) for number in range(8)]
SIZES = st.lists(st.integers(0, 50), min_size=len(BLOBS), max_size=len(BLOBS))
IMAGES = st.lists(st.tuples(st.integers(0, 30), st.sets(st.integers(0, len(BLOBS) - 1), max_size=5)), max_size=8)


def best(candidates: list[Candidate], budget: int) -> float:
    """Every choice is looked at."""
    return max(
        sum(each.tasks for each in some)
        for bits in range(1 << len(candidates))
        if all_bytes(some := [each for place, each in enumerate(candidates) if bits >> place & 1]) <= budget
    )


@settings(max_examples=150, deadline=None)
@given(SIZES, IMAGES, st.integers(0, 250))
def test_a_choice_fits_and_lies_between_the_simple_ones_and_the_best(
    sizes: list[int], images: list[tuple[int, set[int]]], budget: int
) -> None:
    candidates = [
        Candidate(f"image{number}", tasks, {BLOBS[each]: sizes[each] for each in blobs})
        for number, (tasks, blobs) in enumerate(images)
    ]
    choice = choose(candidates, budget)
    chosen = [each for each in candidates if each.name in choice.names]
    assert choice.bytes == all_bytes(chosen) <= budget
    assert choice.tasks == sum(each.tasks for each in chosen)
    optimum = best(candidates, budget)
    assert choice.tasks <= optimum <= choice.bound
    single = max((each.tasks for each in candidates if sum(each.blobs.values()) <= budget), default=0)
    assert choice.tasks >= max([single, *(each.tasks for each in choice.tried)])
    assert choice.tasks * max(1, len(candidates)) >= optimum  # the single one is a part of the best at least
    points = curve(candidates, choice)
    assert all(point.bytes <= point.budget for point in points)
    assert choose(list(reversed(candidates)), budget) == choice


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.text(alphabet='image,tsk\n"\r 01.elgb', max_size=100).map(str.encode)))
def test_a_table_of_anything_is_read_or_refused(data: bytes) -> None:
    for table in (data, b"image,tasks\n" + data):
        try:
            found = parse_usage(table, "t.csv")
        except MalformedError as error:
            assert str(error).isprintable()
        else:
            assert all(each.tasks >= 0 and each.image for each in found)


FAILURES = [UnavailableError, CorruptError, PermissionError_]


class Fickle:
    """Fails by chance; what it gives is right, cut off or changed."""

    def __init__(self, store: Store, chance: random.Random, often: float) -> None:
        self._moody = Moody(store, f"fickle{chance.random()}:")

        def before(method: str) -> None:
            if chance.random() < often:
                raise chance.choice(FAILURES)("by chance")

        self._moody.before = before
        self.store: Store = self._moody


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([0.02, 0.1, 0.3]), st.integers(1, 3), st.integers(1, 3))
def test_whatever_mirrors_do_what_has_a_name_is_whole(seed: int, often: float, mirrors: int, jobs: int) -> None:
    chance = random.Random(seed)
    whole = MemoryStore()
    for number in range(6):
        layers = [b"%d" % chance.randrange(8) for _ in range(3)]
        publish(whole, f"image{number}", index(image(*layers), image(b"shared", layers[0])))
    stores: list[Store] = []
    for _ in range(mirrors):
        part = MemoryStore()
        for reference in whole.references():
            publish(part, reference.name, image(b"shared"))
            part._references[reference.name] = reference.target
        part.content.update(whole.content)
        for digest in chance.sample(sorted(part.content), 3):
            if chance.random() < 0.5:
                del part.content[digest]
            else:
                part.content[digest] = (b"damaged", 0)
        stores.append(VerifiedStore(Fickle(part, chance, often).store))
    source = RetryingStore(FailoverStore(stores), wait=lambda seconds: None)
    destination = MemoryStore()
    names = [reference.name for reference in whole.references()]
    try:
        report = sync(survey(source, names, None), source, destination, jobs=jobs)
    except ImgtoolError as error:
        assert not isinstance(error, NotFoundError) or mirrors == 1
        return
    copied = {each.name for each in report.images if each.done is Done.COPIED}
    assert copied == set(destination.names())
    assert_sound(destination)
    for name in copied:
        assert destination.resolve(name) == whole.resolve(name)
    for each in report.images:
        assert (each.error is None) == (each.done is not Done.FAILED)
    assert destination.pinned() == frozenset()


def test_the_next_run_finishes_what_failed() -> None:
    chance = random.Random(7)
    whole = MemoryStore()
    for number in range(10):
        publish(whole, f"image{number}", image(b"%d" % number, b"shared"))
    source = Fickle(whole, chance, 0.2).store
    destination = MemoryStore()
    for _ in range(50):
        try:
            report = sync(survey(whole, select(whole).names, None), source, destination, jobs=2)
        except ImgtoolError:
            continue
        if report.failure is None:
            break
    assert len(list(destination.names())) == 10
    assert_sound(destination)
