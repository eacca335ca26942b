"""``imgtool plan ls``."""

from __future__ import annotations

import click

from imgtool import render
from imgtool.learning import percent
from imgtool.options import examples, json_option, root_option, root_path
from layerstore.errors import ImgtoolError, printable
from prefetch.plans.format import Plan
from prefetch.plans.shelf import Shelf


@click.command(
    "ls",
    short_help="List the plans of this node.",
    epilog=examples("imgtool plan ls", "imgtool plan ls --json | jq -r '.[] | select(.gap_closed > 0.9) | .name'"),
)
@root_option
@json_option
def command(root: str | None, as_json: bool) -> None:
    """List the plans of this node by name. What stores said of layers is used too, but has no name here."""
    shelf = Shelf(root_path(root))
    listed: list[tuple[str, Plan | None, str | None]] = []
    for name in shelf.names():
        try:
            listed.append((name, shelf.load(name), None))
        except ImgtoolError as error:
            listed.append((name, None, str(error)))
    if as_json:
        render.print_json([_document(name, plan, error) for name, plan, error in listed])
        return
    render.print_table(
        ("NAME", "IMAGE", "LAYERS", "RANGES", "BYTES", "LEARNER", "RUNS", "GAP CLOSED"),
        [_row(name, plan, error) for name, plan, error in listed],
        right=frozenset({2, 3, 4, 6, 7}),
    )


def _row(name: str, plan: Plan | None, error: str | None) -> tuple[str, ...]:
    if plan is None:
        return name, error or "", "", "", "", "", "", ""
    return (
        name,
        printable(plan.image),
        str(len(plan.parts)),
        str(sum(len(part.ranges) for part in plan.parts)),
        render.size(sum(part.bytes for part in plan.parts)),
        printable(str(plan.learned.get("learner", ""))),
        printable(str(plan.learned.get("runs", ""))),
        percent(plan.score.get("gap_closed")),
    )


def _document(name: str, plan: Plan | None, error: str | None) -> dict[str, object]:
    return {
        "name": name,
        "plan": str(plan.digest) if plan else None,
        "image": plan.image if plan else None,
        "manifest": plan.manifest if plan else None,
        "layers": [str(part.metadata) for part in plan.parts] if plan else [],
        "ranges": sum(len(part.ranges) for part in plan.parts) if plan else 0,
        "bytes": sum(part.bytes for part in plan.parts) if plan else 0,
        "learner": plan.learned.get("learner") if plan else None,
        "runs": plan.learned.get("runs") if plan else None,
        "gap_closed": plan.score.get("gap_closed") if plan else None,
        "error": error,
    }
