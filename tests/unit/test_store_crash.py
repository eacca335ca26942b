"""Kill -9 at random points of publish, copy and collect: no reference ever points at something missing or wrong.

``--crash-rounds N`` runs as many rounds as one has time for; in a bucket, where each takes longer, an eighth of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.crash import Arena, BucketGround, DirectoryGround, Ground
from support.faults import fsync_for_free
from support.servers import S3Server

ROUNDS = 200
ROUNDS_OF_AN_ARENA = 25


@pytest.fixture(autouse=True)
def impatience() -> Iterator[None]:
    with fsync_for_free():
        yield


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--crash-rounds", default=ROUNDS))


def fight(rounds: int, ground: Callable[[int], Ground]) -> None:
    seed = time.time_ns()
    print(f"seed {seed}")  # shown if it fails; timing decides as much as the seed
    for number in range(0, rounds, ROUNDS_OF_AN_ARENA):
        arena = Arena(ground(number), seed + number)
        for _ in range(min(ROUNDS_OF_AN_ARENA, rounds - number)):
            arena.round()
        arena.finish()


@pytest.mark.case("C03", "G07")
@pytest.mark.timeout(0)
def test_no_reference_breaks_however_writers_die(tmp_path: Path, rounds: int) -> None:
    fight(rounds, lambda number: DirectoryGround(str(tmp_path / f"store{number}")))


@pytest.mark.case("C03", "G01", "G07")
@pytest.mark.timeout(0)
def test_no_reference_in_a_bucket_breaks_however_writers_die(seaweedfs: S3Server, rounds: int) -> None:
    fight(-(-rounds // 8), lambda number: BucketGround(seaweedfs.url()))
