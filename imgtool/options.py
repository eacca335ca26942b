"""Options that verbs share, and the stores they name."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from imgtool import environment

if TYPE_CHECKING:
    from layerstore.store.directory import DirectoryStore
    from overlay.service.answers import SandboxInfo

F = TypeVar("F", bound=Callable[..., Any])


def examples(*lines: str) -> str:
    r"""An epilog of examples; ``\b`` keeps click from joining the lines."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts (see docs/cli.md).")(function)


def store_option(function: F) -> F:
    return click.option("--store", metavar="DIR", help="Store directory [default: $IMGTOOL_STORE, else ROOT/store].")(
        root_option(function)
    )


def root_option(function: F) -> F:
    return click.option(
        "--root", metavar="DIR", help="State of this node [default: $IMGTOOL_ROOT, else /var/lib/imgtool]."
    )(function)


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
    return os.path.abspath(store or environment.store() or os.path.join(root_path(root), "store"))


def open_store(store: str | None, root: str | None) -> DirectoryStore:
    """The store for reading or for deleting: it has to exist."""
    from layerstore.store.directory import DirectoryStore

    return DirectoryStore(store_path(store, root))


def writable_store(store: str | None, root: str | None) -> DirectoryStore:
    """The store for publishing: made where there is none."""
    from layerstore.store.directory import DirectoryStore

    return DirectoryStore.create(store_path(store, root))


def document_of(sandbox: SandboxInfo) -> dict[str, Any]:
    """A sandbox as verbs print it: all that the service says, but for what only `run` and bundles need."""
    return {key: value for key, value in sandbox.raw.items() if key != "run"}
