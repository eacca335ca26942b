"""Plans of images that are there, which name all of their data or some files."""

from __future__ import annotations

from collections.abc import Collection

from layerstore.errors import printable
from layerstore.image import Image
from layerstore.pack.format import BLOCK_SIZE, FRAME_SIZE
from layerstore.store.protocol import Store
from prefetch.plans.format import CERTAIN, Plan, PlannedRange, PlanPart, order
from prefetch.trace.places import open_places


def plan_of(image: Image, *, name: str) -> Plan:
    """Of everything in its packs, one frame after the other."""
    parts = []
    for layer in image.layers:
        ranges = [
            PlannedRange(device, offset, min(FRAME_SIZE, pack.raw_size - offset), 1000 * offset // FRAME_SIZE, CERTAIN)
            for device, pack in enumerate(layer.packs, 1)
            for offset in range(0, pack.raw_size, FRAME_SIZE)
        ]
        parts.append(PlanPart(layer.metadata, tuple(pack.digest for pack in layer.packs), order(ranges)))
    return Plan(tuple(parts), name)


def plan_of_files(store: Store, image: Image, paths: Collection[str], *, name: str) -> Plan:
    """Of what these files hold, in their order."""
    ranges: dict[int, list[PlannedRange]] = {}
    with open_places(store, image) as places:
        for number, path in enumerate(paths):
            found = places.find(path.encode())
            assert found is not None, path
            for place in places.ranges(found):
                where = place.range
                assert where.offset % BLOCK_SIZE == 0
                ranges.setdefault(where.layer, []).append(
                    PlannedRange(
                        where.device, where.offset, where.length, 1000 * number, CERTAIN, printable(place.path), 0
                    )
                )
    parts = [
        PlanPart(layer.metadata, tuple(pack.digest for pack in layer.packs), order(ranges[number]))
        for number, layer in enumerate(image.layers)
        if number in ranges
    ]
    return Plan(tuple(parts), name)
