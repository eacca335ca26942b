"""``imgtool trace ls``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from imgtool import render
from imgtool.options import examples, json_option, root_option, root_path
from layerstore.errors import printable

if TYPE_CHECKING:
    from prefetch.trace.traces import TraceFile


@click.command(
    "ls",
    short_help="List the traces of this node.",
    epilog=examples("imgtool trace ls", "imgtool trace ls --json | jq -r .[].name"),
)
@root_option
@json_option
def command(root: str | None, as_json: bool) -> None:
    """List the traces of this node, those that are being recorded or were cut off, too."""
    from prefetch.trace.traces import Traces  # with what reads traces, which `imgtool trace start` doesn't need

    listed = Traces(root_path(root)).list()
    if as_json:
        render.print_json([_document(item) for item in listed])
        return
    render.print_table(
        ("NAME", "STATE", "IMAGE", "MODE", "ORIGIN", "STARTED", "ACCESSES"),
        [
            (
                item.name,
                _state(item),
                printable(item.header.image) if item.header else "",
                item.header.mode if item.header else "",
                item.header.origin if item.header else "",
                item.header.started if item.header else "",
                str(item.accesses),
            )
            for item in listed
        ],
        right=frozenset({6}),
    )


def _state(item: TraceFile) -> str:
    if item.error is not None:
        return item.error
    return "complete" if item.complete else "recording" if item.recording else "cut off"


def _document(item: TraceFile) -> dict[str, object]:
    header = item.header
    return {
        "name": item.name,
        "path": printable(item.path),
        "complete": item.complete,
        "recording": item.recording,
        "image": header.image if header else None,
        "manifest": header.manifest if header else None,
        "mode": header.mode if header else None,
        "origin": header.origin if header else None,
        "started": header.started if header else None,
        "accesses": item.accesses,
        "bytes_file": item.size,
        "error": item.error,
    }
