"""``imgtool gc``."""

from __future__ import annotations

import click

from imgtool import progress, render
from imgtool.options import examples, json_option, store_option, whole_store
from layerstore.store.collect import GRACE_SECONDS, collect, plan_collection


@click.command(
    "gc",
    short_help="Delete what no name reaches.",
    epilog=examples("imgtool gc --dry-run", "imgtool gc", "imgtool gc --grace 0 --json"),
)
@click.option("--dry-run", is_flag=True, help="Say what would be deleted; delete nothing.")
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=GRACE_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="Keep what is younger, by the store's own clock.",
)
@click.option("--force", is_flag=True, help="Also where no name is left at all.")
@store_option
@json_option
def command(dry_run: bool, grace: float, force: bool, store: str | None, root: str | None, as_json: bool) -> None:
    """Delete blobs that no name and no lease reaches, plans of layers that no image has, and what dead writers left.

    Any error while finding out what is reachable stops it before anything is deleted. It may run beside conversions
    and copies, needs no free space, and can be interrupted at any time.
    """
    target = whole_store(store, root)
    plan = plan_collection(target, grace=grace, force=force)
    document: dict[str, object] = {
        "dry_run": dry_run,
        "references": plan.references,
        "kept_blobs": plan.kept,
        "kept_bytes": plan.kept_bytes,
        "young_blobs": len(plan.young),
    }
    if not dry_run and not getattr(target, "exclusive", True):
        render.warn(f"{target.location} doesn't tell who was first: collect only while nobody publishes there")
    if dry_run:
        doomed, leftovers = plan.doomed, plan.leftovers
        plans = tuple(reference.name for reference in plan.orphans)
    else:
        with progress.shown() as drawn:
            result = collect(target, plan, progress=drawn)
        doomed, leftovers, plans = result.deleted, result.leftovers, result.orphans
        document["spared_blobs"] = len(result.spared)
    doomed_bytes = sum(blob.size for blob in doomed)
    document |= {
        "deleted_blobs": [str(blob.digest) for blob in doomed],
        "deleted_bytes": doomed_bytes,
        "leftover_bytes": leftovers,
        "plans_dropped": list(plans),
    }
    if as_json:
        render.print_json(document)
        return
    verb = "would delete" if dry_run else "deleted"
    render.print_line(
        f"{verb} {len(doomed)} blob(s), {render.size(doomed_bytes)}, and {render.size(leftovers)} of leftovers; "
        f"{plan.kept} blob(s), {render.size(plan.kept_bytes)}, are reachable by {plan.references} name(s)"
    )
    if plans:
        render.print_line(f"{verb} the plan(s) of {len(plans)} layer(s) that no image has any more")
    if plan.young:
        render.print_line(f"{len(plan.young)} unreachable blob(s) are younger than {grace:g} s and were kept")
