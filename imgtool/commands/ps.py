"""``imgtool ps``."""

from __future__ import annotations

import time

import click

from imgtool import render
from imgtool.options import examples, json_option, root_option, root_path
from overlay.sandbox import Sandboxes


@click.command(
    "ps",
    short_help="List sandboxes.",
    epilog=examples("imgtool ps", "imgtool ps --json | jq -r .[].id"),
)
@root_option
@json_option
def command(root: str | None, as_json: bool) -> None:
    """List the sandboxes of this node."""
    sandboxes = Sandboxes(root_path(root))
    listed = [(sandbox, sandboxes.stands(sandbox)) for sandbox in sandboxes.list()]
    if as_json:
        render.print_json([{**sandbox.to_json(), "mounted": stands} for sandbox, stands in listed])
        return
    render.print_table(
        ("ID", "IMAGE", "MODE", "STATE", "AGE", "ROOTFS"),
        [
            (
                sandbox.id,
                str(sandbox.state.image.get("name", "")),
                sandbox.state.mode + (" ro" if sandbox.state.read_only else ""),
                "up" if stands else "not mounted",
                _age(sandbox.state.created),
                sandbox.rootfs,
            )
            for sandbox, stands in listed
        ],
    )


def _age(created: int) -> str:
    seconds = max(0, int(time.time()) - created)
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"
