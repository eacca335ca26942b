"""``imgtool trace rm``."""

from __future__ import annotations

import click

from imgtool import render
from imgtool.options import examples, json_option, root_option, root_path


@click.command(
    "rm", short_help="Remove traces.", epilog=examples("imgtool trace rm numpy", "imgtool trace rm run-1 run-2")
)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@root_option
@json_option
def command(names: tuple[str, ...], root: str | None, as_json: bool) -> None:
    """Remove traces; plans that were learned from them stay. One that is being recorded has to be stopped first."""
    from prefetch.trace.traces import Traces  # with what reads traces, which `imgtool trace start` doesn't need

    traces = Traces(root_path(root))
    for name in names:
        traces.path(name)  # all of them first: a wrong name removes nothing
    for name in dict.fromkeys(names):
        traces.remove(name)
        if not as_json:
            render.print_line(f"removed {name}")
    if as_json:
        render.print_json([{"name": name} for name in dict.fromkeys(names)])
