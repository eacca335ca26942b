"""Plans of made-up layers and of real ones."""

from __future__ import annotations

from collections.abc import Mapping

from layerstore.digest import Digest
from layerstore.image import Layer
from prefetch.plans.format import CERTAIN, Plan, PlannedRange, PlanPart, order


def layer_digest(number: int) -> Digest:
    """The identity of a layer that nobody has."""
    return Digest.of(b"layer %d" % number)


def pack_digest(number: int) -> Digest:
    return Digest.of(b"pack %d" % number)


def some_ranges(count: int = 3, *, device: int = 1, path: str | None = "usr/bin/python3") -> tuple[PlannedRange, ...]:
    """Blocks one after the other, each due a millisecond after the last."""
    return order(
        PlannedRange(device, 4096 * number, 4096, 1000 * number, CERTAIN - number, path, 4096 * number if path else 0)
        for number in range(count)
    )


def part(layer: Digest | int, count: int = 3, packs: tuple[Digest, ...] | None = None) -> PlanPart:
    """A part with ``count`` ranges, of a layer or of the made-up one of that number."""
    if isinstance(layer, int):
        return PlanPart(layer_digest(layer), packs or (pack_digest(layer),), some_ranges(count))
    return PlanPart(layer, packs or (pack_digest(0),), some_ranges(count))


def part_of(layer: Layer, count: int = 2) -> PlanPart:
    """A part of a converted layer, which has a pack."""
    return PlanPart(layer.metadata, tuple(pack.digest for pack in layer.packs), some_ranges(count))


def plan(
    *parts: PlanPart,
    name: str = "start",
    gap: object = None,
    runs: int = 3,
    image: str = "debian",
    score: Mapping[str, object] | None = None,
) -> Plan:
    figures: dict[str, object] = dict(score or {})
    if gap is not None:
        figures["gap_closed"] = gap
    learned: dict[str, object] = {
        "learner": "union",
        "runs": runs,
        "tried": [{"learner": "union", "merit": 0.9}, {"learner": "intersection", "merit": 0.4}],
    }
    return Plan(parts, name, image, str(Digest.of(b"manifest")), learned, figures)
