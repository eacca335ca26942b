"""``imgtool trace import``."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from imgtool import render
from imgtool.options import examples, json_option, root_path, store_option
from layerstore.errors import ConflictError, UsageError, os_errors, printable

if TYPE_CHECKING:
    from prefetch.trace.exchange.resolving import ImportReport

_STANDARD_INPUT = "-"


@click.command(
    "import",
    short_help="Make a trace of another tool's list or log.",
    epilog=examples(
        "imgtool trace import prefetch.txt --format nydus-list --image debian-full",
        "strace -f -y -ttt -o run.log python3 -c 'import numpy'",
        "imgtool trace import run.log --image debian-full --name numpy",
        "imgtool trace import old.jsonl --image debian-full:next --name numpy-next",
        "find /usr/lib/python3 -name '*.pyc' | imgtool trace import - --image debian-full --name python",
    ),
)
@click.argument("file")
@click.option("--format", "kind", default="auto", metavar="FORMAT", help="See below [default: auto, found out].")
@click.option("--image", "image", required=True, metavar="NAME", help="The image that paths are looked up in.")
@click.option("--name", metavar="NAME", help="Of the trace [default: the file's].")
@click.option("--strip", metavar="DIR", default="", help="Take DIR off paths that begin with it.")
@store_option
@json_option
def command(
    file: str, kind: str, image: str, name: str | None, strip: str, store: str | None, root: str | None, as_json: bool
) -> None:
    """Look up what FILE (- is standard input) names in an image, and keep it as a trace.

    Formats: imgtool, nydus-optimize, stargz-record, nri-csv, ranges, cvmfs-trace, strace, cvmfs-spec, stargz-globs,
    paths, nydus-list, nri-list, overlaybd; all but the last three are found out. The manual says what each is.

    Symbolic links are followed inside the image. What the image lacks, and lines that were skipped, are counted.
    """
    from imgtool.tracefile import target_of
    from prefetch.trace.exchange.formats import read_listing
    from prefetch.trace.exchange.resolving import resolve
    from prefetch.trace.traces import Traces, check_trace_name

    name = check_trace_name(name or _name_of(file))
    what = "standard input" if file == _STANDARD_INPUT else printable(file)
    found, listing = read_listing(_data(file, what), kind, what, strip=os.fsencode(strip))
    with target_of(image, store, root) as target:
        trace, report = resolve(listing, target.places, format=found.name, image=image, manifest=target.manifest)
    if not report.matched:
        raise ConflictError(
            f"{what}: none of its {report.entries} entries is in image {image!r}, such as "
            f"{', '.join(report.missing_sample)}; name the right image, or --strip what is before its root"
        )
    path = Traces(root_path(root)).save(name, trace)
    if as_json:
        render.print_json(_document(name, path, report))
    else:
        _print(name, report)


def _data(file: str, what: str) -> bytes:
    from layerstore.staging import read_file
    from prefetch.trace.exchange.strace import LOG_BYTES as most

    with os_errors(f"read {what}"):
        if file == _STANDARD_INPUT:
            return sys.stdin.buffer.read(most + 1)
        return read_file(file, most)


def _name_of(file: str) -> str:
    name = os.path.basename(file).partition(".")[0]
    if file == _STANDARD_INPUT or not name:
        raise UsageError("the trace has to have a name: give it with --name")
    return name


def _document(name: str, path: str, report: ImportReport) -> dict[str, object]:
    return {
        "name": name,
        "path": printable(path),
        "format": report.format,
        "skipped": dict(report.skipped),
        "entries": report.entries,
        "matched": report.matched,
        "missing": report.missing,
        "missing_sample": list(report.missing_sample),
        "path_rate": round(report.path_rate, 4),
        "byte_rate": round(report.byte_rate, 4),
        "directories": report.directories,
        "files": report.files,
        "inline": report.inline,
        "excluded": report.excluded,
        "repeated": report.repeated,
        "accesses": report.accesses,
        "bytes": report.bytes,
        "bytes_wanted": report.bytes_wanted,
        "bytes_matched": report.bytes_matched,
        "unsized": report.unsized,
    }


def _print(name: str, report: ImportReport) -> None:
    render.print_line(
        f"{name}: {report.accesses} accesses, {render.size(report.bytes)} of {report.files} files, from {report.format}"
    )
    missing = f"; not there: {', '.join(report.missing_sample)}" if report.missing else ""
    more = ", …" if report.missing > len(report.missing_sample) else ""
    render.print_line(
        f"  in the image: {report.matched} of {report.entries} entries ({report.path_rate:.1%}), "
        f"{report.byte_rate:.1%} of the bytes{missing}{more}"
    )
    for count, words in (
        (report.inline, "files lie in the metadata image: nothing to fetch"),
        (report.directories, "entries are directories, of which this format asks nothing"),
        (report.excluded, "files are excluded"),
        (report.repeated, "ranges came again"),
    ):
        if count:
            render.print_line(f"  {count} {words}")
    if report.skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in report.skipped.items())
        render.print_line(f"  skipped lines: {reasons}")
