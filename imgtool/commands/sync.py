"""``imgtool sync``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import click

from imgtool import coverage, progress, render
from imgtool.exitcodes import ExitCode, of_error
from imgtool.options import examples, jobs_option, json_option, write_store
from imgtool.quantity import SIZE
from layerstore.digest import Digest
from layerstore.errors import ImgtoolError, NotFoundError, UsageError
from layerstore.store.memory import MemoryStore
from layerstore.store.opening import open_store
from layerstore.store.protocol import Store
from layerstore.sync.contents import Unreadable, survey
from layerstore.sync.plan import Move, State, SyncPlan, conflict, plan_sync
from layerstore.sync.run import Outcome, SyncReport, sync
from layerstore.sync.second_site import SecondSite, choose_images
from layerstore.sync.selection import select
from layerstore.sync.usage import read_usage


@click.command(
    "sync",
    short_help="Copy many images to another store, or those that matter most.",
    epilog=examples(
        "imgtool sync ./store s3://bucket/images",
        "imgtool sync ./store /mnt/shared/store --select 'team/*' --exclude '*-old' --dry-run",
        "imgtool sync https://images.example.com/store ./store --select repo-env",
        "imgtool sync ./store s3://site2/images --budget 30T --tasks usage.csv --curve curve.svg",
    ),
)
@click.argument("source", metavar="STORE")
@click.argument("destination", metavar="STORE2")
@click.option("--select", "selected", multiple=True, metavar="GLOB", help="Only names that match [default: all].")
@click.option("--exclude", "excluded", multiple=True, metavar="GLOB", help="Not names that match.")
@click.option("--dry-run", is_flag=True, help="Say what is missing; copy nothing.")
@click.option("--replace", is_flag=True, help="Move names, and plans, where STORE2 has them for something else.")
@click.option("--budget", type=SIZE, metavar="BYTES", help="Choose images that fit into so much, each blob once.")
@click.option("--tasks", metavar="FILE", help="With --budget: CSV with columns image, tasks and perhaps eligible.")
@click.option("--curve", metavar="FILE", help="With --budget: draw what other budgets cover (.svg, .png, .pdf).")
@jobs_option
@json_option
def command(
    source: str,
    destination: str,
    selected: tuple[str, ...],
    excluded: tuple[str, ...],
    dry_run: bool,
    replace: bool,
    budget: int | None,
    tasks: str | None,
    curve: str | None,
    jobs: int,
    as_json: bool,
) -> int:
    """Copy images, and the plans of their layers, from STORE to STORE2: only what is missing there, each blob once.

    Nothing is deleted in STORE2. After an image that fails the next ones are copied; the exit code is that of the first
    failure. What has arrived stays: run it again to go on.

    With --budget, the images are chosen that cover most tasks of a table in so many bytes; what the table says is not
    eligible to leave stays.
    """
    if (budget is None) != (tasks is None) or (curve is not None and budget is None):
        raise UsageError("--budget BYTES and --tasks FILE go together, and --curve with them")
    if curve is not None:
        from imgtool.pictures import picture_format

        picture_format(curve)
    site: SecondSite | None = None
    with progress.shown() as drawn:
        origin = open_store(source)  # first: where there is no source, no destination is made
        if budget is not None and tasks is not None:
            site, surveyed = choose_images(origin, read_usage(tasks), budget, selected, excluded)
        else:
            selection = select(origin, selected, excluded)
            surveyed = survey(origin, selection.names, selection.listed)
        if site is not None and curve is not None:
            coverage.draw(curve, site)
        result: SyncPlan | SyncReport
        if dry_run:
            result = plan_sync(surveyed, origin, _readable(destination), replace=replace)
        else:
            target = write_store(destination, create=True)
            result = sync(surveyed, origin, target, replace=replace, jobs=jobs, progress=drawn)
    images, plans, failure = _planned(result) if isinstance(result, SyncPlan) else _done(result)
    if as_json:
        render.print_json(
            {
                "dry_run": dry_run,
                "images": images,
                "plans": plans,
                "blobs": result.blobs,
                "bytes": result.bytes,
                "selection": None if site is None else coverage.document(site),
            }
        )
    else:
        if site is not None:
            coverage.show(site)
        _show(images, plans, result.blobs, result.bytes, dry_run=dry_run)
    return ExitCode.OK if failure is None else of_error(failure)


def _readable(destination: str) -> Store:
    """The destination as it is; where there is none, an empty one."""
    try:
        return open_store(destination)
    except NotFoundError:
        return MemoryStore()


_Rows = list[dict[str, Any]]


def _planned(plan: SyncPlan) -> tuple[_Rows, _Rows, ImgtoolError | None]:
    """Images, plans, and the failure that the exit code is of."""

    def rows(moves: Sequence[Move], unreadable: Sequence[Unreadable]) -> _Rows:
        found = [_row(each.name, each.contents.target.digest, each.state, each.blobs, each.bytes) for each in moves]
        return found + [_row(each.name, None, "failed", error=each.error) for each in unreadable]

    images, plans = rows(plan.images, plan.unreadable), rows(plan.plans, plan.unreadable_plans)
    failures: list[ImgtoolError] = []
    for row, move in zip(images, plan.images, strict=False):
        if move.state is State.CONFLICT:
            failures.append(conflict(move, plan.destination))
            row["error"] = str(failures[-1])
    failures += [each.error for each in plan.unreadable]
    return images, plans, failures[0] if failures else None


def _done(report: SyncReport) -> tuple[_Rows, _Rows, ImgtoolError | None]:
    def rows(outcomes: Sequence[Outcome]) -> _Rows:
        return [_row(each.name, each.manifest, each.done, each.blobs, each.bytes, each.error) for each in outcomes]

    return rows(report.images), rows(report.plans), report.failure


def _row(
    tag: str, manifest: Digest | None, state: str, blobs: int = 0, size: int = 0, error: ImgtoolError | None = None
) -> dict[str, Any]:
    return {
        "tag": tag,
        "manifest": None if manifest is None else str(manifest),
        "state": str(state),
        "blobs": blobs,
        "bytes": size,
        "error": None if error is None else str(error),
    }


def _show(images: _Rows, plans: _Rows, blobs: int, size: int, *, dry_run: bool) -> None:
    for row in images:
        if row["error"] is not None:
            render.warn(f"{row['tag']} {'will not be' if dry_run else 'was not'} copied: {row['error']}")
    for row in plans:
        if row["error"] is not None:
            render.warn(f"a plan {'will be' if dry_run else 'was'} left behind: {row['error']}")
    moved = [row for row in images if row["state"] in ("new", "replaced", "copied")]
    if dry_run and moved:
        cells = [(row["tag"], row["state"], str(row["blobs"]), render.size(row["bytes"])) for row in moved]
        render.print_table(("IMAGE", "", "BLOBS", "BYTES"), cells, right=frozenset({2, 3}))
    counts = Counter(row["state"] for row in images)
    with_them = sum(row["state"] in ("new", "replaced", "copied") for row in plans)
    text = f"{len(moved)} image(s){' to copy' if dry_run else ' copied'}, {blobs} blob(s), {render.size(size)}"
    text += f", {with_them} plan(s) with them" if with_them else ""
    text += f"; {counts['present']} were there already"
    failed = counts["failed"] + counts["conflict"]
    text += f"; {failed} failed" if failed else ""
    text += f"; {counts['skipped']} were not tried" if counts["skipped"] else ""
    render.print_line(text)
