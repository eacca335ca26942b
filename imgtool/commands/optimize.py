"""``imgtool optimize``."""

from __future__ import annotations

import click

from imgtool import progress, render
from imgtool.options import examples, existing_store, jobs_option, json_option, store_option
from imgtool.planfile import chance, check_plan_targets, keep_plan, layout_options, load_plan
from layerstore.pack.writer import DEFAULT_LEVEL
from layerstore.relay import Touched
from prefetch.plans.relaid import Optimized, optimize


@click.command(
    "optimize",
    short_help="Lay an image out by a plan: what is read first comes first.",
    epilog=examples(
        "imgtool optimize debian-full --plan numpy --tag debian-numpy --save-plan debian-numpy",
        "imgtool optimize repo-env --plan ./repo.json --min-chance 0.2 --tag repo-env-hot --plan-out hot.json",
    ),
)
@click.argument("name")
@click.option(
    "--plan", required=True, metavar="PLAN", help="What is read first: a file, or a name on this node's shelf."
)
@click.option("--tag", metavar="NAME", help="Name to publish it under; without, it is known by its digest only.")
@layout_options
@click.option("--raw", is_flag=True, help="Store its packs raw too, for --mode direct.")
@click.option("--level", type=click.IntRange(1, 19), default=DEFAULT_LEVEL, show_default=True, help="zstd level.")
@jobs_option
@store_option
@json_option
def command(
    name: str,
    plan: str,
    tag: str | None,
    min_chance: float,
    plan_out: str | None,
    save_plan: str | None,
    raw: bool,
    level: int,
    jobs: int,
    store: str | None,
    root: str | None,
    as_json: bool,
) -> None:
    """Publish image NAME again, with what the plan names in a pack of its own, in the order in which it is needed.

    Files and attributes stay the same, and so do the packs of all the rest. Each layer of which something is planned
    gets a new identity and one more pack; the plan that belongs to it is the old one in other places: keep it with
    --save-plan or --plan-out.
    """
    check_plan_targets(file=plan_out, name=save_plan, root=root)
    planned = load_plan(plan, root)
    target = existing_store(store, root)
    with progress.shown() as drawn:
        done = optimize(
            target,
            name,
            planned,
            tag=tag,
            min_chance=chance(min_chance),
            level=level,
            jobs=jobs,
            raw=raw,
            progress=drawn,
        )
    keep_plan(done.plan, file=plan_out, name=save_plan, root=root)
    if as_json:
        render.print_json(_document(done, tag))
    else:
        _print(done, tag)


def _document(done: Optimized, tag: str | None) -> dict[str, object]:
    report = done.report
    return {
        "manifest": str(report.manifest),
        "tag": tag,
        "layers": [
            {
                "role": layer.after.role.value,
                "before": str(layer.before.metadata),
                "layer": str(layer.after.metadata),
                "packs": [str(pack.digest) for pack in layer.after.packs],
            }
            for layer in report.layers
        ],
        "bytes_hot": report.hot_size,
        "bytes_copied": report.copied_size,
        "bytes_stored": report.stored_size,
        "chunks": report.chunks,
        "matched": report.matched,
        "unmatched": dict(report.unmatched),
        "remapped": done.matched.to_json() if done.matched else None,
        "unlikely": done.unlikely,
        "before": _touched(report.before),
        "after": _touched(report.after),
        "plan": {
            "digest": str(done.plan.digest),
            "ranges": sum(len(part.ranges) for part in done.plan.parts),
        },
    }


def _touched(touched: Touched) -> dict[str, int]:
    return {"frames": touched.frames, "reads": touched.reads, "bytes": touched.size}


def _print(done: Optimized, tag: str | None) -> None:
    report = done.report
    total = report.matched + sum(report.unmatched.values())
    unlikely = f", {done.unlikely} too unlikely" if done.unlikely else ""
    render.print_line(
        f"{tag or report.manifest}: {report.matched} of {total} planned ranges{unlikely}, "
        f"{render.size(report.hot_size)} in {report.chunks} chunks, come first"
    )
    if done.matched:
        render.print_line(f"  the plan is of another build: {done.matched.rate:.1%} of it are here")
    render.print_line(f"  before: {_costs(report.before)}")
    render.print_line(f"  after:  {_costs(report.after)}")
    render.print_line(
        f"  stored {render.size(report.stored_size)} more, {render.size(report.copied_size)} of data twice; "
        f"manifest {report.manifest}"
    )


def _costs(touched: Touched) -> str:
    return f"{touched.frames} frames, {touched.reads} reads of {render.size(touched.size)}"
