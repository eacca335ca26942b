"""``imgtool run``."""

from __future__ import annotations

import sys

import click

from imgtool import progress, render, service_start
from imgtool.exitcodes import ExitCode
from imgtool.options import (
    document_of,
    examples,
    json_option,
    prefetch_fields,
    prefetch_options,
    root_path,
    store_option,
    store_path,
)
from imgtool.quantity import SIZE
from layerstore.errors import ImgtoolError, UsageError, printable
from overlay.execution import run
from overlay.privilege import require_root
from overlay.process import run_config
from overlay.sandbox import Sandboxes
from overlay.service.answers import TraceInfo
from overlay.service.client import Client
from overlay.service.request import BACKENDS, MAX_WORDS, MODES, WORD_LIMIT, SandboxRequest


@click.command(
    "run",
    short_help="Run a command in a fresh sandbox.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=examples(
        "imgtool run repo-env -- pytest -q",
        "imgtool run --runtime chroot debian-full -- python3 -c 'import numpy'",
        "imgtool run --scratch 1G --mode eager repo-env",
        "imgtool run --record --trace tests-1 repo-env -- pytest -q",
    ),
)
@click.argument("name")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND [ARG]...]")
@click.option("--mode", type=click.Choice(MODES), help="How data are reached [default: what works best here].")
@click.option("--backend", type=click.Choice(BACKENDS), help="Of mode lazy [default: what works best here].")
@click.option("--read-only", is_flag=True, help="Nothing can be written in it.")
@click.option("--scratch", type=SIZE, metavar="SIZE", help="At most so many bytes can be written in it (10G, 512M).")
@click.option("--runtime", metavar="NAME", help="runc, crun, a path, or chroot [default: the first there is].")
@click.option("-t", "--tty", is_flag=True, help="Give the command a terminal of its own.")
@click.option("--keep", is_flag=True, help="Leave the sandbox standing.")
@click.option("-q", "--quiet", is_flag=True, help="Don't say on standard error what runs it.")
@prefetch_options
@store_option
@json_option
def command(
    name: str,
    arguments: tuple[str, ...],
    mode: str | None,
    backend: str | None,
    read_only: bool,
    scratch: int | None,
    runtime: str | None,
    tty: bool,
    keep: bool,
    quiet: bool,
    record: bool,
    trace: str | None,
    plan: str | None,
    wait_prefetch: bool,
    store: str | None,
    root: str | None,
    as_json: bool,
) -> int:
    """Run COMMAND, or what the image is made to run, in a fresh sandbox of image NAME, and remove the sandbox.

    Options come before NAME. With --record, the trace ends with the command. The exit code is the command's; 127 means
    that the image doesn't have it, 126 that it is no program, 125 that something else kept it from starting. With
    --json, a summary is printed after the command's own output.
    """
    argv = list(arguments[1:] if arguments[:1] == ("--",) else arguments)
    document: dict[str, object] = {"base": name, "store": store_path(store, root), "mode": mode, "backend": backend}
    document |= {"read_only": read_only, "scratch": scratch, "command": _shown(argv) if record else []}
    request = SandboxRequest.from_json(document | prefetch_fields(record, trace, plan, wait_prefetch))
    try:
        require_root()
        with service_start.service(root_path(root)) as client:
            with progress.shown(quiet=quiet) as drawn:
                [made] = client.create(request, drawn)
            client.close()  # the command may take hours
            exit_code = None
            recorded: TraceInfo | None = None
            try:
                if not quiet:
                    shown = (keep and f"sandbox {made.id}, kept") or f"sandbox {made.id}"
                    click.echo(f"imgtool: {shown}", err=True)
                sandbox = Sandboxes(root_path(root)).get(made.id)
                config = run_config(made.raw.get("run"))
                outcome = run(sandbox, argv or None, config, runtime=runtime, terminal=tty)
                exit_code = outcome.exit_code
                if outcome.reason:
                    click.echo(f"imgtool: {outcome.reason}", err=True)
                elif not quiet:
                    click.echo(f"imgtool: ran in {outcome.runtime}, exit code {outcome.exit_code}", err=True)
            finally:
                if not keep:
                    recorded = _remove(client, made.id, exit_code)
                elif record:
                    recorded = _end_trace(client, made.id)
                if record:
                    _tell(recorded, quiet=quiet)
    except UsageError:
        raise
    except ImgtoolError as error:
        click.echo(f"imgtool: {error}", err=True)
        return ExitCode.RUN_FAILED
    if as_json:
        sys.stdout.flush()
        render.print_json(
            {
                **document_of(made),
                "runtime": outcome.runtime,
                "exit_code": outcome.exit_code,
                "kept": keep,
                "trace": None if recorded is None else dict(recorded.raw),
            }
        )
    return outcome.exit_code


def _remove(client: Client, id: str, exit_code: int | None) -> TraceInfo | None:
    """That it could not be removed is said, and doesn't hide how the command ended. The trace that ended with it."""
    try:
        return client.remove(id, exit_code=exit_code).trace
    except ImgtoolError as error:
        render.warn(f"sandbox {id} is still there: {error}; `imgtool down {id}` removes it")
        return None


def _end_trace(client: Client, id: str) -> TraceInfo | None:
    """That there is none doesn't hide how the command ended."""
    try:
        return client.stop_trace(id)
    except ImgtoolError as error:
        render.warn(str(error))
        return None


def _tell(trace: TraceInfo | None, *, quiet: bool) -> None:
    if trace is None:
        render.warn("what it read was not recorded; the service's log says why")
        return
    if quiet:
        return
    cut = "" if trace.complete else ", cut off: its recorder ended before the command"
    counts = f"{trace.accesses} accesses, {render.size(trace.bytes)}"
    click.echo(f"imgtool: trace {printable(trace.path)}, {counts}{cut}", err=True)


def _shown(argv: list[str]) -> list[str]:
    """A command as the header of a trace has it, for people: every word printable, and none without an end."""
    return [printable(word)[:WORD_LIMIT] or " " for word in argv[:MAX_WORDS]]
