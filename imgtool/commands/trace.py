"""``imgtool trace``: its commands are in modules of their own."""

from __future__ import annotations

import click

from imgtool.commands import trace_export, trace_import, trace_ls, trace_recording, trace_rm, trace_show
from imgtool.options import examples


@click.group(
    "trace",
    short_help="Record what sandboxes read, look at it, exchange it with other tools.",
    epilog=examples(
        "imgtool trace ls --json | jq -r .[].name",
        "imgtool trace show numpy --picture numpy.svg",
        "imgtool trace import strace.log --image debian-full --name numpy",
        "imgtool trace export numpy --format nydus-optimize -o numpy.json",
        "imgtool trace start box --name build && imgtool trace stop box",
        "imgtool trace rm numpy",
    ),
)
def command() -> None:
    """Look after traces: what a run read, in order, with times and waits. Plans are learned from them.

    `imgtool run --record` and `imgtool up --record` make them, and so does `imgtool trace start` of a sandbox that
    stands.
    """


command.add_command(trace_recording.start)
command.add_command(trace_recording.stop)
command.add_command(trace_ls.command)
command.add_command(trace_show.command)
command.add_command(trace_import.command)
command.add_command(trace_export.command)
command.add_command(trace_rm.command)
