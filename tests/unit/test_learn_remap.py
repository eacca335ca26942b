"""Traces and plans of one build in another: the same bytes by pack, the same files by path, the rest counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support.conversions import Site, noise
from support.tars import directory, file, symlink
from support.traces import digest, trace

from layerstore.errors import printable
from layerstore.image import Role
from prefetch.learn.remap import MatchReport, remap_plan, remap_trace
from prefetch.learn.sizes import GUESSED, open_sizes
from prefetch.learn.train import train
from prefetch.plans.format import CERTAIN, Plan, PlannedRange, PlanPart
from prefetch.trace.format import Access, Trace
from prefetch.trace.places import ImagePlaces, Place, open_places

KIB = 1024
SAME = 2048 * KIB
"""So large that the new build refers to the pack of the old one for it."""
OLD = {
    "bin/same": noise(SAME, 1),
    "bin/changed": noise(96 * KIB, 2),
    "bin/shorter": noise(64 * KIB, 3),
    "bin/gone": noise(32 * KIB, 4),
    "bin/odd\n": noise(32 * KIB, 5),
}
NEW = {
    "bin/new": noise(128 * KIB, 9),
    "bin/same": OLD["bin/same"],
    "bin/changed": noise(96 * KIB, 12),
    "bin/shorter": noise(24 * KIB, 13),
    "bin/odd\n": noise(32 * KIB, 15),
}


class Builds:
    """The old build, the new one over the same store, and a rebuild of the old one that shares no pack with it."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.site = Site(path / "one")
        self.old = self._places(self.site, OLD, stack)
        self.new = self._places(self.site, NEW, stack)
        apart = Site(path / "two")
        self.apart = self._places(apart, {**NEW, **OLD}, stack)

    @staticmethod
    def _places(site: Site, files: dict[str, bytes], stack: ExitStack) -> ImagePlaces:
        parts = [directory("bin/"), *(file(name, body) for name, body in files.items())]
        report = site.convert(site.tar(*parts, symlink("sbin", "bin")), tag="it")
        return stack.enter_context(open_places(site.store, report.image))


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builds]:
    with ExitStack() as stack:
        yield Builds(tmp_path_factory.mktemp("builds"), stack)


def read(places: ImagePlaces, name: str, offset: int = 0, length: int | None = None) -> list[Access]:
    """What a run that reads part of a file leaves."""
    return [_access(place, 1000 * number) for number, place in enumerate(found(places, name, offset, length))]


def found(places: ImagePlaces, name: str, offset: int = 0, length: int | None = None) -> list[Place]:
    where = places.find(name.encode())
    assert where is not None
    return places.ranges(where, offset, length)


def _access(place: Place, at: int) -> Access:
    where = place.range
    path = printable(place.path)
    return Access(at, where.layer, where.device, where.offset, where.length, 5, 2, "sh", path, place.file_offset)


def of(places: ImagePlaces, *accesses: Access) -> Trace:
    return trace(accesses, layers=places.layers)


def test_bytes_that_are_still_there_are_found_by_pack(builds: Builds) -> None:
    accesses = read(builds.old, "bin/same")
    moved, report = remap_trace(of(builds.old, *accesses), builds.new)
    assert report == MatchReport(1, SAME, by_pack=SAME)
    assert report.rate == 1.0
    (new,) = moved.accesses
    assert moved.header.layers == builds.new.layers
    assert moved.header.layers[0].packs[new.device - 1] == builds.old.layers[0].packs[0]
    assert (new.offset, new.length, new.path, new.comm, new.times) == (
        accesses[0].offset,
        SAME,
        "bin/same",
        "sh",
        2,
    )


def test_files_that_changed_are_found_by_path(builds: Builds) -> None:
    accesses = read(builds.old, "bin/changed", 32 * KIB, 16 * KIB)
    moved, report = remap_trace(of(builds.old, *accesses), builds.new)
    assert report == MatchReport(1, 16 * KIB, by_path=16 * KIB)
    (new,) = moved.accesses
    (place,) = found(builds.new, "bin/changed", 32 * KIB, 16 * KIB)
    assert (new.device, new.offset, new.length, new.file_offset) == (
        place.range.device,
        place.range.offset,
        16 * KIB,
        32 * KIB,
    )


def test_what_lies_behind_the_end_is_lost(builds: Builds) -> None:
    _, report = remap_trace(of(builds.old, *read(builds.old, "bin/shorter")), builds.new)
    assert report == MatchReport(1, 64 * KIB, by_path=24 * KIB, lost=40 * KIB)
    moved, report = remap_trace(of(builds.old, *read(builds.old, "bin/shorter", 32 * KIB)), builds.new)
    assert (moved.accesses, report.rate, report.unknown) == ((), 0.0, ())


def test_files_that_are_gone_are_named(builds: Builds) -> None:
    moved, report = remap_trace(of(builds.old, *read(builds.old, "bin/gone")), builds.new)
    assert report == MatchReport(1, 32 * KIB, lost=32 * KIB, unknown=("bin/gone",))
    assert not moved.accesses


def test_names_are_bytes_again(builds: Builds) -> None:
    accesses = read(builds.old, "bin/odd\n")
    assert accesses[0].path == "bin/odd\\x0a"
    moved, report = remap_trace(of(builds.old, *accesses), builds.new)
    assert (report.by_path, moved.accesses[0].path) == (32 * KIB, "bin/odd\\x0a")


def test_paths_through_links_are_followed(builds: Builds) -> None:
    accesses = [each._replace(path="sbin/changed") for each in read(builds.old, "bin/changed")]
    moved, report = remap_trace(of(builds.old, *accesses), builds.new)
    assert (report.rate, moved.accesses[0].path) == (1.0, "bin/changed")


def test_a_range_of_several_files_is_taken_apart(builds: Builds) -> None:
    first, last = (read(builds.old, name)[0] for name in ("bin/changed", "bin/same"))
    low, high = min(first.offset, last.offset), max(first.end, last.end)
    whole = first._replace(offset=low, length=high - low, path=None, file_offset=0)
    moved, report = remap_trace(of(builds.old, whole), builds.new)
    assert [each.path for each in moved.accesses] == ["bin/same"]
    assert (report.by_pack, report.lost) == (SAME, high - low - SAME)
    assert sum(each.waited for each in moved.accesses) == whole.waited, "one wait stays one"


def test_the_same_build_changes_nothing(builds: Builds) -> None:
    before = of(builds.old, *read(builds.old, "bin/gone"), *read(builds.old, "bin/same"))
    after, report = remap_trace(before, builds.old)
    assert after.accesses == before.accesses
    assert (report.rate, report.by_path) == (1.0, 0)


def test_a_rebuild_without_a_common_pack_is_found_by_path(builds: Builds) -> None:
    accesses = [each for name in OLD for each in read(builds.old, name)]
    moved, report = remap_trace(of(builds.old, *accesses), builds.apart)
    assert (report.rate, report.by_pack) == (1.0, 0)
    assert sum(each.length for each in moved.accesses) == sum(map(len, OLD.values()))


def test_times_and_waits_stay(builds: Builds) -> None:
    before = replace(of(builds.old, *read(builds.old, "bin/same")), ended=77)
    after, _ = remap_trace(before, builds.new)
    assert (after.waits, after.ended, after.accesses[0].at) == (before.waits, 77, before.accesses[0].at)
    assert after.header.manifest is None


def plan_of(builds: Builds, *names: str) -> Plan:
    traces = []
    for number in range(3):
        accesses = [each for name in names for each in read(builds.old, name)]
        made = of(builds.old, *accesses)
        traces.append(replace(made, header=replace(made.header, started=str(number))))
    return train("p", traces)


def test_a_plan_serves_the_next_build(builds: Builds) -> None:
    plan = plan_of(builds, *OLD)
    moved, report = remap_plan(plan, None, builds.new)
    assert (report.by_pack, report.by_path) == (SAME, (96 + 24 + 32) * KIB)
    assert report.lost == (32 + 40) * KIB
    assert moved.parts[0].metadata == builds.new.layers[0].metadata
    assert sum(part.bytes for part in moved.parts) == report.by_pack + report.by_path
    assert {each.chance for each in moved.parts[0].ranges} == {CERTAIN}
    assert dict(moved.score) == {}, "nothing was measured on that build"
    assert moved.learned["remapped"] == report.to_json()
    assert moved.learned["learner"] == plan.learned["learner"]


def test_ranges_without_a_path_get_one_from_the_old_build(builds: Builds) -> None:
    plan = plan_of(builds, "bin/changed")
    ranges = tuple(each._replace(path=None, file_offset=0) for each in plan.parts[0].ranges)
    nameless = replace(plan, parts=(replace(plan.parts[0], ranges=ranges),))
    assert remap_plan(nameless, None, builds.new)[1].rate == 0.0
    moved, report = remap_plan(nameless, builds.old, builds.new)
    assert report.rate == 1.0
    assert {each.path for each in moved.parts[0].ranges} == {"bin/changed"}


def test_ranges_that_come_to_lie_on_each_other_are_one(builds: Builds) -> None:
    (place,) = found(builds.old, "bin/changed")
    start = place.range.offset
    ranges = (
        PlannedRange(1, start, 32 * KIB, 900, 50, "bin/changed", 0),
        PlannedRange(1, start + (64 << 10), 16 * KIB, 100, 70, "bin/changed", 16 * KIB),
    )
    layer = builds.old.layers[0]
    moved, _ = remap_plan(Plan((PlanPart(layer.metadata, layer.packs, ranges),)), None, builds.new)
    assert [(each.file_offset, each.length, each.due, each.chance) for each in moved.parts[0].ranges] == [
        (16 * KIB, 16 * KIB, 100, 70),
        (0, 16 * KIB, 900, 50),
    ]


def test_a_layer_that_lists_other_packs_is_not_believed(builds: Builds) -> None:
    layer = builds.old.layers[0]
    ranges = (PlannedRange(2, 0, 4096, 0),)
    hostile = Plan((PlanPart(layer.metadata, (digest("a"), digest("b")), ranges),))
    moved, report = remap_plan(hostile, builds.old, builds.old)
    assert (moved.parts, report.lost) == ((), 4096)


@pytest.mark.parametrize("path", ["bin/\\q", "..", "", "bin", "bin/same/x", "\ud800", "a" * 5000, "bin/\\x00"])
def test_paths_that_no_file_has_are_lost(builds: Builds, path: str) -> None:
    accesses = [each._replace(path=path) for each in read(builds.old, "bin/gone")]
    moved, report = remap_trace(of(builds.old, *accesses), builds.new)
    assert (moved.accesses, report.lost) == ((), 32 * KIB)


def test_sizes_come_from_the_indexes_of_packs(tmp_path: Path) -> None:
    site = Site(tmp_path)
    report = site.convert(site.tar(file("a", noise(600 * KIB, 1)), file("b", bytes(100) * 4000)), Role.BASE)
    sizes = open_sizes(site.store, report.image)
    (pack,) = report.image.layers[0].packs
    count = sizes.count(pack.digest)
    assert count == -(-pack.raw_size // (256 * KIB))
    assert sum(sizes.compressed(pack.digest, number) for number in range(count)) <= pack.blob_size
    assert sizes.compressed(pack.digest, 0) > 200 * KIB > GUESSED.compressed(pack.digest, 0)
    assert sizes.bounds(pack.digest, count - 1) == ((count - 1) * 256 * KIB, pack.raw_size)
    assert sizes.frames(pack.digest, 0, 1 << 40) == range(count)
    assert len(sizes.frames(pack.digest, 1 << 40, 4096)) == 0
    assert GUESSED.count(pack.digest) is None
