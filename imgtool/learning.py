"""What plans are learned from and scored on: runs, the link, and where frames lie. Options and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from imgtool import render
from imgtool.options import open_store
from imgtool.quantity import LATENCY, SIZE
from layerstore.errors import printable
from prefetch.plans.format import number

if TYPE_CHECKING:
    from prefetch.learn.remap import MatchReport
    from prefetch.learn.simulate import Link
    from prefetch.learn.sizes import Sizes
    from prefetch.trace.format import Trace

F = TypeVar("F", bound=Callable[..., Any])

_LOST = 5
"""Learners that lost, as they are shown; --json has all."""


def runs_options(function: F) -> F:
    """The traces, the link that starts are simulated over, and the image that frame sizes are taken from."""
    for option in reversed(
        (
            click.argument("more", nargs=-1, metavar="[TRACE]..."),
            click.option(
                "--from",
                "traces",
                multiple=True,
                required=True,
                metavar="TRACE...",
                help="Traces: files, or names on this node. Several may follow.",
            ),
            click.option(
                "--image",
                metavar="IMAGE",
                help="For the sizes of its frames; traces of other builds are re-mapped to it.",
            ),
            click.option(
                "--latency", type=LATENCY, metavar="TIME", help="Of a request to the store, as 20ms [default: 20ms]."
            ),
            click.option(
                "--bandwidth",
                type=SIZE,
                metavar="RATE",
                help="Of the link, in bytes a second, as 25M [default: no limit].",
            ),
        )
    ):
        function = option(function)
    return function


def link_of(latency: float | None, bandwidth: int | None) -> Link:
    """The link of the two options."""
    from prefetch.learn.simulate import LINK, Link  # with what learns, which no other command needs

    return Link(
        LINK.latency if latency is None else latency,
        LINK.bandwidth if bandwidth is None else float(bandwidth),
        LINK.requests,
    )


@dataclass(frozen=True, slots=True)
class Runs:
    """Traces to learn from or to score on.

    Attributes:
        traces: in the order given, those of other builds re-mapped.
        sizes: of frames.
        remapped: what became of the traces that were, by the name they were given.
    """

    traces: tuple[Trace, ...]
    sizes: Sizes
    remapped: tuple[tuple[str, MatchReport], ...] = ()


def load_runs(given: Sequence[str], *, image: str | None, store: str | None, root: str | None) -> Runs:
    """Read the traces that arguments name, and make them ones of ``image`` where that is given.

    Raises:
        NotFoundError: a trace, or the image.
        LimitError, MalformedError, UnsupportedError: a trace's file.
    """
    from imgtool.tracefile import image_of, load_trace, with_paths
    from layerstore.image import load_image
    from prefetch.learn.remap import remap_trace
    from prefetch.learn.sizes import GUESSED, open_sizes
    from prefetch.trace.places import open_places, traced_layers

    traces = [(name, load_trace(name, root)) for name in given]
    if image is None:
        return Runs(tuple(trace for _, trace in traces), GUESSED)
    source = open_store(store, root)
    target = load_image(source, image)
    known = set(traced_layers(target))
    reports = []
    if all(set(trace.header.layers) <= known for _, trace in traces):
        loaded = [trace for _, trace in traces]
    else:
        loaded = []
        with open_places(source, target) as places:
            for name, trace in traces:
                if not set(trace.header.layers) <= known:
                    own = image_of(trace, None, store, root)
                    named = trace if own is None else with_paths(trace, own, store, root)
                    trace, report = remap_trace(named, places)
                    reports.append((name, report))
                loaded.append(trace)
    return Runs(tuple(loaded), open_sizes(source, target), tuple(reports))


def print_remapped(reports: Sequence[tuple[str, MatchReport]]) -> None:
    for name, report in reports:
        render.print_line(f"  {printable(name)} is re-mapped: {matched(report)}")


def matched(report: MatchReport) -> str:
    """What became of the ranges of another build, in one line."""
    text = f"{report.rate:.1%} of {render.size(report.bytes)} found"
    text += f" ({render.size(report.by_pack)} where they were, {render.size(report.by_path)} by path)"
    if report.lost:
        text += f"; {render.size(report.lost)} lost"
    if report.unknown:
        text += f", such as of {printable(report.unknown[0])}"
    return text


def percent(value: object) -> str:
    """A share of 1 as a plan's score has it; empty where there is none."""
    share = number(value)
    return "" if share is None else f"{share:.1%}"


def figures(score: object) -> list[tuple[str, str]]:
    """The figures of a score that people compare, as labels and texts; those that aren't there are left out."""
    if not isinstance(score, dict):
        return []
    fetched, count = number(score.get("bytes")), number(score.get("runs"))
    lines = [
        ("gap closed", _joined(percent(score.get("gap_closed")), _worst(score.get("worst_gap_closed")))),
        ("start", _start(score)),
        ("recall", percent(score.get("recall"))),
        ("precision", percent(score.get("precision"))),
        ("wasted", _joined(percent(score.get("wasted")), "of the bytes fetched")),
        ("by demand", _joined(percent(score.get("demand_share")), "of the frames used")),
        ("requests", _change(score.get("cold_requests"), score.get("requests"))),
        ("fetches", "" if fetched is None or fetched < 0 else render.size(int(fetched))),
        ("runs", "" if count is None else f"{count:g}"),
    ]
    return [(label, text) for label, text in lines if text]


def lost(learned: Mapping[str, object]) -> str:
    """The learners that were not as good, best first, with the gap that they close; empty if there were none."""
    tried = learned.get("tried")
    others = [each for each in tried[1:] if isinstance(each, dict)] if isinstance(tried, list) else []
    named = ", ".join(f"{each.get('learner')} {percent(each.get('gap_closed'))}" for each in others[:_LOST])
    return printable(f"{named} and {len(others) - _LOST} more" if len(others) > _LOST else named)


def _joined(first: str, second: str) -> str:
    return f"{first} {second}".strip() if first else ""


def _worst(value: object) -> str:
    return f"of the time between cold and warm; {percent(value)} in the worst run" if percent(value) else ""


def _start(score: dict[str, object]) -> str:
    cold, planned, warm = (number(score.get(name)) for name in ("cold_seconds", "seconds", "warm_seconds"))
    if cold is None or planned is None or warm is None:
        return ""
    return f"{cold:.3g} s without, {planned:.3g} s with the plan, {warm:.3g} s with all there"


def _change(before: object, after: object) -> str:
    cold, planned = number(before), number(after)
    return "" if cold is None or planned is None else f"{cold:.1f} without, {planned:.1f} with the plan"
