"""Plans on a node: found by name and by layer, in memory, and never in the way of a start."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faults import fsync_for_free
from support.plans import layer_digest, pack_digest, part, plan

from layerstore.digest import Digest
from layerstore.errors import LimitError, MalformedError, NoSpaceError, NotFoundError, UsageError
from prefetch.plans import shelf as shelf_module
from prefetch.plans.format import PLAN_BYTES, Plan, PlannedRange, PlanPart
from prefetch.plans.shelf import CHECK_SECONDS, KEPT_SECONDS, NONE_SECONDS, Shelf, read_plan

L1, L2, L3 = (layer_digest(number) for number in (1, 2, 3))


class Times:
    """Clocks that tests move."""

    def __init__(self) -> None:
        self.later = 0.0

    def now(self) -> float:
        return time.time() + self.later

    def monotonic(self) -> float:
        return self.later


@pytest.fixture(autouse=True)
def impatience() -> Iterator[None]:
    with fsync_for_free():
        yield


@pytest.fixture
def times() -> Times:
    return Times()


@pytest.fixture
def shelf(tmp_path: Path, times: Times) -> Shelf:
    return Shelf(str(tmp_path / "root"), now=times.now, monotonic=times.monotonic)


def files(shelf: Shelf) -> list[str]:
    """All below the directory of plans, by relative names."""
    top = Path(shelf.path("x")).parent
    return sorted(str(path.relative_to(top)) for path in top.rglob("*") if path.is_file())


def names(plans: list[Plan]) -> list[str]:
    return [each.name for each in plans]


# -- by name ----------------------------------------------------------------------------------------------------------


def test_a_plan_is_saved_loaded_replaced_and_removed(shelf: Shelf, tmp_path: Path) -> None:
    assert shelf.names() == [] and shelf.problems() == []
    first, second = plan(part(1), name="a:b.c-1"), plan(part(1), part(2), name="a:b.c-1")
    path = shelf.save(first)
    assert path == str(tmp_path / "root/plans/a:b.c-1.json")
    assert (shelf.names(), shelf.load("a:b.c-1")) == (["a:b.c-1"], first)
    assert read_plan(path) == first and Path(path).read_bytes() == first.to_bytes()
    shelf.save(second)
    assert shelf.load("a:b.c-1") == second
    assert files(shelf) == ["a:b.c-1.json"], "nothing else is left"
    shelf.remove("a:b.c-1")
    assert shelf.names() == [] and files(shelf) == []
    for missing in (shelf.load, shelf.remove):
        with pytest.raises(NotFoundError, match=r"no plan 'a:b\.c-1' in .*plan ls"):
            missing("a:b.c-1")


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "..", "a b", "\n", "x" * 251, "sha256:abc", "auto", "none"])
def test_names_that_no_plan_may_have(shelf: Shelf, name: str) -> None:
    for use in (shelf.load, shelf.remove, shelf.path, lambda name: shelf.save(plan(part(1), name=name))):
        with pytest.raises(UsageError) as caught:
            use(name)
        assert str(caught.value).isprintable()
    assert not os.path.exists(os.path.dirname(shelf.path("x")))


def test_the_longest_name_fits(shelf: Shelf) -> None:
    shelf.save(plan(part(1), name="x" * 250))
    assert shelf.load("x" * 250).parts == (part(1),)


def test_what_no_reader_would_take_is_not_saved(shelf: Shelf) -> None:
    with pytest.raises(MalformedError, match="two of its parts"):
        shelf.save(plan(part(1), part(1)))
    huge = PlannedRange(1, 0, 4096, 0, 1, "p" * PLAN_BYTES)
    with pytest.raises(LimitError):
        shelf.save(plan(PlanPart(L1, part(1).packs, (huge,))))
    assert shelf.names() == []


# -- by layer ---------------------------------------------------------------------------------------------------------


def test_the_plan_for_more_of_the_layers_comes_first(shelf: Shelf) -> None:
    shelf.save(plan(part(1), name="base", gap=0.99))
    shelf.save(plan(part(1), part(2), name="both", gap=0.5))
    assert names(shelf.find([L1, L2])) == ["both"]
    assert names(shelf.find([L1, L3])) == ["base"], "of the base alone the better score counts"
    assert names(shelf.find([L2])) == ["both"]
    assert shelf.find([L3]) == [] and shelf.find([]) == []


@pytest.mark.parametrize(
    ("gaps", "best"),
    [
        ({"a": 0.5, "b": 0.9}, "b"),
        ({"a": 0.9, "b": 0.5}, "a"),
        ({"a": 0.9, "b": 0.9}, "a"),
        ({"a": None, "b": -1}, "b"),
        ({"a": "high", "b": 0.1}, "b"),
        ({"a": True, "b": 0.1}, "b"),
        ({"b": None, "a": None}, "a"),
    ],
)
def test_then_the_one_that_closes_more_of_the_gap_then_the_name(
    shelf: Shelf, gaps: dict[str, object], best: str
) -> None:
    for name, gap in gaps.items():
        shelf.save(plan(part(1), name=name, gap=gap))
    assert names(shelf.find([L1])) == [best]


def test_each_layer_is_planned_by_one_plan_alone(shelf: Shelf) -> None:
    """What several plans for different runs want, together, is what none of these runs wants."""
    shelf.save(plan(part(1, 2), name="numpy", gap=0.9))
    shelf.save(plan(part(1, 5), part(2), name="pytest", gap=0.8))
    shelf.save(plan(part(1, 7), part(3), name="gcc", gap=0.7))
    found = shelf.find([L1, L2, L3])
    assert [(each.name, [one.metadata for one in each.parts]) for each in found] == [
        ("pytest", [L1, L2]),
        ("gcc", [L3]),
    ]
    assert found[0].parts[0].ranges == part(1, 5).ranges and found[0].score == {"gap_closed": 0.8}


def test_a_layer_without_a_plan_may_be_another_build_of_one_that_has(shelf: Shelf) -> None:
    base, old, new, other = (pack_digest(number) for number in (1, 20, 21, 30))
    shelf.save(plan(part(1), name="base"))
    shelf.save(plan(part(2, 4, (old, base)), part(1), name="old"))
    shelf.save(plan(PlanPart(L3, (base, other), part(1, 6).ranges), name="stranger", gap=1.0))  # of files that base has
    packs = [base, new, old]
    assert shelf.find([L1, layer_digest(9)]) == shelf.find([L1])
    found = shelf.find([L1, layer_digest(9)], packs)
    assert [(each.name, [one.metadata for one in each.parts]) for each in found] == [("base", [L1]), ("old", [L2])]
    assert names(shelf.find([L1, L2], packs)) == ["old"], "it has a plan of its own"
    assert names(shelf.find([L1, layer_digest(9)], [base, new])) == ["base"], "they share nothing of what is planned"


def test_parts_for_other_layers_and_parts_without_ranges_count_for_nothing(shelf: Shelf) -> None:
    shelf.save(plan(part(1, 0), part(2), name="empty", gap=1))
    shelf.save(plan(part(1), name="full"))
    assert names(shelf.find([L1])) == ["full"]
    assert [each.metadata for each in shelf.find([L2])[0].parts] == [L2]


def test_a_saved_plan_is_seen_at_once_by_others_too(shelf: Shelf, tmp_path: Path, times: Times) -> None:
    other = Shelf(str(tmp_path / "root"), now=times.now, monotonic=times.monotonic)
    assert other.find([L1]) == []
    shelf.save(plan(part(1), name="a"))
    assert names(other.find([L1])) == ["a"]
    other.remove("a")
    assert shelf.find([L1]) == []


def test_a_file_that_is_written_in_place_is_seen_soon(shelf: Shelf, times: Times) -> None:
    """The directory's time doesn't change, so it is looked through again after a while."""
    path = Path(shelf.save(plan(part(1), name="a")))
    assert names(shelf.find([L1])) == ["a"]
    path.write_bytes(plan(part(2, 8), name="a").to_bytes())
    times.later += CHECK_SECONDS
    assert shelf.find([L1]) == []
    assert names(shelf.find([L2])) == ["a"]


def test_nothing_is_read_where_nothing_has_changed(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.save(plan(part(1), name="a"))
    shelf.keep(L2, plan(part(2), name="b"))
    assert names(shelf.find([L1, L2])) == ["a", "b"]

    def forbidden(*arguments: object) -> None:
        raise AssertionError("the disk was read")

    monkeypatch.setattr(shelf_module, "read_plan", forbidden)
    monkeypatch.setattr(os, "scandir", forbidden)
    assert names(shelf.find([L1, L2])) == ["a", "b"]


def test_only_what_has_changed_is_read_again(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        shelf.save(plan(part(number), name=f"p{number}"))
    assert shelf.names() == ["p0", "p1", "p2"]
    read: list[str] = []

    def noted(path: str) -> Plan:
        read.append(os.path.basename(path))
        return read_plan(path)

    monkeypatch.setattr(shelf_module, "read_plan", noted)
    shelf.save(plan(part(1, 9), name="p1"))
    assert shelf.find([L1])[0].parts[0].ranges == part(1, 9).ranges
    assert read == ["p1.json"]


def test_memory_is_bounded_and_what_left_it_is_read_again(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf_module, "RANGES_IN_MEMORY", 10)
    for number in range(4):
        shelf.save(plan(part(number, 5), name=f"p{number}"))
    for number in (0, 1, 2, 3, 0):
        assert names(shelf.find([layer_digest(number)])) == [f"p{number}"]
    assert len(shelf._plans) == 2
    shelf.save(plan(part(4, 50), name="large"))
    assert names(shelf.find([layer_digest(4)])) == ["large"], "one is always in memory, however large"
    assert len(shelf._plans) == 1


# -- damage -----------------------------------------------------------------------------------------------------------


def test_damaged_files_are_skipped_and_reported(shelf: Shelf) -> None:
    good = Path(shelf.save(plan(part(1), name="good")))
    shelf.keep(L2, plan(part(2), name="kept"))
    directory = good.parent
    (directory / "torn.json").write_bytes(good.read_bytes()[:100])
    (directory / "later.json").write_bytes(good.read_bytes().replace(b'"version":1', b'"version":9'))
    (directory / "large.json").write_bytes(b" " * (PLAN_BYTES + 1))
    (directory / "layers" / f"{L2.hex}.json").write_bytes(b"{}")
    (directory / "notes.txt").write_text("no plan")
    (directory / ".hidden.json").write_text("no plan")
    (directory / "\udcff.json").write_text("no plan")
    (directory / "folder.json").mkdir()
    os.mkfifo(directory / "pipe.json")
    os.symlink("nowhere", directory / "link.json")
    assert names(shelf.find([L1, L2])) == ["good"]
    assert shelf.names() == ["good", "large", "later", "torn"]
    problems = shelf.problems()
    assert len(problems) == 4 and all(text.isprintable() for text in problems)
    for name, reason in (("torn", "not JSON"), ("later", "version"), ("large", "limit"), (L2.hex, "magic")):
        assert sum(name in text and reason in text for text in problems) == 1, problems
    shelf.save(plan(part(3), name="torn"))
    assert len(shelf.problems()) == 3, "what is mended is none any more"


def test_a_plan_that_is_removed_between_listing_and_reading_is_no_problem(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.save(plan(part(1), name="a"))

    def gone(path: str) -> Plan:
        os.unlink(path)
        return read_plan(path)

    monkeypatch.setattr(shelf_module, "read_plan", gone)
    assert shelf.find([L1]) == [] and shelf.problems() == []


def test_a_directory_that_cannot_be_listed_stops_no_start(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.save(plan(part(1), name="a"))

    def refused(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refused)
        assert shelf.find([L1]) == []
        assert all("can't be listed" in text for text in shelf.problems()) and shelf.problems()


def test_what_cannot_be_written_is_said_and_nothing_stays(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.save(plan(part(1), name="a"))

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(NoSpaceError, match=r"plan .*a\.json"):
            shelf.save(plan(part(2), name="a"))
    assert files(shelf) == ["a.json"] and shelf.load("a").parts == (part(1),)


# -- kept from stores -------------------------------------------------------------------------------------------------


def test_what_a_store_said_is_kept(shelf: Shelf) -> None:
    assert not shelf.asked(L1) and shelf.unasked([L1, L2, L1]) == [L1, L2]
    shelf.keep(L1, plan(part(1), name="published"))
    shelf.keep(L2, None)
    assert shelf.asked(L1) and shelf.asked(L2) and shelf.unasked([L1, L2, L3]) == [L3]
    assert names(shelf.find([L1, L2])) == ["published"]
    assert shelf.names() == [], "it isn't anybody's by name"
    assert files(shelf) == sorted([f"layers/{L1.hex}.json", f"layers/{L2.hex}.none"])


def test_that_there_is_none_is_believed_for_an_hour(shelf: Shelf, times: Times) -> None:
    shelf.keep(L1, None)
    times.later = NONE_SECONDS - 2
    assert shelf.asked(L1)
    times.later = NONE_SECONDS + 2
    assert not shelf.asked(L1) and shelf.unasked([L1]) == [L1]
    shelf.keep(L2, None)
    assert f"layers/{L1.hex}.none" not in files(shelf), "files that say nothing any more are removed"


def test_a_kept_plan_is_used_and_asked_for_again_when_it_is_old(shelf: Shelf, times: Times) -> None:
    shelf.keep(L1, plan(part(1), name="published"))
    times.later = KEPT_SECONDS + 2
    assert not shelf.asked(L1) and shelf.unasked([L1]) == [L1]
    assert names(shelf.find([L1])) == ["published"]


def test_the_last_word_of_a_store_counts(shelf: Shelf) -> None:
    shelf.keep(L1, None)
    shelf.keep(L1, plan(part(1), name="new"))
    assert names(shelf.find([L1])) == ["new"] and files(shelf) == [f"layers/{L1.hex}.json"]
    shelf.keep(L1, None)
    assert shelf.find([L1]) == [] and shelf.asked(L1) and files(shelf) == [f"layers/{L1.hex}.none"]


def test_a_clock_that_was_set_back_makes_nothing_last(shelf: Shelf, times: Times) -> None:
    shelf.keep(L1, None)
    times.later = -7200
    assert not shelf.asked(L1)


def test_a_layer_that_a_saved_plan_has_ranges_for_needs_no_store(shelf: Shelf) -> None:
    shelf.save(plan(part(1), part(2, 0), name="mine"))
    assert shelf.unasked([L1, L2]) == [L2]


def test_a_saved_plan_comes_before_a_kept_one_that_is_as_good(shelf: Shelf) -> None:
    shelf.keep(L1, plan(part(1), name="a-kept", gap=0.5))
    shelf.save(plan(part(1), name="saved", gap=0.5))
    assert names(shelf.find([L1])) == ["saved"]
    shelf.keep(L1, plan(part(1), name="a-kept", gap=0.6))
    assert names(shelf.find([L1])) == ["a-kept"]


def test_a_layer_of_sha512_is_kept_too(shelf: Shelf) -> None:
    layer = Digest("sha512", "ab" * 64)
    shelf.keep(layer, plan(part(layer), name="long"))
    assert names(shelf.find([layer])) == ["long"] and shelf.asked(layer)


def test_kept_plans_are_bounded(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf_module, "KEPT_FILES", 3)
    for number in range(5):
        shelf.keep(layer_digest(number), plan(part(number), name=f"p{number}"))
        path = os.path.join(os.path.dirname(shelf.path("x")), "layers", layer_digest(number).hex + ".json")
        os.utime(path, ns=(0, 10**18 + number))
    shelf.keep(layer_digest(9), plan(part(9), name="p9"))
    assert len(files(shelf)) == 3
    assert sorted(names(shelf.find([layer_digest(number) for number in range(10)]))) == ["p3", "p4", "p9"]


# -- threads ----------------------------------------------------------------------------------------------------------


def test_threads_save_keep_find_and_remove_at_once(tmp_path: Path) -> None:
    shelf = Shelf(str(tmp_path))
    shelf.save(plan(part(1), name="stays", gap=0.1))
    problems: list[object] = []

    def busy(number: int) -> None:
        try:
            mine = layer_digest(100 + number)
            for turn in range(15):
                shelf.save(plan(part(mine, turn + 1), name=f"p{number}"))
                found = shelf.find([mine, L1])
                assert sorted(names(found)) == sorted([f"p{number}", "stays"]), names(found)
                shelf.keep(layer_digest(200 + number), None if turn % 2 else plan(part(200 + number), name="kept"))
                shelf.unasked([mine, L3])
                shelf.remove(f"p{number}")
                assert names(shelf.find([mine, L1])) == ["stays"]
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=busy, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == [] and not any(thread.is_alive() for thread in threads)
    assert shelf.problems() == []
    assert [name for name in files(shelf) if name.startswith(".tmp-")] == []
