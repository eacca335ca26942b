"""Plans that options name: files, and what the node's shelf has."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import click

from imgtool.options import root_path
from layerstore.errors import NotFoundError, os_errors, printable
from layerstore.staging import read_file, write_file
from prefetch.plans.format import CERTAIN, PLAN_BYTES, Plan, encode_plan, parse_plan
from prefetch.plans.shelf import Shelf

F = TypeVar("F", bound=Callable[..., Any])


def layout_options(function: F) -> F:
    """What an image that is laid out by a plan can be asked for."""
    for option in (
        click.option("--save-plan", metavar="NAME", help="Put the plan of the new image on this node's shelf."),
        click.option("--plan-out", metavar="FILE", help="Write the plan of the new image to a file."),
        click.option(
            "--min-chance",
            type=click.FloatRange(0, 1),
            default=0.0,
            help="Leave what fewer runs read where it is [default: 0, nothing].",
        ),
    ):
        function = option(function)
    return function


def load_plan(given: str, root: str | None) -> Plan:
    """A plan by the path of its file (with a slash, or ending in .json), or by its name on the shelf.

    Raises:
        NotFoundError: neither.
        MalformedError, UnsupportedError, LimitError: the file.
    """
    if "/" not in given and not given.endswith(".json"):
        return Shelf(root_path(root)).load(given)
    what = f"plan {printable(given)}"
    with os_errors(f"read {what}"):
        return parse_plan(read_file(given, PLAN_BYTES), what)


def check_plan_targets(*, file: str | None, name: str | None, root: str | None) -> None:
    """Find out before the work begins whether :func:`keep_plan` can write where it is told to.

    Raises:
        NotFoundError: there is no such directory.
        UsageError: the name can't be that of a plan.
    """
    if file is not None and not os.path.isdir(os.path.dirname(os.path.abspath(file))):
        raise NotFoundError(f"there is no directory for --plan-out {printable(file)}: make it, or name another file")
    if name is not None:
        Shelf(root_path(root)).path(name)


def keep_plan(plan: Plan, *, file: str | None, name: str | None, root: str | None) -> None:
    """Write a plan to a file, or put it on the shelf under a name, or both."""
    if file is not None:
        with os_errors(f"write the plan to {printable(file)}"):
            write_file(os.path.abspath(file), encode_plan(plan, "the plan"))
    if name is not None:
        Shelf(root_path(root)).save(replace(plan, name=name))


def chance(part: float) -> int:
    """A part of 1 as plans have it."""
    return round(part * CERTAIN)
