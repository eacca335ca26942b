"""Options that verbs share, and the stores they name."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from imgtool import environment
from layerstore.errors import UsageError

if TYPE_CHECKING:
    from layerstore.store.protocol import PruneStore, Store, WriteStore
    from overlay.service.answers import SandboxInfo

F = TypeVar("F", bound=Callable[..., Any])


def examples(*lines: str) -> str:
    r"""An epilog of examples; ``\b`` keeps click from joining the lines."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts (see docs/cli.md).")(function)


def store_option(function: F) -> F:
    return click.option(
        "--store",
        metavar="STORE",
        help="Directory of the store, or its URL: s3, oci, http(s) … [default: $IMGTOOL_STORE, else ROOT/store].",
    )(root_option(function))


def root_option(function: F) -> F:
    return click.option(
        "--root", metavar="DIR", help="State of this node [default: $IMGTOOL_ROOT, else /var/lib/imgtool]."
    )(function)


def prefetch_options(function: F) -> F:
    """What is recorded of a new sandbox, and fetched ahead for it: record, trace, plan and wait_prefetch."""
    for option in reversed(
        (
            click.option("--record", is_flag=True, help="Record what it reads: a trace, of which plans are learned."),
            click.option("--trace", metavar="NAME", help="Name of that trace [default: that of the sandbox]."),
            click.option(
                "--plan",
                metavar="NAME",
                help="What is fetched ahead: auto, none, or a plan's name [default: auto, the plan for its layers].",
            ),
            click.option("--wait-prefetch", is_flag=True, help="Begin when all that the plan names is here."),
        )
    ):
        function = option(function)
    return function


def prefetch_fields(record: bool, trace: str | None, plan: str | None, wait_prefetch: bool) -> dict[str, object]:
    """Fields of a request for these options; None for those that weren't given.

    Raises:
        UsageError: a trace has a name, and nothing is recorded.
    """
    if trace is not None and not record:
        raise UsageError("--trace names what --record records; give both")
    return {"record": {"name": trace} if record else None, "plan": plan, "wait_prefetch": wait_prefetch or None}


def jobs_option(function: F) -> F:
    return click.option(
        "--jobs",
        type=click.IntRange(1, 64),
        default=os.cpu_count() or 1,
        show_default="one a core",
        help="Threads; the result doesn't depend on it.",
    )(function)


def root_path(root: str | None) -> str:
    return os.path.abspath(root or environment.root())


def store_path(store: str | None, root: str | None) -> str:
    """Where the store is: an absolute path, or a URL as it was given; of several mirrors, each."""
    given = store or environment.store() or os.path.join(root_path(root), "store")
    if "://" not in given:  # what opens stores takes a third of the time that `up` does: it is imported for URLs alone
        return os.path.abspath(given)
    from layerstore.store.opening import BETWEEN_MIRRORS, is_url, mirrors_of

    return BETWEEN_MIRRORS.join(part if is_url(part) else os.path.abspath(part) for part in mirrors_of(given))


def open_store(store: str | None, root: str | None) -> Store:
    """The store for reading, wherever it is."""
    from layerstore.store.opening import open_store

    return open_store(store_path(store, root))


def existing_store(store: str | None, root: str | None) -> WriteStore:
    """The store for changing what is in it."""
    return write_store(store_path(store, root), create=False)


def writable_store(store: str | None, root: str | None) -> WriteStore:
    """The store for publishing: made where there is none."""
    return write_store(store_path(store, root), create=True)


def write_store(location: str, *, create: bool) -> WriteStore:
    """The store at a location that a command names by itself."""
    from layerstore.store.opening import open_write_store

    return open_write_store(location, create=create, spool=environment.spool())


def whole_store(store: str | None, root: str | None) -> PruneStore:
    """The store for looking at all of it, and for deleting."""
    from layerstore.store.opening import open_prune_store

    return open_prune_store(store_path(store, root), spool=environment.spool())


def document_of(sandbox: SandboxInfo) -> dict[str, Any]:
    """A sandbox as verbs print it: all that the service says, but for what only `run` and bundles need."""
    return {key: value for key, value in sandbox.raw.items() if key != "run"}
