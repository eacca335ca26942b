"""``imgtool rm``."""

from __future__ import annotations

import click

from imgtool import render
from imgtool.options import examples, existing_store, json_option, store_option


@click.command(
    "rm",
    short_help="Remove names; gc frees the space.",
    epilog=examples("imgtool rm repo:old", "imgtool rm repo:a repo:b && imgtool gc"),
)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@store_option
@json_option
def command(names: tuple[str, ...], store: str | None, root: str | None, as_json: bool) -> None:
    """Remove names from the store; what no name reaches any more is deleted by gc, after its grace period.

    So are plans of layers that no image has any more. The plan of one layer is removed by its name in `ls --all`.
    """
    target_store = existing_store(store, root)
    targets = {name: target_store.resolve(name) for name in names}  # all of them first: a wrong name removes nothing
    removed = []
    for name, target in targets.items():
        target_store.delete_reference(name, expected=target)
        removed.append({"tag": name, "manifest": str(target.digest)})
        if not as_json:
            render.print_line(f"removed {name} ({target.digest})")
    if as_json:
        render.print_json(removed)
