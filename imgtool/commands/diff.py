"""``imgtool diff``."""

from __future__ import annotations

import click

from imgtool import render
from imgtool.exitcodes import ExitCode
from imgtool.options import examples, json_option, open_store, store_option
from layerstore.content import same_content
from layerstore.errors import printable
from layerstore.image import load_image
from layerstore.opened import open_tree
from layerstore.tree.difference import difference

_SIGN = {"added": "+", "removed": "-", "changed": "~"}


@click.command(
    "diff",
    short_help="Show how two images differ.",
    epilog=examples("imgtool diff repo repo2", "imgtool diff repo repo2 --json"),
)
@click.argument("old")
@click.argument("new")
@store_option
@json_option
def command(old: str, new: str, store: str | None, root: str | None, as_json: bool) -> int:
    """Show what image NEW adds to, removes from and changes in OLD, path by path.

    The exit code is 0 where they are equal and 12 where they differ.
    """
    source = open_store(store, root)
    with open_tree(source, load_image(source, old)) as before, open_tree(source, load_image(source, new)) as after:
        changes = list(difference(before, after, same_content))
    if as_json:
        render.print_json(
            [
                {
                    "path": "/" + printable(change.path),
                    "change": change.kind,
                    "what": list(change.what),
                }
                for change in changes
            ]
        )
    else:
        for change in changes:
            what = f"  ({', '.join(list(change.what))})" if change.what else ""
            render.print_line(f"{_SIGN[change.kind]} /{printable(change.path)}{what}")
    return ExitCode.FINDINGS if changes else ExitCode.OK
