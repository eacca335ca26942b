"""The frames that a plan comes to, without a cache: for simulation, budgets and scores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from layerstore.digest import Digest
from prefetch.learn.sizes import Sizes, check_frames
from prefetch.plans.format import Plan


class FrameDue(NamedTuple):
    """A frame of a pack, when it is due (microseconds from the start), and how likely its likeliest range is."""

    pack: Digest
    number: int
    due: int
    chance: int


def planned_frames(plans: Iterable[Plan], sizes: Sizes) -> list[FrameDue]:
    """Each frame once, by when its first range is due; then by pack and number, as it lies in a store.

    Raises:
        LimitError: there are more than any start reads.
    """
    dues: dict[tuple[Digest, int], tuple[int, int]] = {}
    count = 0
    for plan in plans:
        for part in plan.parts:
            for planned in part.ranges:
                pack = part.packs[planned.device - 1]
                numbers = sizes.frames(pack, planned.offset, planned.length)
                count += len(numbers)
                check_frames(count, "a plan")
                for number in numbers:
                    due, chance = dues.get((pack, number), (planned.due, planned.chance))
                    dues[pack, number] = min(due, planned.due), max(chance, planned.chance)
    found = [FrameDue(pack, number, due, chance) for (pack, number), (due, chance) in dues.items()]
    return sorted(found, key=lambda frame: (frame.due, frame.pack, frame.number))
