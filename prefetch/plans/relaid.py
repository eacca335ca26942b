"""Plans and layouts: what a plan has put first, and the plan of what was laid out by it.

::

    plan ─▶ fitted() ─▶ hot_ranges() ─▶ layerstore.relay ─▶ image with hot packs
                │                             │ how ranges moved
                └──────────────▶ moved() ◀────┘ ─▶ plan of that image: the same data, where they are now

Whatever has become of a range is counted: none is lost silently, and none is made up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from layerstore.errors import MalformedError
from layerstore.hot import HotFile, HotRange
from layerstore.image import Image, find_target, load_image
from layerstore.pack.writer import DEFAULT_LEVEL
from layerstore.progress import SILENT, Progress
from layerstore.relay import MovedLayer, RelayReport, relay
from layerstore.store.protocol import Store, WriteStore
from prefetch.learn.ranges import disjoint, joined
from prefetch.learn.remap import MatchReport, remap_plan
from prefetch.plans.format import CERTAIN, Plan, PlannedRange, PlanPart
from prefetch.trace.format import TracedLayer
from prefetch.trace.naming import raw_path
from prefetch.trace.places import open_places, traced_layers

LIKELY = CERTAIN // 2
"""Chance from which a range is laid out among the first: frames that most runs need hold nothing that few do."""


class Fitted(NamedTuple):
    """A plan whose parts are of the layers of an image; ``matched`` is None where they were already."""

    plan: Plan
    matched: MatchReport | None


@dataclass(frozen=True, slots=True)
class Optimized:
    """An image laid out by a plan.

    Attributes:
        report: what it came to.
        plan: of the new image.
        matched: what of the old plan the old image had; None where the plan was made for it.
        unlikely: ranges that were left where they are, since their chance is too small.
    """

    report: RelayReport
    plan: Plan
    matched: MatchReport | None
    unlikely: int


def optimize(
    store: WriteStore,
    name: str,
    plan: Plan,
    *,
    tag: str | None = None,
    min_chance: int = 0,
    level: int = DEFAULT_LEVEL,
    jobs: int = 2,
    raw: bool = False,
    progress: Progress = SILENT,
) -> Optimized:
    """Lay the image ``name`` out by ``plan``, which may be of another build of it.

    Ranges with a chance below ``min_chance`` stay where they are, and in the plan.

    Raises:
        What :func:`layerstore.relay.relay` raises.
    """
    target = str(find_target(store, name).digest)
    fit = fitted(store, load_image(store, target), plan)
    hot = hot_ranges(fit.plan, min_chance)
    report = relay(store, target, hot, tag=tag, level=level, jobs=jobs, raw=raw, progress=progress)
    unlikely = sum(len(part.ranges) for part in fit.plan.parts) - len(hot)
    now = _of_image(moved(fit.plan, report.layers), plan, report.image, tag or name, str(report.manifest))
    return Optimized(report, now, fit.matched, unlikely)


def replanned(store: Store, image: Image, plan: Plan, *, name: str) -> Fitted:
    """The plan of an image that was converted by ``plan``: the same data, in the packs where they are now."""
    fit = fitted(store, image, plan)
    return fit._replace(plan=_of_image(fit.plan, plan, image, name, str(image.descriptor().digest)))


def _of_image(now: Plan, plan: Plan, image: Image, name: str, manifest: str) -> Plan:
    learned = {**now.learned, "laid_out_by": str(plan.digest)}
    return replace(now, name=plan.name, image=name, manifest=manifest, learned=learned)


def fitted(store: Store, image: Image, plan: Plan) -> Fitted:
    """A plan in terms of an image; metadata images are read only where it was made for another one."""
    layers = set(traced_layers(image))
    if all(TracedLayer(part.metadata, part.packs) in layers for part in plan.parts):
        return Fitted(plan, None)
    with open_places(store, image) as places:
        return Fitted(*remap_plan(plan, None, places))


def wanted(plan: Plan, min_chance: int = 0) -> Iterator[tuple[PlanPart, PlannedRange]]:
    """The ranges of a plan as they are to lie: likely ones by when they are due, then the others."""
    chosen = [(part, each) for part in plan.parts for each in part.ranges if each.chance >= min_chance]
    chosen.sort(key=lambda each: (each[1].chance < LIKELY, each[1].due))  # stable: then as the plan has them
    yield from chosen


def hot_ranges(plan: Plan, min_chance: int = 0) -> list[HotRange]:
    """For a published image that has the plan's layers."""
    return [HotRange(part.metadata, each.device, each.offset, each.length) for part, each in wanted(plan, min_chance)]


def hot_files(plan: Plan, min_chance: int = 0) -> list[HotFile]:
    """For an image that is to be converted. A range without a path becomes one of a file without a name."""
    return [HotFile(_path(each.path), each.file_offset, each.length) for _, each in wanted(plan, min_chance)]


def _path(text: str | None) -> bytes:
    try:
        return raw_path(text or "")
    except MalformedError:
        return b""


def moved(plan: Plan, layers: Sequence[MovedLayer]) -> Plan:
    """The plan of an image whose layers are what ``layers`` became: exact, block by block.

    Parts of other layers are left out.
    """
    by_digest = {layer.before.metadata: layer for layer in layers}
    parts = []
    for part in plan.parts:
        if (layer := by_digest.get(part.metadata)) is None:
            continue
        if ranges := joined(disjoint(_translated(part.ranges, layer))):
            parts.append(PlanPart(layer.after.metadata, tuple(pack.digest for pack in layer.after.packs), ranges))
    return replace(plan, parts=tuple(parts))


def _translated(ranges: Sequence[PlannedRange], layer: MovedLayer) -> Iterator[PlannedRange]:
    for planned in ranges:
        for device, offset, length, skipped in layer.at(planned.device, planned.offset, planned.length):
            at = planned.file_offset + skipped if planned.path is not None else 0
            yield planned._replace(device=device, offset=offset, length=length, file_offset=at)
