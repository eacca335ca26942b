"""``imgtool down``."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from imgtool import render, service_start
from imgtool.options import examples, json_option, root_option, root_path
from layerstore.errors import UsageError, printable
from overlay.privilege import require_root
from overlay.service.answers import LeftoverInfo, RemovalInfo
from overlay.service.client import Client
from overlay.service.request import check_id


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
    require_root()
    ids = tuple(dict.fromkeys(map(check_id, ids)))
    client = _client(root_path(root), ids)
    if client is None:
        removals: Sequence[RemovalInfo] = [RemovalInfo(name, False, (), (), {}) for name in ids]
        leftovers = [] if ids else _recovered(root_path(root))
    else:
        with client:
            removals = client.remove_all() if everything else [client.remove(name) for name in ids]
            leftovers = [] if ids else client.recover()
    for removal in removals:
        for holder in removal.holders:
            render.warn(f"{removal.id}: {holder} still uses its files; they go when it ends")
    if as_json:
        render.print_json(
            {
                "removed": [
                    {
                        "id": removal.id,
                        "existed": removal.existed,
                        "stopped": list(removal.stopped),
                        "trace": removal.raw.get("trace"),
                    }
                    for removal in removals
                ],
                "leftovers": [{"kind": item.kind, "path": item.path, "action": item.action} for item in leftovers],
            }
        )
        return
    for removal in removals:
        trace = "" if removal.trace is None else f", trace {printable(removal.trace.path)}"
        render.print_line(f"{removal.id} {'removed' if removal.existed else 'was gone already'}{trace}")
    for item in leftovers:
        render.print_line(f"{item.kind} {item.path}: {item.action}")
    if leftovers_only and not leftovers:
        render.print_line("no leftovers")


def _client(root: str, ids: Sequence[str]) -> Client | None:
    """The service, which is started only where there is something to remove."""
    client = service_start.running(root)
    if client is not None:
        return client
    sandboxes = f"{root}/sandboxes"
    there = any(os.path.lexists(f"{sandboxes}/{name}") for name in ids) if ids else _has_entries(sandboxes)
    return service_start.service(root) if there else None


def _has_entries(directory: str) -> bool:
    try:
        with os.scandir(directory) as entries:
            return any(True for _ in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _recovered(root: str) -> list[LeftoverInfo]:
    """What is left over where there are no sandboxes and no service: stray mounts, layers, loop devices."""
    from overlay.sandbox import Sandboxes  # with all that mounting needs, which the service has otherwise

    return [LeftoverInfo(item.kind, item.path, item.action, {}) for item in Sandboxes(root).recover()]
