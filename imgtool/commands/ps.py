"""``imgtool ps``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import click

from imgtool import render, service_start
from imgtool.options import document_of, examples, json_option, root_option, root_path

_NOT_SERVED = "not served: no node service runs, so data that aren't here yet may read as zeros; `imgtool node run`"


@click.command(
    "ps",
    short_help="List sandboxes.",
    epilog=examples("imgtool ps", "imgtool ps --wide", "imgtool ps --json | jq -r .[].id", "watch -n1 imgtool ps"),
)
@click.option("--wide", is_flag=True, help="Also say why each has its mode and backend.")
@root_option
@json_option
def command(wide: bool, root: str | None, as_json: bool) -> None:
    """List the sandboxes of this node.

    LATE is what a sandbox read before it was on the node, and WAITED how long its readers waited for that, all
    together. PREFETCH is how many frames of its plan are here, and how many were read of those fetched for it. Starts
    no service.
    """
    client = service_start.running(root_path(root))
    if client is None:
        listed = _without_service(root_path(root))
    else:
        with client:
            listed = [document_of(sandbox) for sandbox in client.sandboxes()]
    if as_json:
        render.print_json(listed)
        return
    headings = ["ID", "IMAGE", "MODE", "BACKEND", "STATE", "AGE", "LATE", "WAITED", "PREFETCH", "ROOTFS"]
    render.print_table(
        [*headings, "WHY"] if wide else headings,
        [[*_row(sandbox), str(sandbox["why"])] if wide else _row(sandbox) for sandbox in listed],
        right=frozenset({6, 7}),
    )
    for sandbox in listed:
        if ":" in sandbox["condition"]:
            render.print_line(f"{sandbox['id']}: {sandbox['condition']}")


def _row(sandbox: Mapping[str, Any]) -> list[str]:
    demand = sandbox.get("demand") or {}
    return [
        sandbox["id"],
        str(sandbox["image"].get("name", "")),
        sandbox["mode"] + (" ro" if sandbox["read_only"] else ""),
        sandbox["backend"],
        _state(sandbox["condition"]),
        render.span(max(0, time.time() - sandbox["created"])),
        render.size(demand.get("bytes", 0)) if demand.get("frames") else "-",
        f"{demand['waited']:.3g} s" if demand.get("waited") else "-",
        _prefetched(sandbox.get("prefetch") or {}),
        sandbox["rootfs"],
    ]


def _prefetched(prefetch: Mapping[str, Any]) -> str:
    """Such as ``182/190, 97 % used``: frames of the plan that are here, of all; how many were read of those fetched."""
    planned = prefetch.get("planned", 0)
    if not planned:
        return "looking" if prefetch.get("state") == "looking" else "-"
    brought = prefetch["brought"]
    here = brought + prefetch["present"]
    used = f", {100 * (prefetch['used'] + prefetch['late']) // brought} % used" if brought else ""
    failed = f", {prefetch['failed']} failed" if prefetch["failed"] else ""
    return f"{here}/{planned}{used}{failed}"


def _state(condition: str) -> str:
    return "up" if condition == "ok" else condition.partition(":")[0]


def _without_service(root: str) -> list[dict[str, Any]]:
    """What the state directory says."""
    from overlay.sandbox import Sandbox, Sandboxes  # with all that mounting needs, which the service has otherwise

    # A service that ends in an orderly way closes its cache, and leaves only those mounted whose data are all here.
    orderly = os.path.exists(f"{root}/cache/clean")

    def document(sandbox: Sandbox) -> dict[str, Any]:
        receipt = sandbox.state.receipt
        mounted = sandbox.stands
        unserved = sandbox.state.mode == "lazy" and not orderly
        return {
            **sandbox.to_json(),
            "mounted": mounted,
            "backend": receipt.get("backend", "files"),
            "why": receipt.get("why", ""),
            "condition": "not mounted" if not mounted else _NOT_SERVED if unserved else "ok",
            "demand": None,
            "trace": None,
            "prefetch": None,
        }

    return [document(sandbox) for sandbox in Sandboxes(root).list()]
