"""``imgtool plan export``."""

from __future__ import annotations

import os
import sys

import click

from imgtool import render
from imgtool.options import examples, json_option, root_option
from imgtool.planfile import load_plan
from layerstore.errors import UsageError, os_errors, printable
from layerstore.staging import write_file


@click.command(
    "export",
    short_help="Write a plan to a file.",
    epilog=examples("imgtool plan export numpy -o numpy.json", "imgtool plan export numpy | jq .score"),
)
@click.argument("plan", metavar="NAME|FILE")
@click.option("--output", "-o", metavar="FILE", help="Where to write it [default: standard output].")
@root_option
@json_option
def command(plan: str, output: str | None, root: str | None, as_json: bool) -> None:
    """Write a plan as it is, one JSON document. `trace export` writes it in other tools' formats."""
    if as_json and output is None:
        raise UsageError("--json says what was written to a file: name it with --output")
    loaded = load_plan(plan, root)
    data = loaded.to_bytes()
    if output is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    with os_errors(f"write {printable(output)}"):
        write_file(os.path.abspath(output), data)
    if as_json:
        render.print_json(
            {
                "name": loaded.name,
                "path": printable(os.path.abspath(output)),
                "plan": str(loaded.digest),
                "bytes_file": len(data),
            }
        )
