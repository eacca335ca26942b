"""``imgtool down``."""

from __future__ import annotations

import click

from imgtool import render
from imgtool.options import examples, json_option, root_option, root_path
from layerstore.errors import UsageError
from overlay.node import Node


@click.command(
    "down",
    short_help="Remove sandboxes.",
    epilog=examples("imgtool down 3fa9c1d2e4b5", "imgtool down --leftovers", "imgtool down --all"),
)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--all", "everything", is_flag=True, help="Every sandbox of this node, and all leftovers.")
@click.option("--leftovers", "leftovers_only", is_flag=True, help="What crashes left: mounts, uppers, loop devices.")
@root_option
@json_option
def command(ids: tuple[str, ...], everything: bool, leftovers_only: bool, root: str | None, as_json: bool) -> None:
    """Stop what runs in the sandboxes, unmount and delete them. One that is gone already is fine.

    --leftovers clears parts of sandboxes whose making or removal was killed, and touches no sandbox that is whole.
    """
    if bool(ids) + everything + leftovers_only != 1:
        raise UsageError("name sandboxes, or say --all or --leftovers")
    node = Node(root_path(root))
    sandboxes = node.sandboxes
    names = [sandbox.id for sandbox in sandboxes.list()] if everything else list(ids)
    removals = [sandboxes.remove(name) for name in names]
    leftovers = [] if ids else node.recover()
    for removal in removals:
        for holder in removal.holders:
            render.warn(f"{removal.id}: {holder} still uses its files; they go when it ends")
    if as_json:
        render.print_json(
            {
                "removed": [
                    {"id": removal.id, "existed": removal.existed, "stopped": list(removal.stopped)}
                    for removal in removals
                ],
                "leftovers": [{"kind": item.kind, "path": item.path, "action": item.action} for item in leftovers],
            }
        )
        return
    for removal in removals:
        render.print_line(f"{removal.id} {'removed' if removal.existed else 'was gone already'}")
    for item in leftovers:
        render.print_line(f"{item.kind} {item.path}: {item.action}")
    if leftovers_only and not leftovers:
        render.print_line("no leftovers")
