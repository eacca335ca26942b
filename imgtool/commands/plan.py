"""``imgtool plan``: its commands are in modules of their own."""

from __future__ import annotations

import click

from imgtool.commands import (
    plan_diff,
    plan_export,
    plan_fetch,
    plan_import,
    plan_ls,
    plan_publish,
    plan_remap,
    plan_rm,
    plan_score,
    plan_show,
    plan_train,
)
from imgtool.options import examples


@click.group(
    "plan",
    short_help="Learn from traces what to fetch ahead, look at it, and share it.",
    epilog=examples(
        "imgtool plan train numpy --from run-1 run-2 run-3 --publish",
        "imgtool plan ls --json",
        "imgtool plan show numpy",
        "imgtool plan score numpy --from run-4 --latency 5ms --bandwidth 25M",
        "imgtool plan remap numpy --to debian:13.2",
        "imgtool plan fetch debian-full --store https://images.example.com/store",
    ),
)
def command() -> None:
    """Look after plans: what to fetch of an image's layers before it is read, learned from traces of many runs.

    Plans are kept on the node by name, and in stores by layer. `imgtool up` finds the one for its layers by itself.
    """


command.add_command(plan_train.command)
command.add_command(plan_score.command)
command.add_command(plan_ls.command)
command.add_command(plan_show.command)
command.add_command(plan_diff.command)
command.add_command(plan_remap.command)
command.add_command(plan_publish.command)
command.add_command(plan_fetch.command)
command.add_command(plan_import.command)
command.add_command(plan_export.command)
command.add_command(plan_rm.command)
