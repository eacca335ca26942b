"""The examples of the manual: what to type, and what is said to come of it.

A block fenced as ``console`` holds commands, each on a line of its own behind ``$``, with its output below. Outputs are
compared; ``…`` in a line stands for any text, and alone on a line for any lines. A command succeeds unless the next
one is ``echo $?``, whose output is then its exit code. Blocks marked ``console root`` need root and a kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from support.tools import CHECKOUT

MANUAL = CHECKOUT / "docs" / "cli.md"
_BLOCK = re.compile(r"^```console( root)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """One command of a block, with the number of its line in the manual."""

    line: int
    command: str
    output: str
    code: int = 0


def options_of(command: click.Command) -> list[str]:
    """All spellings of its options; of a group, those of its commands."""
    if isinstance(command, click.Group):
        return [option for below in command.commands.values() for option in options_of(below)]
    return [option for parameter in command.params if isinstance(parameter, click.Option) for option in parameter.opts]


def examples(*, root: bool, manual: Path = MANUAL) -> Iterator[Example]:
    """All examples that need root, or all that don't, in order."""
    text = manual.read_text()
    for block in _BLOCK.finditer(text):
        if bool(block[1]) is not root:
            continue
        first = text.count("\n", 0, block.start(2)) + 1
        found = list(_parsed(block[2], first))
        for number, example in enumerate(found):
            if example.command == "echo $?":
                continue
            code = 0
            if number + 1 < len(found) and found[number + 1].command == "echo $?":
                code = int(found[number + 1].output)
            yield Example(example.line, example.command, example.output, code)


def _parsed(block: str, first: int) -> Iterator[Example]:
    command, start, output = "", 0, ""
    for number, line in enumerate(block.splitlines(keepends=True), first):
        if line.startswith("$ "):
            if command:
                yield Example(start, command, output)
            command, start, output = line[2:].rstrip("\n"), number, ""
        else:
            output += line
    if command:
        yield Example(start, command, output)


def fits(shown: str, actual: str) -> bool:
    """Whether ``actual`` is what the manual shows."""
    pattern = ""
    for line in shown.splitlines():
        pattern += r"(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + "\n"
    return re.fullmatch(pattern, actual) is not None
