"""Several requests at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from layerstore.store.ahead import ahead


@pytest.mark.parametrize("count", [0, 1, 2, 3, 500])
@pytest.mark.parametrize("threads", [1, 4])
def test_results_come_in_order(count: int, threads: int) -> None:
    assert list(ahead(lambda n: n * n, range(count), threads=threads)) == [(n, n * n) for n in range(count)]


def test_several_are_under_way_and_not_too_many() -> None:
    begun: list[int] = []
    barrier = threading.Barrier(4)

    def work(number: int) -> int:
        begun.append(number)
        if number < 4:
            barrier.wait(30)
        return number

    found = ahead(work, iter(range(10_000)), threads=4)
    assert next(found) == (0, 0)
    assert len(begun) < 100
    found.close()  # type: ignore[attr-defined]
    assert len(begun) < 100
    assert not [each for each in threading.enumerate() if each.name.startswith("ahead")]


def test_the_first_error_comes_in_its_turn_and_ends_it() -> None:
    begun = []

    def work(number: int) -> int:
        begun.append(number)
        if number in (5, 7):
            raise ZeroDivisionError(number)
        return number

    found: Iterator[tuple[int, int]] = ahead(work, range(10_000), threads=4)
    assert [next(found)[0] for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ZeroDivisionError, match="5"):
        next(found)
    assert len(begun) < 100
