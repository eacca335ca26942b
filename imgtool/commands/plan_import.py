"""``imgtool plan import``."""

from __future__ import annotations

from dataclasses import replace

import click

from imgtool import render
from imgtool.options import examples, json_option, root_option, root_path
from layerstore.errors import printable
from prefetch.plans.shelf import Shelf, read_plan


@click.command(
    "import",
    short_help="Put a plan from a file on this node's shelf.",
    epilog=examples("imgtool plan import numpy.json", "imgtool plan import /mnt/plans/numpy.json --name numpy-theirs"),
)
@click.argument("file")
@click.option("--name", metavar="NAME", help="What it is to be called here [default: as the file says].")
@root_option
@json_option
def command(file: str, name: str | None, root: str | None, as_json: bool) -> None:
    """Take the plan in FILE over; a plan that has its name is replaced. Other tools' lists are for `trace import`."""
    plan = read_plan(file)
    if name is not None:
        plan = replace(plan, name=name)
    path = Shelf(root_path(root)).save(plan)
    if as_json:
        render.print_json({"name": plan.name, "path": printable(path), "plan": str(plan.digest)})
    else:
        render.print_line(f"{plan.name}: {len(plan.parts)} layer(s), {plan.digest}")
