"""Pictures of traces: time to the right, the packs of the image above each other. Matplotlib is imported to draw."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from imgtool import render
from layerstore.digest import Digest
from layerstore.errors import UsageError, os_errors, printable
from layerstore.staging import write_file
from prefetch.plans.format import CERTAIN, Plan
from prefetch.trace.format import Trace
from prefetch.trace.summary import covered, has_times, summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from layerstore.image import Image

FORMATS = ("svg", "png", "pdf")
_MANY = 5_000
"""More marks than this are pixels in an SVG or PDF, too: as shapes they'd be megabytes."""
_MB = 1e6
_WAIT = "#d62728"
_PLAN = "#b9c6cf"
_LAYERS = ("#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#17becf", "#bcbd22")
_TITLE = 110
_ROOM = 0.033
"""Part of the height that a line of small text takes."""
_DIRECTORIES = 12
_DEPTH = 5
"""Components of a directory that is named."""
_NAME = 36


def pack_sizes(image: Image) -> dict[Digest, int]:
    """Raw bytes of each pack of an image."""
    return {pack.digest: pack.raw_size for layer in image.layers for pack in layer.packs}


def picture_format(path: str) -> str:
    """What the name of a file asks for. Raises UsageError."""
    suffix = os.path.splitext(path)[1].lower().removeprefix(".")
    if suffix not in FORMATS:
        raise UsageError(f"{printable(path)}: a picture's name ends in {', '.join('.' + name for name in FORMATS)}")
    return suffix


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, sizes in inches.

    Raises:
        UsageError: matplotlib isn't installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(f"a picture needs matplotlib ({error}): pip install 'imgtool[plot]'") from error
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of fonts and of its own cache
    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def save_figure(figure: Figure, path: str) -> None:
    """Write a picture, whole or not at all; the same figure gives the same bytes.

    Raises:
        UsageError: the name of the file asks for no format that is known.
        NoSpaceError, NotFoundError, PermissionError_, UnavailableError: as the file system says.
    """
    import matplotlib

    suffix = picture_format(path)
    date: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[suffix]
    data = io.BytesIO()
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "imgtool"}):
        warnings.simplefilter("ignore")  # characters that the font lacks are shown as boxes
        figure.savefig(data, format=suffix, metadata=date)
    with os_errors(f"write {printable(path)}"):
        write_file(os.path.abspath(path), data.getvalue())


class Stack:
    """The packs of a trace above each other: layers bottom first, each with its devices in order.

    Attributes:
        height: bytes of all.
        spans: (layer, device, start, end) of each pack that has bytes, in order.
    """

    def __init__(self, trace: Trace, sizes: Mapping[Digest, int]) -> None:
        """``sizes`` of packs; one that isn't in it is taken to end where the trace does."""
        seen: dict[tuple[int, int], int] = {}
        for access in trace.accesses:
            key = access.layer, access.device
            seen[key] = max(seen.get(key, 0), access.end)
        self._starts: dict[tuple[int, int], int] = {}
        self._ends: dict[tuple[int, int], int] = {}
        self._devices: dict[tuple[Digest, Digest], tuple[int, int]] = {}
        self.spans: list[tuple[int, int, int, int]] = []
        self.height = 0
        for number, layer in enumerate(trace.header.layers):
            for device, pack in enumerate(layer.packs, 1):
                size = max(sizes.get(pack, 0), seen.get((number, device), 0))
                self._devices.setdefault((layer.metadata, pack), (number, device))
                self._starts[number, device] = self.height
                self._ends[number, device] = self.height + size
                if size:
                    self.spans.append((number, device, self.height, self.height + size))
                self.height += size

    def at(self, layer: int, device: int, offset: int) -> int:
        """Where an offset of a pack is in the stack."""
        return self._starts[layer, device] + offset

    def planned(self, plan: Plan) -> list[tuple[int, int, int, int]]:
        """(start, end, due, chance) of the ranges of a plan that are in the stack."""
        found = []
        for part in plan.parts:
            for planned in part.ranges:
                key = self._devices.get((part.metadata, part.packs[planned.device - 1]))
                if key is not None:
                    start = self.at(*key, planned.offset)
                    end = min(start + planned.length, self._ends[key])
                    if start < end:
                        found.append((start, end, planned.due, planned.chance))
        return found


def draw_trace(
    path: str,
    trace: Trace,
    *,
    title: str,
    sizes: Mapping[Digest, int],
    plan: Plan | None = None,
) -> None:
    """Draw a trace into a file.

    Args:
        path: of the file, ending in one of FORMATS.
        trace: what was read.
        title: what it is of.
        sizes: raw bytes of packs, as far as they are known.
        plan: what is drawn behind it: the ranges that it fetches, and by when.

    Raises:
        UsageError: matplotlib isn't installed, or the name of the file asks for another format.
        NoSpaceError, NotFoundError, PermissionError_, UnavailableError: as the file system says.
    """
    picture_format(path)
    figure = new_figure(11, 6.5)
    stack = Stack(trace, sizes)
    unit = 1000.0 if has_times(trace) else 1.0
    planned = stack.planned(plan) if plan is not None else []
    last = max(
        [
            trace.ended or 0,
            *(access.at + access.waited for access in trace.accesses),
            *(due for _, _, due, _ in planned),
        ]
    )
    right = (last / unit or 1.0) * 1.02
    if trace.waits:
        main, strip = figure.subplots(2, 1, sharex=True, height_ratios=[18, 1])
        _draw_waits(strip, trace, unit)
        strip.set_xlabel(_time_label(unit))
    else:
        main = figure.subplots()
        main.set_xlabel(_time_label(unit))
    handles = _draw_plan(main, planned, unit, right) if plan is not None else []
    handles = [*_draw_accesses(main, trace, stack, unit), *handles]
    _draw_packs(main, trace, stack, sizes)
    _draw_directories(main, trace, stack)
    main.set_xlim(-right * 0.015, right)
    main.set_ylim(-0.01 * (stack.height or 1) / _MB, 1.01 * (stack.height or 1) / _MB)
    main.set_ylabel("position: packs of the image, one above the other (MB)")
    main.grid(axis="x", linewidth=0.4, alpha=0.5)
    main.set_title(_heading(trace, title, planned), fontsize=10, loc="left", parse_math=False)
    if handles:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=min(len(handles), 5), fontsize=8, frameon=False
        )
    save_figure(figure, path)


def _time_label(unit: float) -> str:
    return "time since the start (ms)" if unit > 1 else "order of accesses: the list has no times"


def _heading(trace: Trace, title: str, planned: Sequence[tuple[int, int, int, int]]) -> str:
    summary = summarize(trace)
    command = printable(" ".join(trace.header.command))
    first = title + (f": {command}" if command else "")
    took = "cut off" if summary.ended is None else f"{summary.ended / 1e6:.3g} s"
    second = ""
    if trace.accesses:  # none in the picture of a plan alone
        second = f"{summary.accesses} accesses, {render.size(summary.bytes)}"
        second += f", {took}" if has_times(trace) else ""
    if summary.waited:
        second += f", waited {summary.waited / 1e6:.3g} s"
    if planned:
        second += "; " if second else ""
        second += f"planned {render.size(covered((start, end) for start, end, _, _ in planned))}"
    return (first if len(first) <= _TITLE else first[: _TITLE - 1] + "…") + "\n" + second


def _draw_packs(axes: Axes, trace: Trace, stack: Stack, sizes: Mapping[Digest, int]) -> None:
    """Lines between packs, and their names where there is room for them."""
    for layer, device, start, end in stack.spans:
        axes.axhline(start / _MB, color="#888888", linewidth=0.5 if device > 1 else 1.0, zorder=1)
        if (end - start) / stack.height < _ROOM:
            continue
        pack = trace.header.layers[layer].packs[device - 1]
        text = f"layer {layer}, pack {device}" + ("" if pack in sizes else " (at least)")
        _note(axes, text, 0.995, end / _MB, ha="right", va="top")


def _draw_directories(axes: Axes, trace: Trace, stack: Stack) -> None:
    """On the right, beside what was read of them, the directories of which most was read."""
    found: dict[str, list[tuple[int, int]]] = {}
    for access in trace.accesses:
        if access.path is not None:
            parts = access.path.split("/")
            low = stack.at(access.layer, access.device, access.offset)
            found.setdefault("/".join(parts[:-1][:_DEPTH]) or "/", []).append((low, low + access.length))
    placed: list[float] = []
    for name, spans in sorted(found.items(), key=lambda item: (-covered(item[1]), item[0])):
        low, high = sorted(spans)[len(spans) // 2]
        middle = (low + high) / 2
        if len(placed) == _DIRECTORIES or any(abs(middle - other) < _ROOM * stack.height for other in placed):
            continue
        placed.append(middle)
        short = name if len(name) <= _NAME else "…" + name[1 - _NAME :]
        _note(axes, f"{short}  {render.size(covered(spans))}", 1.008, middle / _MB, ha="left", va="center")


def _note(axes: Axes, text: str, x: float, y: float, *, ha: str, va: str) -> None:
    """Small text at a part of the width and a position."""
    axes.annotate(
        text,
        (x, y),
        xycoords=("axes fraction", "data"),
        fontsize=7,
        color="#555555",
        ha=ha,
        va=va,
        annotation_clip=False,
        parse_math=False,
        zorder=6,
    )


def _draw_accesses(axes: Axes, trace: Trace, stack: Stack, unit: float) -> list[Any]:
    """Each access as a line from where it begins to where it ends, with a dot, for most are smaller than a pixel."""
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D

    handles: list[Any] = []
    pixels = len(trace.accesses) > _MANY
    for number, layer in enumerate(trace.header.layers):
        own = [access for access in trace.accesses if access.layer == number]
        if not own:
            continue
        color = _LAYERS[number % len(_LAYERS)]
        lows = [stack.at(number, access.device, access.offset) / _MB for access in own]
        times = [access.at / unit for access in own]
        highs = [low + access.length / _MB for low, access in zip(lows, own, strict=True)]
        lines = [[(at, low), (at, high)] for at, low, high in zip(times, lows, highs, strict=True)]
        axes.add_collection(LineCollection(lines, colors=color, linewidths=1.4, zorder=4, rasterized=pixels))
        axes.scatter(times, lows, s=5, color=color, linewidths=0, zorder=5, rasterized=pixels)
        amount = render.size(
            covered((access.device << 48 | access.offset, access.device << 48 | access.end) for access in own)
        )
        label = f"layer {number} ({layer.metadata.hex[:8]}): {len(own)} reads, {amount}"
        handles.append(Line2D([], [], color=color, marker="o", markersize=4, linewidth=1.4, label=label))
    waits = [
        [(access.at / unit, middle), ((access.at + access.waited) / unit, middle)]
        for access in trace.accesses
        if access.waited and unit > 1
        for middle in ((stack.at(access.layer, access.device, access.offset) + access.length / 2) / _MB,)
    ]
    if waits:
        axes.add_collection(
            LineCollection(waits, colors=_WAIT, linewidths=1.0, alpha=0.7, zorder=3, rasterized=len(waits) > _MANY)
        )
        handles.append(Line2D([], [], color=_WAIT, linewidth=1.0, label=f"its reader waits ({len(waits)} reads)"))
    return handles


def _draw_plan(axes: Axes, planned: Sequence[tuple[int, int, int, int]], unit: float, right: float) -> list[Any]:
    """What is planned as bands over the whole time, the surer the darker, and a mark where it is due."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    pixels = len(planned) > _MANY
    bands = [
        [(-right, start / _MB), (right, start / _MB), (right, end / _MB), (-right, end / _MB)]
        for start, end, _, _ in planned
    ]
    colors = [to_rgba(_PLAN, 0.25 + 0.55 * chance / CERTAIN) for _, _, _, chance in planned]
    axes.add_collection(
        PolyCollection(bands, facecolors=colors, edgecolors=colors, linewidths=0.5, zorder=0, rasterized=pixels)
    )
    if unit > 1:
        axes.scatter(
            [due / unit for _, _, due, _ in planned],
            [(start + end) / 2 / _MB for start, end, _, _ in planned],
            marker="|",
            s=14,
            color="#44525c",
            linewidths=0.8,
            zorder=2,
            rasterized=pixels,
        )
    due = [Line2D([], [], color="#44525c", marker="|", linestyle="", label="due by the plan")] if unit > 1 else []
    return [Patch(color=_PLAN, label=f"planned ({len(planned)} ranges; darker is surer)"), *due]


def _draw_waits(axes: Axes, trace: Trace, unit: float) -> None:
    """When some reader waited."""
    spans = [(wait.start / unit, (wait.end - wait.start) / unit) for wait in trace.waits]
    axes.broken_barh(spans, (0, 1), facecolors=_WAIT, linewidth=0, rasterized=len(spans) > _MANY)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_ylabel("waits", rotation=0, ha="right", va="center", fontsize=8)
