"""Which numbers events can have, and which are the keeper's own."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable

import pytest
from support.children import Child

from overlay.lazy.descriptors import LowNumbers

FLOOR = 300


def in_a_child(work: Callable[[LowNumbers], object], *, hard: int | None = None) -> None:
    """Limits are a process's: each trial has its own."""

    def trial(child: Child) -> None:
        if hard is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with LowNumbers(FLOOR) as numbers:
            work(numbers)

    with Child(trial) as child:
        assert child.wait() == 0


def test_new_descriptors_are_low_and_what_is_kept_is_above() -> None:
    def work(numbers: LowNumbers) -> None:
        assert numbers.floor == FLOOR
        before = numbers.count()
        fd = os.open(os.devnull, os.O_RDONLY)
        assert fd < FLOOR
        assert numbers.count() == before + 1
        lifted = numbers.lift(fd)
        assert lifted >= FLOOR
        assert not os.get_inheritable(lifted)
        assert numbers.count() == before
        assert numbers.lift(lifted) == numbers.lift_if_possible(lifted) == lifted
        copies = {numbers.lifted_copy(lifted), numbers.copy(lifted)}
        assert min(copies) > lifted and len(copies) == 2

    in_a_child(work)


def test_only_so_many_events_get_a_number_but_messages_still_bring_descriptors() -> None:
    def work(numbers: LowNumbers) -> None:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                assert os.open(os.devnull, os.O_RDONLY) < FLOOR
        with numbers.exceeded():
            fd = os.open(os.devnull, os.O_RDONLY)
        assert fd >= FLOOR
        assert numbers.lifted_copy(fd) > fd
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)

    in_a_child(work)


def test_a_number_that_is_taken_by_nobody_is_occupied() -> None:
    def work(numbers: LowNumbers) -> None:
        os.close(1)
        assert numbers.occupy_all([1, 2, 250, 260]) == {1, 250, 260}
        assert os.path.samestat(os.fstat(260), os.stat(os.devnull))
        assert not os.get_inheritable(260)
        assert numbers.occupy_all([1, 2, 250, 260]) == set()
        os.close(260)
        for number in range(FLOOR):
            numbers.occupy(number)
        assert numbers.count() == FLOOR

    in_a_child(work)


def test_where_the_limit_is_small_both_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = resource.setrlimit

    def strict(which: int, limits: tuple[int, int]) -> None:
        if limits[1] > resource.getrlimit(which)[1]:
            raise ValueError("not allowed to raise maximum limit")
        real(which, limits)

    monkeypatch.setattr(resource, "setrlimit", strict)

    def work(numbers: LowNumbers) -> None:
        assert numbers.floor == 200
        fd = os.open(os.devnull, os.O_RDONLY)
        with pytest.raises(OSError, match="Too many open files"):
            for _ in range(400):
                assert numbers.lifted_copy(fd) >= 200
        assert numbers.lift_if_possible(fd) == fd
        assert numbers.copy(fd) < 200

    in_a_child(work, hard=400)


def test_the_limit_is_as_before_afterwards() -> None:
    def trial(child: Child) -> None:
        os.close(0)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        with LowNumbers(FLOOR):
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == FLOOR
            assert os.path.samestat(os.fstat(0), os.stat(os.devnull)), "a standard one must not become an event's"
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before

    with Child(trial) as child:
        assert child.wait() == 0
