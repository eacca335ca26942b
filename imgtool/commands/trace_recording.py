"""``imgtool trace start`` and ``imgtool trace stop``: begin and end the trace of a sandbox that stands."""

from __future__ import annotations

import click

from imgtool import render, service_start
from imgtool.options import json_option, root_option, root_path
from layerstore.errors import printable
from overlay.privilege import require_root
from overlay.service.request import check_file, check_id


@click.command("start", short_help="Record what a sandbox reads.")
@click.argument("identifier", metavar="ID")
@click.option("--name", metavar="NAME", help="Of the trace [default: that of the sandbox].")
@root_option
@json_option
def start(identifier: str, name: str | None, root: str | None, as_json: bool) -> None:
    """Record what sandbox ID reads from now on. It is mounted anew for that, so nobody may be in it.

    What it has read before is seen again when it is read again. `imgtool up --record` records from the start.
    """
    require_root()
    if name is not None:
        check_file(name, "trace")
    with service_start.needed(root_path(root)) as client:
        recording = client.start_trace(check_id(identifier), name)
    if as_json:
        render.print_json(recording.raw)
    else:
        render.print_line(f"{recording.sandbox}  {printable(recording.path)}")


@click.command("stop", short_help="End the trace of a sandbox.")
@click.argument("identifier", metavar="ID")
@root_option
@json_option
def stop(identifier: str, root: str | None, as_json: bool) -> None:
    """End the trace of sandbox ID, which goes on. `imgtool down` ends it, too."""
    require_root()
    with service_start.needed(root_path(root)) as client:
        trace = client.stop_trace(check_id(identifier))
    if as_json:
        render.print_json(trace.raw)
        return
    cut = "" if trace.complete else ", cut off: its recorder ended before"
    render.print_line(f"{printable(trace.path)}  {trace.accesses} accesses, {render.size(trace.bytes)}{cut}")
