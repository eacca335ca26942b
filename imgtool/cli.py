"""The entry point: finds the verb, and turns every outcome into an exit code and at most one line."""

from __future__ import annotations

import gc
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

import click

from imgtool.exitcodes import ExitCode, of_error
from layerstore.errors import ImgtoolError, from_os_error, printable
from layerstore.version import FORMAT_VERSION, VERSION

VERBS: dict[str, str] = {
    "convert": "Turn an OCI image, archive or directory into a layer, and publish it.",
    "compose": "Put a base, a workspace and toolkits on top of each other.",
    "optimize": "Lay an image out by a plan: what is read first comes first.",
    "ls": "List the images of a store.",
    "inspect": "Show what an image is made of.",
    "tree": "List files of an image.",
    "cat": "Print a file of an image.",
    "diff": "Show how two images differ.",
    "dump": "Print a metadata image, annotated, byte by byte.",
    "tag": "Give an image another name.",
    "rm": "Remove names; gc frees the space.",
    "copy": "Copy an image to another store.",
    "sync": "Copy many images to another store, or those that matter most.",
    "export": "Write an image for others: containerd, or whatever takes OCI images.",
    "raw": "Store the packs of images raw too, for --mode direct.",
    "verify": "Check every byte of a store.",
    "gc": "Delete what no name reaches.",
    "run": "Run a command in a fresh sandbox.",
    "up": "Make a sandbox and leave it standing.",
    "ps": "List sandboxes.",
    "down": "Remove sandboxes.",
    "trace": "Record what sandboxes read, look at it, exchange it with other tools.",
    "plan": "Learn from traces what to fetch ahead, look at it, and share it.",
    "node": "Run the node service, look at it, and keep its cache.",
    "doctor": "Say what this machine can do, and what to do about what it can't.",
}
"""Each verb with its short help: here, so that ``imgtool --help`` imports none of them. A test compares."""


class _Verbs(click.Group):
    """Imports a verb's module when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"imgtool.commands.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        formatter.write_text("IMGTOOL_ROOT and IMGTOOL_STORE set --root and --store. docs/cli.md is the manual.")


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, message=f"imgtool {VERSION} (layer format {FORMAT_VERSION})")
@click.option("--debug", is_flag=True, help="Print a traceback with every error.")
def main(debug: bool) -> None:
    """Content-addressed EROFS images for fleets of short-lived sandboxes."""


class _Terminated(BaseException):
    """SIGTERM arrived: unwind as for Ctrl-C, so that nothing stays behind."""


def _terminate(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: another must not disturb the cleaning up
    raise _Terminated


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code, never raises."""
    debug = "--debug" in arguments
    try:
        # Not main.main(): that turns a broken pipe into exit code 1, and Ctrl-C into an empty line.
        with main.make_context("imgtool", list(arguments) or ["--help"]) as context:
            result = main.invoke(context)
        if sys.stdout:  # None where descriptor 1 is closed
            sys.stdout.flush()
        return result if isinstance(result, int) else ExitCode.OK
    except ImgtoolError as error:
        return _failed(str(error), of_error(error), debug)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        context_of = getattr(error, "ctx", None)
        where = context_of.command_path if context_of else "imgtool"
        message = " ".join(error.format_message().split()).rstrip(".")
        return _failed(f"{message}; see {where} --help", ExitCode.USAGE, debug)
    except KeyboardInterrupt:
        return _failed("interrupted; nothing was left behind", ExitCode.INTERRUPTED, debug)
    except _Terminated:
        return _failed("terminated; nothing was left behind", ExitCode.TERMINATED, debug)
    except BrokenPipeError:
        # The reader of our output has gone, as in `imgtool tree X | head`; say nothing, as other tools do.
        _discard_output()
        return ExitCode.OK
    except OSError as error:
        mapped = from_os_error(error, "the operating system refused")
        return _failed(str(mapped), of_error(mapped), debug)
    except MemoryError:
        return _failed("out of memory; lower --jobs", ExitCode.UNAVAILABLE, debug)
    except Exception as error:  # a fault of ours: one line, and a code of its own
        return _failed(f"internal error: {type(error).__name__}: {error}; please report it", ExitCode.INTERNAL, debug)


def _discard_output() -> None:
    """What is still buffered can't be written: Python would try again at its end, and complain."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass  # standard output is no file, or closed


def _failed(message: str, code: ExitCode, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    click.echo(f"imgtool: {_one_line(message)}", err=True)
    return code


def _one_line(message: str) -> str:
    if message.isprintable():
        return message
    # Bytes that aren't UTF-8 and control characters of a path that some library put into its message.
    return printable(message).replace("\\\\", "\\")


def entry() -> None:
    """What the ``imgtool`` script calls."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the locale has no letters for is shown all the same
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, _terminate)
    # A conversion makes a million objects and no cycles: looking for some takes a twentieth of its time.
    gc.set_threshold(200_000, 50, 50)
    sys.exit(run(sys.argv[1:]))
