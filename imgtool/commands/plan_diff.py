"""``imgtool plan diff``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from imgtool import render
from imgtool.options import examples, json_option, root_option
from imgtool.planfile import load_plan
from layerstore.errors import printable

if TYPE_CHECKING:
    from prefetch.learn.describe import FileRow

_FILES = 10
"""Files of each side that are shown; --json has all."""


@click.command(
    "diff",
    short_help="Show how two plans differ.",
    epilog=examples("imgtool plan diff numpy numpy-old", "imgtool plan diff numpy.json numpy --json | jq .frames"),
)
@click.argument("old", metavar="A")
@click.argument("new", metavar="B")
@root_option
@json_option
def command(old: str, new: str, root: str | None, as_json: bool) -> None:
    """Compare plans A and B, names or files: bytes of each layer, frames, and files that only one of them fetches."""
    from prefetch.learn.describe import compare_plans  # with what learns, which few commands need

    found = compare_plans(load_plan(old, root), load_plan(new, root))
    both, only_old, only_new = found.frames
    if as_json:
        render.print_json(
            {
                "same": found.same,
                "layers": [
                    {
                        "layer": str(row.layer),
                        "bytes_both": row.both,
                        "bytes_only_a": row.only_first,
                        "bytes_only_b": row.only_second,
                    }
                    for row in found.layers
                ],
                "frames": {"both": both, "only_a": only_old, "only_b": only_new, "moved": found.moved},
                "files_only_a": [_file(row) for row in found.only_first],
                "files_only_b": [_file(row) for row in found.only_second],
            }
        )
        return
    render.print_table(
        ("LAYER", "IN BOTH", "ONLY A", "ONLY B"),
        [
            (row.layer.hex[:12], render.size(row.both), render.size(row.only_first), render.size(row.only_second))
            for row in found.layers
        ],
        right=frozenset({1, 2, 3}),
    )
    render.print_line(
        f"frames: {both} in both, {only_old} only in A, {only_new} only in B; {found.moved} due at another time"
    )
    for side, rows in (("A", found.only_first), ("B", found.only_second)):
        for row in rows[:_FILES]:
            render.print_line(f"only {side}  {render.size(row.bytes):>8}  {_path(row)}")
        if len(rows) > _FILES:
            render.print_line(f"only {side}  … and {len(rows) - _FILES} more files; --json lists all")


def _path(row: FileRow) -> str:
    if row.path is None:
        return "ranges of no known file"
    return row.path if row.path.isprintable() else printable(row.path)


def _file(row: FileRow) -> dict[str, object]:
    return {"path": row.path, "bytes": row.bytes, "due": row.due}
