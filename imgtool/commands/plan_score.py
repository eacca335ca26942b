"""``imgtool plan score``."""

from __future__ import annotations

import click

from imgtool import render
from imgtool.learning import figures, link_of, load_runs, print_remapped, runs_options
from imgtool.options import examples, json_option, store_option
from imgtool.planfile import load_plan
from layerstore.errors import UsageError, printable


@click.command(
    "score",
    short_help="Say how good a plan is for runs that it has not seen.",
    epilog=examples(
        "imgtool plan score numpy --from run-4 run-5",
        "imgtool plan score numpy --from run-4 --latency 5ms --bandwidth 25M --json",
        "imgtool plan score numpy --from run-1 run-2 run-3 --holdout 1",
    ),
)
@click.argument("plan", metavar="NAME|FILE")
@runs_options
@click.option(
    "--holdout",
    type=click.IntRange(1),
    metavar="K",
    help="Score not the plan but its learner, on these runs, K held out at a time.",
)
@store_option
@json_option
def command(
    plan: str,
    traces: tuple[str, ...],
    more: tuple[str, ...],
    image: str | None,
    latency: float | None,
    bandwidth: int | None,
    holdout: int | None,
    store: str | None,
    root: str | None,
    as_json: bool,
) -> None:
    """Simulate starts without the plan, with it, and with all there, for each run, and compare.

    The runs should be none that it was learned from: of these it says too much. With --holdout its learner learns anew
    from these runs, as `plan train` does, and the plan itself doesn't count.
    """
    from prefetch.learn.score import cross_validate, score  # with what learns, which few commands need

    loaded = load_plan(plan, root)
    runs = load_runs([*traces, *more], image=image, store=store, root=root)
    link = link_of(latency, bandwidth)
    if holdout is None:
        result = score([loaded], runs.traces, link=link, sizes=runs.sizes)
    else:
        learner = loaded.learned.get("learner")
        if not isinstance(learner, str):
            raise UsageError(f"plan {plan!r} doesn't say which learner made it: score it without --holdout")
        result = cross_validate(learner, runs.traces, holdout=holdout, link=link, sizes=runs.sizes)
    document = result.to_json()
    if as_json:
        render.print_json(
            {
                "name": loaded.name,
                "plan": str(loaded.digest),
                "holdout": holdout,
                "remapped": [{"trace": given, **report.to_json()} for given, report in runs.remapped],
                "score": document,
            }
        )
        return
    render.print_line(f"{printable(loaded.name)}: {result.runs} run(s)")
    print_remapped(runs.remapped)
    for label, text in figures(document):
        render.print_line(f"{label:>12}  {text}")
