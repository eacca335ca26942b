"""What a trace comes to: how much was read, of how much, and how long it was waited for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from layerstore.image import Image
from prefetch.trace.format import Trace


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one trace.

    Attributes:
        accesses: how many.
        files: of which their paths are known, each once.
        nameless: accesses without a path.
        bytes: read, each byte of a pack once.
        image_bytes: of all packs of the image, raw, each once; None if the image isn't known.
        waits: how many accesses were waited for.
        waited: microseconds that readers waited, all together.
        blocked: microseconds during which at least one reader waited; None if the trace doesn't say.
        ended: microseconds that the run took; None if the recording was cut off.
    """

    accesses: int
    files: int
    nameless: int
    bytes: int
    image_bytes: int | None
    waits: int
    waited: int
    blocked: int | None
    ended: int | None

    @property
    def share(self) -> float | None:
        """Of the image's bytes, those that were read."""
        return self.bytes / self.image_bytes if self.image_bytes else None


def summarize(trace: Trace, image: Image | None = None) -> Summary:
    """Sum up a trace; ``image`` is the one that it is of, where it is known."""
    layers = trace.header.layers
    spans: dict[str, list[tuple[int, int]]] = {}
    for access in trace.accesses:
        pack = layers[access.layer].packs[access.device - 1]
        spans.setdefault(pack.hex, []).append((access.offset, access.end))
    sizes = {pack.digest: pack.raw_size for layer in image.layers for pack in layer.packs} if image else None
    return Summary(
        len(trace.accesses),
        len({access.path for access in trace.accesses if access.path is not None}),
        sum(access.path is None for access in trace.accesses),
        sum(map(covered, spans.values())),
        None if sizes is None else sum(sizes.values()),
        sum(access.waited > 0 for access in trace.accesses),
        sum(access.waited for access in trace.accesses),
        covered((wait.start, wait.end) for wait in trace.waits) if trace.waits else None,
        trace.ended,
    )


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """The length of what is in at least one of these spans, given by start and end."""
    total = position = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, position))
        position = max(position, end)
    return total


def is_of(trace: Trace, image: Image) -> bool:
    """Whether the image has exactly the trace's layers."""
    return [(layer.metadata, layer.packs) for layer in trace.header.layers] == [
        (layer.metadata, tuple(pack.digest for pack in layer.packs)) for layer in image.layers
    ]


def has_times(trace: Trace) -> bool:
    """Whether ``at`` is a time: in a trace that was imported from a list without times it only counts accesses."""
    return trace.header.origin == "recorded" or any(access.at != n for n, access in enumerate(trace.accesses))
