"""Garbage collection keeps what anybody may need, and stops when in doubt."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.buckets import BucketBench, MemoryBucket
from support.children import Child, die_at_call
from support.faults import fsync_for_free
from support.stores import (
    DAY,
    MANIFEST,
    Bench,
    DirectoryBench,
    MemoryBench,
    Sample,
    all_blobs,
    assert_sound,
    descriptor,
    document,
    image,
    index,
    packed,
    publish,
    put,
    put_missing,
    unpublish,
)

from layerstore.digest import Digest
from layerstore.errors import (
    ConflictError,
    CorruptError,
    ImgtoolError,
    MalformedError,
    UnavailableError,
    UnsupportedError,
    UsageError,
)
from layerstore.oci.descriptor import Descriptor
from layerstore.store.collect import GRACE_SECONDS, CollectionPlan, collect, plan_collection
from layerstore.store.directory import DirectoryStore
from layerstore.store.protocol import BlobInfo
from layerstore.store.reach import Documents


@pytest.fixture(autouse=True)
def impatience() -> Iterator[None]:
    with fsync_for_free():
        yield


@pytest.fixture(params=["directory", "memory", "bucket"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    if request.param == "bucket":
        return BucketBench(MemoryBucket())
    return MemoryBench() if request.param == "memory" else DirectoryBench(str(tmp_path / "store"))


@pytest.fixture
def directory(tmp_path: Path) -> DirectoryBench:
    return DirectoryBench(str(tmp_path / "store"))


def sweep(bench: Bench, *, grace: float = 0, hold: float = 5.0) -> set[Digest]:
    """Plan and collect; what was deleted."""
    return {blob.digest for blob in collect(bench.store, plan_collection(bench.store, grace=grace), hold=hold).deleted}


@pytest.mark.parametrize("hold", [0.0, 5.0])
def test_garbage_goes_and_all_else_stays(bench: Bench, hold: float) -> None:
    kept, dropped = image(b"shared", b"kept"), image(b"shared", b"dropped")
    publish(bench.store, "kept", kept)
    publish(bench.store, "dropped", dropped)
    put(bench.store, b"loose")
    unpublish(bench.store, "dropped")
    garbage = {Digest.of(b"loose"), Digest.of(b"dropped"), dropped.target.digest}
    assert sweep(bench, hold=hold) == garbage
    assert all_blobs(bench.store) == kept.blobs.keys()
    assert sweep(bench, hold=hold) == set()
    assert_sound(bench.store)


def test_a_plan_says_what_it_would_do_and_does_nothing(bench: Bench) -> None:
    kept = image(b"kept")
    publish(bench.store, "kept", kept)
    old = put(bench.store, b"old garbage")
    bench.clock.advance(2 * GRACE_SECONDS)
    young = put(bench.store, b"young")
    bench.stamp(young)
    plan = plan_collection(bench.store)
    assert [blob.digest for blob in plan.doomed] == [old]
    assert [blob.digest for blob in plan.young] == [young]
    assert plan.doomed_bytes == 11
    assert (plan.references, plan.kept, plan.kept_bytes) == (1, 3, sum(map(len, kept.blobs.values())))
    assert (plan.location, plan.grace, plan.force, plan.leftovers) == (bench.store.location, 3600, False, 0)
    assert hash(plan) == hash(plan)
    assert len(all_blobs(bench.store)) == 5
    done = collect(bench.store, plan)
    assert done.deleted == plan.doomed
    assert done.deleted_bytes == 11
    assert done.spared == ()
    assert all_blobs(bench.store) == {young, *kept.blobs}


@pytest.mark.case("M07")
def test_deleting_one_tag_keeps_what_others_reach(bench: Bench) -> None:
    """Shared layers, nested indexes, an artifact with another image's config, subjects."""
    one, two = image(b"shared", b"1", config=b'{"a":1}'), image(b"shared", b"2")
    nested = index(index(image(b"shared", b"3")), two)
    artifact = document(
        {"layers": [descriptor(b'{"a":1}').to_json()], "subject": two.target.to_json()}, [b'{"a":1}', two]
    )
    for name, sample in (("tag1", one), ("tag2", two), ("tag3", nested), ("tag4", artifact)):
        publish(bench.store, name, sample)
    unpublish(bench.store, "tag1")
    unpublish(bench.store, "tag2")
    assert sweep(bench) == {Digest.of(b"1"), one.target.digest}
    assert assert_sound(bench.store) == all_blobs(bench.store) == nested.blobs.keys() | artifact.blobs.keys()
    unpublish(bench.store, "tag3")
    sweep(bench)
    assert assert_sound(bench.store) == all_blobs(bench.store) == artifact.blobs.keys()


@pytest.mark.case("M07")
def test_raw_forms_stay_as_long_as_a_pack_that_names_them(bench: Bench) -> None:
    one, two = packed(b"raw", b"level 1"), index(packed(b"raw", b"level 2"))
    publish(bench.store, "one", one)
    publish(bench.store, "two", two)
    raw, other = put(bench.store, b"raw"), put(bench.store, b"raw form of nothing")
    assert sweep(bench) == {other}
    unpublish(bench.store, "one")
    assert sweep(bench) == one.blobs.keys()
    plan = plan_collection(bench.store, grace=0)
    unpublish(bench.store, "two")
    publish(bench.store, "other", image(b"other"))
    assert collect(bench.store, plan).deleted == ()
    assert sweep(bench) == two.blobs.keys() | {raw}


def test_marking_raw_forms_asks_for_none_of_them(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(bench.store, "one", packed(b"raw", b"packed"))
    documents = Documents(bench.store)
    plan = plan_collection(bench.store, grace=0, documents=documents)
    monkeypatch.setattr(bench.store, "stat", None)
    assert plan_collection(bench.store, grace=0, documents=documents) == plan


@pytest.mark.case("G05")
def test_leases_protect_old_blobs_that_are_used_again(bench: Bench) -> None:
    """The dedup hit on an old unreferenced blob, followed at once by a collection."""
    publish(bench.store, "other", image(b"other"))
    sample = image(b"layer")
    put_missing(bench.store, sample)
    bench.clock.advance(30 * DAY)
    with bench.store.lease() as lease:
        lease.pin(sample.blobs)
        assert all(bench.store.stat(digest) == len(data) for digest, data in sample.blobs.items())
        assert sweep(bench) == set()
        bench.store.set_reference("name", sample.target, expected=None, lease=lease, reaches=sample.blobs)
    assert sweep(bench) == set()
    assert sample.blobs.keys() <= assert_sound(bench.store)


@pytest.mark.case("G05")
def test_a_pin_or_reference_after_the_plan_counts(bench: Bench) -> None:
    publish(bench.store, "other", image(b"other"))
    pinned, referenced = put(bench.store, b"pinned"), image(b"referenced")
    put_missing(bench.store, referenced)
    garbage = put(bench.store, b"garbage")
    plan = plan_collection(bench.store, grace=0)
    assert len(plan.doomed) == 5 - len(image(b"other").blobs.keys() & referenced.blobs.keys())
    with bench.store.lease() as lease:
        lease.pin([pinned])
        publish(bench.store, "name", referenced)
        done = collect(bench.store, plan)
    assert {blob.digest for blob in done.deleted} == {garbage}
    assert pinned in {blob.digest for blob in done.spared}
    assert_sound(bench.store)


@pytest.mark.case("G05")
def test_a_blob_written_again_after_the_plan_is_young(bench: Bench) -> None:
    publish(bench.store, "other", image(b"other"))
    digest = put(bench.store, b"garbage, or is it")
    bench.clock.advance(2 * DAY)
    plan = plan_collection(bench.store, grace=DAY)
    bench.stamp(put(bench.store, b"garbage, or is it"))
    assert [blob.digest for blob in collect(bench.store, plan).spared] == [digest]
    assert digest in all_blobs(bench.store)


@pytest.mark.case("G05")
def test_a_blob_restored_with_an_old_mtime_is_young(directory: DirectoryBench) -> None:
    publish(directory.store, "other", image(b"other"))
    digest = put(directory.store, b"restored by rsync -a")
    os.utime(directory.path("blobs", "sha256", digest.hex), (0, 0))
    assert sweep(directory, grace=GRACE_SECONDS) == set()
    directory.clock.advance(2 * GRACE_SECONDS)
    assert sweep(directory, grace=GRACE_SECONDS) == {digest}


# In doubt, nothing is deleted


Fault = Callable[[DirectoryBench, Sample], object]


def reference_unreadable(bench: DirectoryBench, sample: Sample) -> None:
    Path(bench.path("refs", "name")).write_bytes(b"")


def reference_later(bench: DirectoryBench, sample: Sample) -> None:
    path = Path(bench.path("refs", "name"))
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2'))


def reference_strange(bench: DirectoryBench, sample: Sample) -> None:
    Path(bench.path("refs", "name.bak~")).touch()


def references_missing(bench: DirectoryBench, sample: Sample) -> None:
    os.rename(bench.path("refs"), bench.path("old-refs"))


def references_empty(bench: DirectoryBench, sample: Sample) -> None:
    references_missing(bench, sample)
    os.mkdir(bench.path("refs"))


def leases_missing(bench: DirectoryBench, sample: Sample) -> None:
    os.rmdir(bench.path("leases"))


def lease_unreadable(bench: DirectoryBench, sample: Sample) -> None:
    Path(bench.path("leases", "0" * 32)).write_bytes(b"{}")


def manifest_missing(bench: DirectoryBench, sample: Sample) -> None:
    os.unlink(bench.path("blobs", "sha256", sample.target.digest.hex))


def manifest_damaged(bench: DirectoryBench, sample: Sample) -> None:
    data = sample.blobs[sample.target.digest]
    bench.damage(sample.target.digest, data.replace(b'"layers"', b'"lavers"'))


def manifest_truncated(bench: DirectoryBench, sample: Sample) -> None:
    bench.damage(sample.target.digest, sample.blobs[sample.target.digest][:-10])


def manifest_is_a_directory(bench: DirectoryBench, sample: Sample) -> None:
    manifest_missing(bench, sample)
    os.mkdir(bench.path("blobs", "sha256", sample.target.digest.hex))


FAULTS = [
    pytest.param(reference_unreadable, CorruptError, id="reference unreadable"),
    pytest.param(reference_later, UnsupportedError, id="reference of a later version"),
    pytest.param(reference_strange, CorruptError, id="stray file"),
    pytest.param(references_missing, CorruptError, id="no refs"),
    pytest.param(references_empty, ConflictError, id="empty refs"),
    pytest.param(leases_missing, ImgtoolError, id="no leases"),
    pytest.param(lease_unreadable, CorruptError, id="lease unreadable"),
    pytest.param(manifest_missing, CorruptError, id="manifest missing"),
    pytest.param(manifest_damaged, CorruptError, id="manifest damaged"),
    pytest.param(manifest_truncated, CorruptError, id="manifest truncated"),
    pytest.param(manifest_is_a_directory, UnavailableError, id="manifest is a directory"),
]


@pytest.mark.case("G04", "G06")
@pytest.mark.parametrize(("fault", "error"), FAULTS)
@pytest.mark.parametrize("after_plan", [False, True])
def test_any_error_while_marking_deletes_nothing(
    directory: DirectoryBench, fault: Fault, error: type[ImgtoolError], after_plan: bool
) -> None:
    store = directory.store
    sample = image(b"layer")
    publish(store, "another", image(b"another"))
    publish(store, "name", sample)
    put(store, b"garbage")
    plan = plan_collection(store, grace=0)
    unpublish(store, "another")
    fault(directory, sample)
    before = sorted(os.listdir(directory.path("blobs", "sha256")))
    with pytest.raises(error):
        collect(store, plan) if after_plan else plan_collection(store, grace=0)
    assert sorted(os.listdir(directory.path("blobs", "sha256"))) == before


@pytest.mark.case("G04")
def test_a_passing_error_while_marking_under_the_lock_deletes_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(bench.store, "name", image(b"layer"))
    put(bench.store, b"garbage")
    documents = Documents(bench.store)
    plan = plan_collection(bench.store, grace=0, documents=documents)
    before = all_blobs(bench.store)
    real = bench.store.references

    def listing_that_breaks_off() -> Iterator[object]:
        yield next(iter(real()))
        raise UnavailableError("503")

    with monkeypatch.context() as patch:
        patch.setattr(bench.store, "references", listing_that_breaks_off)
        with pytest.raises(UnavailableError, match="503"):
            collect(bench.store, plan, documents=documents)
    assert all_blobs(bench.store) == before
    assert {blob.digest for blob in collect(bench.store, plan, documents=documents).deleted} == {Digest.of(b"garbage")}


@pytest.mark.parametrize("replaced", [False, True])
def test_a_reference_deleted_and_swept_while_marking_is_no_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    """By another collector; the one that replaces it counts."""
    publish(bench.store, "other", image(b"other"))
    publish(bench.store, "name", image(b"before"))
    stale = list(bench.store.references())
    unpublish(bench.store, "name")
    sweep(bench)
    if replaced:
        publish(bench.store, "name", image(b"after"))
    garbage = put(bench.store, b"garbage")
    monkeypatch.setattr(bench.store, "references", lambda: iter(stale))
    assert [blob.digest for blob in plan_collection(bench.store, grace=0).doomed] == [garbage]


@pytest.mark.case("G04")
def test_a_document_of_unknown_content_stops_marking(bench: Bench) -> None:
    data = b'{"layers":[{"mediaType":"x","digest":"blake3:00","size":1}]}'
    sample = Sample(descriptor(data, MANIFEST), {Digest.of(data): data})
    publish(bench.store, "name", sample)
    with pytest.raises(UnsupportedError, match="blake3"):
        plan_collection(bench.store, grace=0)
    text = Sample(descriptor(b"not JSON", MANIFEST), {Digest.of(b"not JSON"): b"not JSON"})
    publish(bench.store, "name", text)
    with pytest.raises(MalformedError, match=text.target.digest.hex):
        plan_collection(bench.store, grace=0)


@pytest.mark.case("G06")
def test_a_store_without_references_is_refused_unless_forced(bench: Bench) -> None:
    assert plan_collection(bench.store, grace=0).doomed == ()
    digest = put(bench.store, b"blob")
    with pytest.raises(ConflictError, match="no references"):
        plan_collection(bench.store, grace=0)
    plan = plan_collection(bench.store, grace=0, force=True)
    assert [blob.digest for blob in plan.doomed] == [digest]
    assert [blob.digest for blob in collect(bench.store, plan).deleted] == [digest]


@pytest.mark.case("G06")
def test_references_that_vanish_after_the_plan_stop_it(bench: Bench) -> None:
    publish(bench.store, "name", image(b"layer"))
    put(bench.store, b"garbage")
    plan = plan_collection(bench.store, grace=0)
    unpublish(bench.store, "name")
    with pytest.raises(ConflictError, match="no references"):
        collect(bench.store, plan)
    assert len(all_blobs(bench.store)) == 4


@pytest.mark.case("G06")
def test_forcing_spares_what_is_leased(bench: Bench) -> None:
    digest = put(bench.store, b"blob")
    put(bench.store, b"garbage")
    with bench.store.lease() as lease:
        lease.pin([digest])
        collect(bench.store, plan_collection(bench.store, grace=0, force=True))
    assert all_blobs(bench.store) == {digest}


def test_a_plan_is_for_its_own_store_and_grace_is_not_negative(bench: Bench, tmp_path: Path) -> None:
    publish(bench.store, "name", image(b"layer"))
    plan = plan_collection(bench.store)
    with pytest.raises(UsageError, match="not for"):
        collect(DirectoryBench(str(tmp_path / "other")).store, plan)
    with pytest.raises(UsageError, match="grace"):
        plan_collection(bench.store, grace=-1)


def test_a_plan_made_by_hand_deletes_nothing_that_is_reachable(bench: Bench) -> None:
    sample = image(b"layer")
    publish(bench.store, "name", sample)
    doomed = tuple(BlobInfo(digest, 1, 1e9) for digest in (*sample.blobs, Digest.of(b"never there")))
    plan = CollectionPlan(bench.store.location, 0, True, 0, 0, 0, (), doomed, 0)
    assert collect(bench.store, plan).spared == doomed
    assert assert_sound(bench.store) == sample.blobs.keys()


def test_leftovers_are_planned_and_reclaimed(directory: DirectoryBench) -> None:
    publish(directory.store, "name", image(b"layer"))
    Path(directory.path("blobs", "sha256", ".tmp-1-x")).write_bytes(b"x" * 4096)
    Path(directory.path("tmp", ".tmp-1-x")).mkdir()
    directory.clock.advance(DAY)
    plan = plan_collection(directory.store)
    assert plan.leftovers == 4096
    assert collect(directory.store, plan).leftovers == 4096
    assert directory.leftovers() == []


# Collections beside publishers that are stopped, killed, or full


@pytest.mark.case("G01")
def test_a_publisher_stopped_before_its_reference_loses_nothing(directory: DirectoryBench) -> None:
    store = directory.store
    publish(store, "other", image(b"other"))
    sample = image(b"layer")

    def work(child: Child) -> None:
        with store.lease() as lease:
            lease.pin(sample.blobs)
            put_missing(store, sample)
            child.tell()
            child.hear()
            store.set_reference("name", sample.target, expected=None, lease=lease, reaches=sample.blobs)

    with Child(work) as publisher:
        publisher.hear()
        publisher.stop()
        assert sweep(directory) == set()
        publisher.go_on()
        publisher.tell()
        assert publisher.wait() == 0
    assert sample.blobs.keys() <= assert_sound(store)


@pytest.mark.case("G01")
@pytest.mark.parametrize("reclaimed", [False, True])
def test_a_publisher_stopped_past_its_lease_fails_loudly(directory: DirectoryBench, reclaimed: bool) -> None:
    store = directory.store
    publish(store, "other", image(b"other"))
    sample = image(b"layer")
    offset = Path(store.root + ".offset")
    offset.write_text("0")

    def work(child: Child) -> None:
        own = DirectoryStore(store.root, clock=lambda: directory.clock() + int(offset.read_text()))
        with own.lease(seconds=DAY) as lease:
            lease.pin(sample.blobs)
            put_missing(own, sample)
            child.tell()
            child.hear()
            with pytest.raises(ConflictError, match="expired"):
                own.set_reference("name", sample.target, expected=None, lease=lease, reaches=sample.blobs)

    with Child(work) as publisher:
        publisher.hear()
        publisher.stop()
        directory.clock.advance(2 * DAY)
        offset.write_text(str(2 * DAY * 10**9))
        assert sweep(directory) == sample.blobs.keys() - image(b"other").blobs.keys()
        if reclaimed:
            store.reclaim(older_than=0)
        publisher.go_on()
        publisher.tell()
        assert publisher.wait() == 0
    assert list(store.names()) == ["other"]
    assert_sound(store)


@pytest.mark.case("G07")
def test_a_collection_killed_anywhere_is_finished_by_the_next(tmp_path: Path) -> None:
    ended = 0
    for calls in range(1, 401, 20):
        bench = DirectoryBench(str(tmp_path / str(calls)))
        kept = image(b"kept", b"shared")
        publish(bench.store, "kept", kept)
        for number in range(10):
            put(bench.store, b"garbage %d" % number)
        Path(bench.path("refs", ".tmp-1-x")).touch()

        def work(child: Child, bench: DirectoryBench = bench, calls: int = calls) -> None:
            die_at_call(calls)
            sweep(bench, hold=0)

        with Child(work) as collector:
            ended += collector.wait() == 0
        assert assert_sound(bench.store) == kept.blobs.keys()
        sweep(bench)
        assert all_blobs(bench.store) == kept.blobs.keys()
        assert bench.leftovers() == []
    assert 0 < ended < 15  # the last calls are past the end, the first ones are not


def test_a_target_that_is_no_document_keeps_itself(bench: Bench) -> None:
    target = Descriptor("application/octet-stream", Digest.of(b"plain"), 5)
    publish(bench.store, "name", Sample(target, {target.digest: b"plain"}))
    assert sweep(bench) == set()
