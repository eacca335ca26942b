"""Many images from store to store: which, what of them is missing, and what becomes of each."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.buckets import MemoryBucket
from support.faults import fsync_for_free
from support.httpstore import StoreServer, cut_short, reset, status
from support.mirrors import Moody, family, layer_of, member, publish_plan
from support.servers import S3Server
from support.stores import (
    Sample,
    all_blobs,
    assert_sound,
    document,
    image,
    index,
    publish,
    put,
    unpublish,
)

from layerstore.attachment import attachment_name
from layerstore.digest import Digest
from layerstore.errors import (
    ConflictError,
    CorruptError,
    NoSpaceError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
    UnsupportedError,
    UsageError,
)
from layerstore.store.copying import copy
from layerstore.store.directory import DirectoryStore
from layerstore.store.http import HttpStore
from layerstore.store.memory import MemoryStore, MemoryUpload
from layerstore.store.objects import ObjectStore
from layerstore.store.opening import open_store, open_write_store
from layerstore.store.protocol import Store, WriteStore
from layerstore.store.transfer import PIECE
from layerstore.sync.contents import Survey, survey
from layerstore.sync.plan import State, plan_sync
from layerstore.sync.run import UNAVAILABLE_AT_MOST, Done, SyncReport, sync
from layerstore.sync.selection import select

FAMILY = family(100)


def surveyed(store: Store, *patterns: str) -> Survey:
    selection = select(store, patterns)
    return survey(store, selection.names, selection.listed)


def run(source: Store, destination: WriteStore, *patterns: str, **options: Any) -> SyncReport:
    return sync(surveyed(source, *patterns), source, destination, **options)


def states(report: SyncReport) -> dict[str, Done]:
    return {each.name: each.done for each in report.images}


@pytest.fixture
def source() -> MemoryStore:
    store = MemoryStore()
    for name, sample in FAMILY.items():
        publish(store, name, sample)
    return store


# Selection


def test_names_are_selected_by_globs(source: MemoryStore) -> None:
    publish(source, "other", image(b"x"))
    assert len(select(source).names) == 101
    assert select(source, ["team/repo00?", "o*"], ["*5"]).names == (
        "other",
        *(f"team/repo00{number}" for number in (0, 1, 2, 3, 4, 6, 7, 8, 9)),
    )
    assert select(source, ["other"]).names == ("other",)
    with pytest.raises(NotFoundError, match="nobody"):
        select(source, ["other", "nobody/*"])
    with pytest.raises(UsageError):
        select(source, ["../x"])


def test_plans_are_selected_by_nothing_but_their_images(source: MemoryStore) -> None:
    plan = attachment_name(layer_of(b"a" * 100, b"b" * 100).metadata)
    publish_plan(source, layer_of(b"a" * 100, b"b" * 100).metadata)
    selection = select(source, ["*"])
    assert plan not in selection.names
    assert selection.listed is not None and plan in selection.listed


def test_a_store_without_a_list_is_asked_for_names(source: MemoryStore) -> None:
    store = Moody(source)
    store.fail(UnsupportedError, "names")
    selection = select(store, ["team/repo001", "absent"], ["team/*2"])
    assert (selection.names, selection.listed) == (("absent", "team/repo001"), None)
    for patterns in ([], ["team/*"]):
        with pytest.raises(UnsupportedError):
            select(store, patterns)
    layer = layer_of(*_parts(FAMILY["team/repo001"]))
    publish_plan(source, layer.metadata)
    destination = MemoryStore()
    report = sync(survey(store, selection.names, None), store, destination)
    assert states(report) == {"team/repo001": Done.COPIED, "absent": Done.FAILED}
    assert [(each.name, each.done) for each in report.plans] == [(attachment_name(layer.metadata), Done.COPIED)]


def _parts(sample: Sample) -> tuple[bytes, bytes]:
    """The packs of a member, the shared one first."""
    shared, own = sorted(
        (data for data in sample.blobs.values() if len(data) in (50_000, 1_000)), key=len, reverse=True
    )
    return shared, own


# A family


def test_a_hundred_images_of_a_family_cost_their_difference(source: MemoryStore) -> None:
    destination = MemoryStore()
    everything: dict[Digest, bytes] = {}
    for sample in FAMILY.values():
        everything.update(sample.blobs)
    asked = Moody(source)
    report = run(asked, destination, jobs=4)
    assert set(states(report).values()) == {Done.COPIED} and len(report.images) == 100
    assert report.failure is None
    assert report.bytes == sum(map(len, everything.values()))
    assert report.blobs == len(everything) == 302
    assert report.bytes < 100 * 50_000 / 10
    assert assert_sound(destination) == everything.keys()
    # A question for each name, for each of what it has of its own, and for what all share: one.
    assert asked.asked["resolve"] == 100
    assert asked.asked["open"] == 100 + 302
    again = run(source, destination)
    assert (again.blobs, again.bytes) == (0, 0)
    assert set(states(again).values()) == {Done.PRESENT}


def test_the_family_costs_a_bucket_few_requests(source: MemoryStore) -> None:
    bucket = MemoryBucket()
    count: Counter[str] = Counter()
    store = ObjectStore.create(bucket)
    bucket.before = lambda operation, key: count.update([f"{operation} {key.partition('/')[0]}"])
    assert run(source, store).blobs == 302
    # Each blob is looked for once, sent once, and looked for when its image gets its name; nothing per family member
    # but that. The other requests are for references, the lease and the collector.
    assert count["send blobs"] == 302
    assert count["write refs"] == 100
    assert sum(count.values()) < 20 * 100, count
    count.clear()
    assert set(states(run(source, store)).values()) == {Done.PRESENT}
    assert not [each for each in count if each.startswith(("send", "head blobs"))]
    assert sum(count.values()) < 3 * 100, count


def test_a_hundred_copies_cost_the_difference_too(source: MemoryStore) -> None:
    destination = MemoryStore()
    asked = Moody(source)
    moved = [copy(name, asked, destination) for name in FAMILY]
    assert [each.blobs for each in moved] == [5] + 99 * [3]
    assert sum(each.bytes for each in moved) == sum(len(data) for data, _ in destination.content.values())
    assert asked.asked["open"] == 100 + 302  # each manifest to see what it names, and to be copied
    assert asked.asked["read"] == asked.asked["open"]
    assert asked.asked["resolve"] == 100


# What there is, and in which state


def test_a_plan_says_what_is_missing_and_changes_nothing(source: MemoryStore) -> None:
    destination = MemoryStore()
    base, own = _parts(FAMILY["team/repo000"])
    put(destination, base)
    publish(destination, "team/repo001", FAMILY["team/repo001"])
    publish(destination, "team/repo002", image(b"other"))
    before = dict(destination.content)
    plan = plan_sync(surveyed(source, "team/repo00[0-3]"), source, destination)
    assert {move.name: move.state for move in plan.images} == {
        "team/repo000": State.NEW,
        "team/repo001": State.PRESENT,
        "team/repo002": State.CONFLICT,
        "team/repo003": State.NEW,
    }
    new = plan.images[0]
    assert (new.blobs, new.bytes) == (3, len(own) + 74 + FAMILY["team/repo000"].target.size)
    assert plan.blobs == 6
    assert destination.content == before and destination.pinned() == frozenset()
    replacing = plan_sync(surveyed(source, "team/repo002"), source, destination, replace=True)
    assert [move.state for move in replacing.images] == [State.REPLACED]
    assert plan_sync(surveyed(source), source, MemoryStore()).bytes == sum(
        {digest: len(data) for each in FAMILY.values() for digest, data in each.blobs.items()}.values()
    )


def test_names_for_something_else_stay_unless_they_are_to_be_replaced(source: MemoryStore) -> None:
    destination = MemoryStore()
    other = image(b"other")
    publish(destination, "team/repo001", other)
    report = run(source, destination, "team/repo00[0-2]")
    assert states(report) == {
        "team/repo000": Done.COPIED,
        "team/repo001": Done.FAILED,
        "team/repo002": Done.COPIED,
    }
    assert isinstance(report.failure, ConflictError)
    assert destination.resolve("team/repo001") == other.target
    report = run(source, destination, "team/repo00[0-2]", replace=True)
    assert report.failure is None
    assert destination.resolve("team/repo001") == FAMILY["team/repo001"].target


def test_nothing_is_deleted_at_the_destination(source: MemoryStore) -> None:
    destination = MemoryStore()
    publish(destination, "mine", image(b"mine"))
    put(destination, b"not reached")
    before = set(destination.content)
    unpublish(source, "team/repo005")
    run(source, destination)
    assert before <= set(destination.content)
    assert destination.resolve("mine") == image(b"mine").target


def test_plans_come_along_and_stay_where_there_is_another(source: MemoryStore) -> None:
    layers = [layer_of(*_parts(FAMILY[f"team/repo00{number}"])).metadata for number in range(4)]
    for layer in layers:
        publish_plan(source, layer, b"plan of " + layer.hex.encode())
    names = [attachment_name(layer) for layer in layers]
    destination = MemoryStore()
    mine = publish_plan(destination, layers[1], b"mine")
    del source.content[source.resolve(names[2]).digest]
    report = run(source, destination, "team/repo00[0-3]", "team/repo005")
    assert {each.name: each.done for each in report.plans} == {
        names[0]: Done.COPIED,
        names[1]: Done.KEPT,
        names[2]: Done.FAILED,
        names[3]: Done.COPIED,
    }
    assert report.failure is None  # a plan that can't be read keeps no image
    assert destination.resolve(names[1]) == mine.target
    report = run(source, destination, "team/repo001", replace=True)
    assert destination.resolve(names[1]) == source.resolve(names[1])
    assert_sound(destination)


def test_documents_of_every_kind_are_counted_by_their_links() -> None:
    """An artifact of another tool, an index of images, and one blob in both."""
    source, destination = MemoryStore(), MemoryStore()
    artifact = document({"artifactType": "x/y", "layers": [], "blobs": []}, [])
    both = index(image(b"one", b"two"), image(b"two", b"three"))
    for name, sample in {"artifact": artifact, "index": both, "one": image(b"one", b"two")}.items():
        publish(source, name, sample)
    found = surveyed(source)
    assert {each.name: {blob.digest for blob in each.blobs} for each in found.images} == {
        "artifact": set(artifact.blobs),
        "index": set(both.blobs),
        "one": set(image(b"one", b"two").blobs),
    }
    report = run(source, destination)
    assert report.failure is None
    assert assert_sound(destination) == all_blobs(source)


def test_documents_are_written_after_what_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = MemoryStore(), MemoryStore()
    samples = [index(image(b"%d" % number, b"shared"), image(b"%d" % (number + 1), b"shared")) for number in range(20)]
    for number, sample in enumerate(samples):
        publish(source, f"i{number}", sample)
    order: list[Digest] = []
    real = MemoryUpload.commit

    def commit(self: MemoryUpload, digest: Digest, size: int) -> None:
        real(self, digest, size)
        order.append(digest)

    monkeypatch.setattr(MemoryUpload, "commit", commit)
    run(source, destination, jobs=8)
    assert len(order) == len(set(order)) == len(all_blobs(source))  # each once, whoever needs it
    for sample in samples:
        for digest, data in sample.blobs.items():
            for other in sample.blobs:
                if str(other).encode() in data:
                    assert order.index(other) < order.index(digest)


# Failures


@pytest.mark.case("C05")
@pytest.mark.parametrize("jobs", [1, 4])
def test_it_goes_on_after_an_image_that_fails(source: MemoryStore, jobs: int) -> None:
    _, own = _parts(FAMILY["team/repo003"])
    source.content[Digest.of(own)] = (b"damaged" + own[7:], 0)
    del source.content[FAMILY["team/repo005"].target.digest]
    destination = MemoryStore()
    report = run(source, destination, "team/repo00?", jobs=jobs)
    assert [name for name, done in states(report).items() if done is not Done.COPIED] == [
        "team/repo003",
        "team/repo005",
    ]
    assert isinstance(report.failure, CorruptError)
    assert Digest.of(own).hex in str(report.failure)
    assert "team/repo003" not in list(destination.names())
    assert_sound(destination)
    assert destination.pinned() == source.pinned() == frozenset()


def test_what_all_need_fails_all(source: MemoryStore) -> None:
    base, _ = _parts(FAMILY["team/repo000"])
    source.content[Digest.of(base)] = (b"x" * len(base), 0)
    destination = MemoryStore()
    report = run(source, destination)
    assert set(states(report).values()) == {Done.FAILED}
    assert report.stopped is None
    assert list(destination.names()) == []


def test_a_full_disk_ends_it_and_the_next_run_goes_on(source: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = MemoryStore()
    left = 40
    real = MemoryUpload.commit

    def commit(self: MemoryUpload, digest: Digest, size: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise NoSpaceError("disk full")
        real(self, digest, size)

    monkeypatch.setattr(MemoryUpload, "commit", commit)
    report = run(source, destination, jobs=2)
    assert isinstance(report.failure, NoSpaceError) and report.stopped is report.failure
    assert Done.FAILED in states(report).values()  # how many fail before the others are skipped is luck
    assert left > -10
    assert len(destination.content) == 40
    monkeypatch.undo()
    report = run(source, destination)
    assert report.failure is None
    assert report.blobs == 302 - 40
    assert_sound(destination)


def test_a_store_that_is_gone_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = MemoryStore(), MemoryStore()
    for number in range(100):
        publish(source, f"image{number}", image(b"%d" % number, config=b"{%d}" % number))
    tried = 0

    def refuse(self: MemoryUpload, digest: Digest, size: int) -> None:
        nonlocal tried
        tried += 1
        raise UnavailableError(f"no route {tried}")

    monkeypatch.setattr(MemoryUpload, "commit", refuse)
    report = run(source, destination, jobs=1)
    assert isinstance(report.stopped, UnavailableError)
    assert tried == UNAVAILABLE_AT_MOST
    assert Counter(states(report).values())[Done.SKIPPED] > 50


def test_one_image_that_is_refused_ends_nothing(source: MemoryStore) -> None:
    asked = Moody(source)
    victims = {sample.target.digest for name, sample in FAMILY.items() if name < "team/repo020"}
    real = asked.open

    def refuse(digest: Digest) -> object:
        if digest in victims:
            raise PermissionError_(f"403: {digest}")
        return real(digest)

    asked.open = refuse  # type: ignore[assignment]
    report = run(asked, MemoryStore())
    assert Counter(states(report).values()) == {Done.FAILED: 20, Done.COPIED: 80}
    assert isinstance(report.failure, PermissionError_)


def test_a_store_that_is_not_there_is_an_error_at_once(source: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerstore.store.retrying.FIRST_PAUSE", 0.0)
    asked = Moody(source)
    asked.fail(UnavailableError, "resolve")
    with pytest.raises(UnavailableError):
        run(asked, MemoryStore())
    destination = Moody(MemoryStore())
    destination.fail(PermissionError_, "resolve")
    with pytest.raises(PermissionError_):
        plan_sync(surveyed(source), source, destination)
    with pytest.raises(UsageError, match="jobs"):
        run(source, MemoryStore(), jobs=0)


def test_an_interrupt_ends_it_and_leaves_no_lease(source: MemoryStore) -> None:
    class Interrupting:
        def start(self, step: str, total: int | None) -> None: ...

        def advance(self, count: int) -> None:
            raise KeyboardInterrupt

    destination = MemoryStore()
    with pytest.raises(KeyboardInterrupt):
        run(source, destination, progress=Interrupting())
    assert destination.pinned() == source.pinned() == frozenset()
    assert_sound(destination)


def test_both_sides_are_leased_while_it_runs(source: MemoryStore) -> None:
    destination = MemoryStore()

    class Looking:
        looked = False

        def start(self, step: str, total: int | None) -> None:
            self.looked = True
            wanted = {digest for sample in FAMILY.values() for digest in sample.blobs}
            assert source.pinned() == destination.pinned() == wanted
            assert total == sum({d: len(b) for each in FAMILY.values() for d, b in each.blobs.items()}.values())

        def advance(self, count: int) -> None: ...

    looking = Looking()
    run(source, destination, progress=looking)
    assert looking.looked


# Slow and broken links


@pytest.mark.case("R02", "C11")
def test_a_large_blob_that_breaks_off_is_read_on_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerstore.store.retrying.FIRST_PAUSE", 0.01)
    large = bytes(range(256)) * (3 * PIECE // 256)
    with fsync_for_free():
        served = DirectoryStore.create(str(tmp_path / "served"))
        publish(served, "name", member(large, b"own" * 100))
        destination = DirectoryStore.create(str(tmp_path / "destination"))
        with StoreServer(served.root, listing=True) as server:
            store = HttpStore(server.url)
            path = Digest.of(large).hex
            server.misbehave(cut_short(PIECE // 2), path, times=1)
            server.misbehave(reset(PIECE // 2), path, times=1)
            server.misbehave(status(503), path, times=2)
            report = run(store, destination)
            assert report.failure is None
            assert_sound(destination)
            ranges = [each["range"] for each in server.headers(path)]
            firsts = [int(each.removeprefix("bytes=").partition("-")[0]) for each in ranges]
            assert firsts == sorted(firsts)  # never from the start again
            assert server.sent(path) < len(large) + 3 * PIECE
            store.close()


def test_a_blob_that_was_wrong_is_read_once_more(source: MemoryStore) -> None:
    """A proxy's page with status 200 comes once."""
    digest = Digest.of(_parts(FAMILY["team/repo000"])[1])
    asked = Moody(source)
    real = asked.open
    left = threading.Semaphore(1)

    def wrong(wanted: Digest) -> object:
        if wanted == digest and left.acquire(blocking=False):
            other = put(source, b"<" * 1000)
            return real(other)
        return real(wanted)

    asked.open = wrong  # type: ignore[assignment]
    destination = MemoryStore()
    assert run(asked, destination, "team/repo000").failure is None
    assert_sound(destination)


# Between stores of every kind


def test_from_a_bucket_to_a_bucket_by_way_of_a_directory(moto: S3Server, tmp_path: Path) -> None:
    some = dict(list(FAMILY.items())[:4])
    with fsync_for_free():
        first = open_write_store(moto.url(), create=True)
        for name, sample in some.items():
            publish(first, name, sample)
        layer = layer_of(*_parts(some["team/repo000"])).metadata
        publish_plan(first, layer)
        directory = open_write_store(str(tmp_path / "store"), create=True)
        assert run(first, directory, jobs=4).failure is None
        url = moto.url()
        second = open_write_store(url, create=True)
        report = run(directory, second, jobs=4)
    assert report.failure is None
    assert [each.done for each in report.plans] == [Done.COPIED]
    again = open_store(url)
    assert assert_sound(again) == assert_sound(first)
    assert set(states(run(first, second)).values()) == {Done.PRESENT}
