"""``imgtool trace export``."""

from __future__ import annotations

import os
import sys

import click

from imgtool import render
from imgtool.options import examples, json_option, store_option
from layerstore.errors import UsageError, os_errors, printable


@click.command(
    "export",
    short_help="Write a trace in another tool's format.",
    epilog=examples(
        "imgtool trace export numpy --format nydus-optimize -o optimize.json",
        "imgtool trace export numpy --format stargz-record > record.json",
        "imgtool trace export run.jsonl.part --format paths --image debian-full",
    ),
)
@click.argument("trace", metavar="NAME|FILE")
@click.option("--format", "kind", required=True, metavar="FORMAT", help="See below.")
@click.option("--output", "-o", metavar="FILE", help="Where to write it [default: standard output].")
@click.option("--image", metavar="NAME", help="Of which the trace is: fills in paths that it lacks.")
@store_option
@json_option
def command(
    trace: str,
    kind: str,
    output: str | None,
    image: str | None,
    store: str | None,
    root: str | None,
    as_json: bool,
) -> None:
    """Write a trace, or the plan in a FILE, for another tool.

    Formats: nydus-optimize and ranges have paths with ranges; stargz-record, cvmfs-spec, paths, nydus-list and
    overlaybd have paths in the order of first access. What a format can't express is left out, counted and warned of.
    """
    from imgtool.tracefile import image_of, load_trace, trace_path, with_paths
    from layerstore.staging import write_file
    from prefetch.plans.format import MAGIC as PLAN
    from prefetch.trace.exchange.formats import write_parts
    from prefetch.trace.exchange.parts import parts_of_plan, parts_of_trace

    if as_json and output is None:
        raise UsageError("--json says what was written to a file: name it with --output")
    path = trace_path(trace, root)
    if _begins(path, b'{"magic":"%b"' % PLAN.encode()):
        from layerstore.staging import read_file
        from prefetch.plans.format import PLAN_BYTES, parse_plan

        with os_errors(printable(path)):
            parts = parts_of_plan(parse_plan(read_file(path, PLAN_BYTES), printable(path)))
    else:
        loaded = load_trace(trace, root)
        found = image_of(loaded, image, store, root) if image is not None else None
        parts = parts_of_trace(loaded if found is None else with_paths(loaded, found, store, root))
    exported = write_parts(parts, kind)
    if output is None:
        sys.stdout.buffer.write(exported.data)
        sys.stdout.buffer.flush()
    else:
        with os_errors(f"write {printable(output)}"):
            write_file(os.path.abspath(output), exported.data)
    if exported.skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in exported.skipped.items())
        sample = f", such as {', '.join(exported.sample)}" if exported.sample else ""
        render.warn(f"left out, since {kind} can't have them: {reasons}{sample}")
    if as_json:
        render.print_json(
            {
                "path": printable(os.path.abspath(output or "")),
                "format": kind,
                "entries": exported.entries,
                "bytes_file": len(exported.data),
                "skipped": dict(exported.skipped),
                "skipped_sample": list(exported.sample),
            }
        )


def _begins(path: str, start: bytes) -> bool:
    with os_errors(printable(path)), open(path, "rb") as stream:
        return stream.read(len(start)) == start
