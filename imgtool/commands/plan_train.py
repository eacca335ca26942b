"""``imgtool plan train``."""

from __future__ import annotations

import click

from imgtool import render
from imgtool.learning import figures, link_of, load_runs, lost, print_remapped, runs_options
from imgtool.options import examples, existing_store, json_option, root_path, store_option
from imgtool.quantity import SIZE
from layerstore.errors import ConflictError, printable
from prefetch.plans.format import Plan
from prefetch.plans.published import publish as publish_plan
from prefetch.plans.shelf import Shelf


@click.command(
    "train",
    short_help="Learn a plan from traces of several runs.",
    epilog=examples(
        "imgtool plan train numpy --from run-1 run-2 run-3",
        "imgtool plan train numpy --from traces/numpy-*.jsonl --image debian-full --publish",
        "imgtool plan train numpy --from run-1 run-2 --budget 40M --latency 5ms --bandwidth 25M --json",
        "imgtool plan train all --from shell-* gcc-* --learner cluster --holdout 2",
    ),
)
@click.argument("name")
@runs_options
@click.option(
    "--learner", default="auto", metavar="LEARNER", help="One, or a family of them [default: auto, the best of all]."
)
@click.option("--budget", type=SIZE, metavar="SIZE", help="At most so many bytes to fetch, compressed.")
@click.option(
    "--holdout",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="K",
    help="Runs that are held out at a time, to score the plan on.",
)
@click.option("--publish", is_flag=True, help="Publish it to the store too.")
@store_option
@json_option
def command(
    name: str,
    traces: tuple[str, ...],
    more: tuple[str, ...],
    image: str | None,
    latency: float | None,
    bandwidth: int | None,
    learner: str,
    budget: int | None,
    holdout: int,
    publish: bool,
    store: str | None,
    root: str | None,
    as_json: bool,
) -> None:
    """Learn from traces what runs need and when, and keep it as plan NAME, which is replaced where it exists.

    Every learner makes a plan from all runs but some and is scored on these, by simulated starts, until each run was
    held out; the best makes the plan. A single trace gives a plan without a score.
    """
    from prefetch.learn.train import train  # with what learns, which no other command needs

    shelf = Shelf(root_path(root))
    shelf.path(name)  # a wrong name is said before the work
    target = existing_store(store, root) if publish else None
    runs = load_runs([*traces, *more], image=image, store=store, root=root)
    for given, report in runs.remapped:
        if not report.rate:
            raise ConflictError(f"nothing that trace {given!r} reads is in image {image!r}: leave it out")
    plan = train(
        name,
        runs.traces,
        learner=learner,
        budget=budget,
        link=link_of(latency, bandwidth),
        sizes=runs.sizes,
        holdout=holdout,
    )
    path = shelf.save(plan)
    if target is not None:
        publish_plan(target, plan)
    if as_json:
        render.print_json(
            {
                "name": name,
                "path": printable(path),
                "plan": str(plan.digest),
                "published": target.location if target is not None else None,
                "layers": [str(part.metadata) for part in plan.parts],
                "ranges": sum(len(part.ranges) for part in plan.parts),
                "bytes": sum(part.bytes for part in plan.parts),
                "remapped": [{"trace": given, **report.to_json()} for given, report in runs.remapped],
                "learned": dict(plan.learned),
                "score": dict(plan.score),
            }
        )
        return
    count, size = sum(len(part.ranges) for part in plan.parts), sum(part.bytes for part in plan.parts)
    render.print_line(
        f"{name}: {count} ranges of {len(plan.parts)} layer(s), {render.size(size)}, "
        f"learned from {plan.learned.get('runs')} run(s) by {plan.learned.get('learner')}"
    )
    print_remapped(runs.remapped)
    _print_score(plan)
    if target is not None:
        render.print_line(f"  published to {target.location}")


def _print_score(plan: Plan) -> None:
    note = plan.learned.get("note")
    if note:
        render.print_line(f"  {note}")
    for label, text in figures(plan.score):
        render.print_line(f"{label:>12}  {text}")
    if others := lost(plan.learned):
        render.print_line(f"{'lost':>12}  {others}")
