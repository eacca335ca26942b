"""``imgtool plan rm``."""

from __future__ import annotations

import click

from imgtool import render
from imgtool.options import examples, json_option, root_option, root_path
from prefetch.plans.shelf import Shelf


@click.command(
    "rm",
    short_help="Remove plans from this node.",
    epilog=examples("imgtool plan rm numpy", "imgtool plan rm numpy-1 numpy-2"),
)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@root_option
@json_option
def command(names: tuple[str, ...], root: str | None, as_json: bool) -> None:
    """Remove plans of this node. What was published stays: `imgtool rm` removes that, by its name in `ls --all`."""
    shelf = Shelf(root_path(root))
    wanted = list(dict.fromkeys(names))
    there = shelf.names()
    for name in wanted:
        if name not in there:
            shelf.load(name)  # says what is wrong with the name; all of them first: a wrong name removes nothing
    for name in wanted:
        shelf.remove(name)
        if not as_json:
            render.print_line(f"removed {name}")
    if as_json:
        render.print_json([{"name": name} for name in wanted])
