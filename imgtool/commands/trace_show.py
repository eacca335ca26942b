"""``imgtool trace show``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from imgtool import render
from imgtool.options import examples, json_option, store_option
from layerstore.errors import UsageError, printable

if TYPE_CHECKING:
    from prefetch.trace.format import Access, Trace
    from prefetch.trace.summary import Summary

_ROWS = 40


@click.command(
    "show",
    short_help="Show a trace as a table and as a picture.",
    epilog=examples(
        "imgtool trace show numpy",
        "imgtool trace show numpy --limit 0 | grep site-packages",
        "imgtool trace show numpy --picture numpy.svg --plan python",
        "imgtool trace show run.jsonl.part --image debian-full --json",
    ),
)
@click.argument("trace", metavar="NAME|FILE")
@click.option("--limit", type=click.IntRange(0), help="Rows at most; 0 is all [default: 40, all in JSON].")
@click.option("--picture", metavar="FILE", help="Draw it to FILE.svg, FILE.png or FILE.pdf.")
@click.option("--plan", metavar="PLAN", help="Draw what this plan fetches behind it: a file, or a name on this node.")
@click.option("--image", metavar="NAME", help="Of which the trace is: fills in paths that it lacks.")
@store_option
@json_option
def command(
    trace: str,
    limit: int | None,
    picture: str | None,
    plan: str | None,
    image: str | None,
    store: str | None,
    root: str | None,
    as_json: bool,
) -> None:
    """Show what a run read: when, of which file, how long it waited for it, how often, and by which program.

    RANGE is in the file, BYTES are whole blocks of 4096. The share of the image is shown where the image is in the
    store. The picture has time to the right, and the packs of the image above each other.
    """
    from imgtool.tracefile import image_of, load_trace, with_paths
    from prefetch.trace.summary import has_times, summarize

    if plan is not None and picture is None:
        raise UsageError("--plan is for the picture: name its file with --picture")
    loaded = load_trace(trace, root)
    found = image_of(loaded, image, store, root)
    if image is not None and found is not None:
        loaded = with_paths(loaded, found, store, root)
    summary = summarize(loaded, found)
    if picture is not None:
        from imgtool.pictures import draw_trace, pack_sizes
        from imgtool.planfile import load_plan

        draw_trace(
            picture,
            loaded,
            title=printable(loaded.header.image or trace),
            sizes=pack_sizes(found) if found else {},
            plan=load_plan(plan, root) if plan is not None else None,
        )
    if as_json:
        shown = loaded.accesses if not limit else loaded.accesses[:limit]
        render.print_json({**_document(loaded, summary), "accesses": [_access(access) for access in shown]})
        return
    most = _ROWS if limit is None else limit or len(loaded.accesses)
    timed = has_times(loaded)
    render.print_table(
        ("MS" if timed else "NO", "LAYER", "PATH", "RANGE", "BYTES", "WAITED MS", "TIMES", "PROGRAM"),
        [_row(access, timed) for access in loaded.accesses[:most]],
        right=frozenset({0, 1, 4, 5, 6}),
    )
    for label, text in _lines(loaded, summary, most):
        render.print_line(f"{label:>10}  {text}")


def _row(access: Access, timed: bool) -> tuple[str, ...]:
    return (
        f"{access.at / 1000:.1f}" if timed else str(access.at),
        str(access.layer),
        access.path if access.path is not None else f"? pack {access.device}",
        f"{access.file_offset}+" if access.path is not None else f"{access.offset}+",
        str(access.length),
        f"{access.waited / 1000:.1f}" if access.waited else "",
        str(access.times),
        printable(access.comm),
    )


def _lines(trace: Trace, summary: Summary, shown: int) -> list[tuple[str, str]]:
    from prefetch.trace.summary import has_times

    header = trace.header
    share = (
        "" if summary.share is None else f", {summary.share:.1%} of the image's {render.size(summary.image_bytes or 0)}"
    )
    how = " ".join(filter(None, (header.mode, header.backend)))
    lines = [
        ("image", printable(header.image) + (f"  {header.manifest}" if header.manifest else "")),
        ("command", printable(" ".join(header.command))),
        (
            "recorded" if header.origin == "recorded" else "from",
            ", ".join(filter(None, (_origin(trace), how, header.started))),
        ),
        ("accesses", f"{summary.accesses} of {summary.files} files" + _nameless(summary) + _more(summary, shown)),
        ("bytes", f"{render.size(summary.bytes)}{share}"),
    ]
    if summary.waits or summary.blocked:
        blocked = "" if summary.blocked is None else f"; somebody waited during {summary.blocked / 1e6:.3g} s"
        lines.append(("waited", f"{summary.waits} accesses, {summary.waited / 1e6:.3g} s all together{blocked}"))
    if not has_times(trace):
        took = "its times aren't known: accesses are numbered"
    elif summary.ended is None:
        took = "cut off: when it ended isn't known"
    else:
        took = f"{summary.ended / 1e6:.3g} s, complete"
    lines.append(("run", took))
    if trace.unknown:
        lines.append(("left out", ", ".join(f"{count} {reason}" for reason, count in trace.unknown.items())))
    return [(label, text) for label, text in lines if text]


def _origin(trace: Trace) -> str:
    return "" if trace.header.origin == "recorded" else trace.header.origin


def _nameless(summary: Summary) -> str:
    return f", {summary.nameless} without a path (--image fills them in)" if summary.nameless else ""


def _more(summary: Summary, shown: int) -> str:
    return f"; {summary.accesses - shown} more with --limit 0" if summary.accesses > shown else ""


def _document(trace: Trace, summary: Summary) -> dict[str, object]:
    header = trace.header
    return {
        "image": header.image,
        "manifest": header.manifest,
        "mode": header.mode,
        "backend": header.backend,
        "command": list(header.command),
        "started": header.started,
        "origin": header.origin,
        "layers": [
            {"layer": str(layer.metadata), "packs": [str(pack) for pack in layer.packs]} for layer in header.layers
        ],
        "complete": summary.ended is not None,
        "seconds": None if summary.ended is None else summary.ended / 1e6,
        "count": summary.accesses,
        "files": summary.files,
        "nameless": summary.nameless,
        "bytes": summary.bytes,
        "bytes_image": summary.image_bytes,
        "share": None if summary.share is None else round(summary.share, 6),
        "waits": summary.waits,
        "waited": summary.waited / 1e6,
        "blocked": None if summary.blocked is None else summary.blocked / 1e6,
        "left_out": dict(trace.unknown),
    }


def _access(access: Access) -> dict[str, object]:
    return {
        "at": access.at,
        "layer": access.layer,
        "device": access.device,
        "offset": access.offset,
        "length": access.length,
        "path": access.path,
        "file_offset": access.file_offset if access.path is not None else None,
        "waited": access.waited,
        "times": access.times,
        "comm": access.comm,
    }
