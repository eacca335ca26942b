"""``imgtool up``."""

from __future__ import annotations

import sys

import click

from imgtool import progress, render, service_start
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
from imgtool.quantity import DURATION, SIZE
from layerstore.errors import UsageError, os_errors, printable
from overlay.privilege import require_root
from overlay.service.answers import SandboxInfo
from overlay.service.request import BACKENDS, MAX_COUNT, MODES, SandboxRequest


@click.command(
    "up",
    short_help="Make a sandbox and leave it standing.",
    epilog=examples(
        "imgtool up repo-env",
        "imgtool up repo-env --json | jq -r .rootfs",
        "imgtool up repo-env --mode lazy --count 50 --ttl 1h",
        "imgtool up repo-env --record --trace monday",
        "imgtool up repo-env --plan tests --wait-prefetch",
        "imgtool up repo-env --scratch 2G --bundle ./bundle && runc run -b ./bundle box",
        "imgtool up -f sandbox.yaml",
        "generate | imgtool up -f - --id box",
    ),
)
@click.argument("name", required=False)
@click.option("-f", "--file", "path", metavar="FILE", help="A description in YAML or JSON; - for standard input.")
@click.option("--mode", type=click.Choice(MODES), help="How data are reached [default: what works best here].")
@click.option("--backend", type=click.Choice(BACKENDS), help="Of mode lazy [default: what works best here].")
@click.option("--id", "identifier", metavar="ID", help="Name of the sandbox [default: made up].")
@click.option("--count", type=click.IntRange(1, MAX_COUNT), metavar="N", help="So many alike: ID-1, ID-2 and so on.")
@click.option("--read-only", is_flag=True, help="Nothing can be written in it.")
@click.option("--scratch", type=SIZE, metavar="SIZE", help="At most so many bytes can be written in it (10G, 512M).")
@click.option("--ttl", type=DURATION, metavar="TIME", help="Remove it after so long (90s, 30m, 1h30m, 2d).")
@click.option("--bundle", metavar="DIR", help="Also write an OCI runtime bundle there, for runc run and crun run.")
@prefetch_options
@store_option
@json_option
def command(
    name: str | None,
    path: str | None,
    mode: str | None,
    backend: str | None,
    identifier: str | None,
    count: int | None,
    read_only: bool,
    scratch: int | None,
    ttl: float | None,
    bundle: str | None,
    record: bool,
    trace: str | None,
    plan: str | None,
    wait_prefetch: bool,
    store: str | None,
    root: str | None,
    as_json: bool,
) -> None:
    """Make a sandbox of image NAME: its layers, shared with other sandboxes, under a writable layer of its own.

    Or of what a description asks for; options then count more than it. The node service makes it, and is started if
    it doesn't run.
    """
    if (name is None) == (path is None):
        raise UsageError("name an image, or give a description with -f")
    require_root()
    asked: dict[str, object] = {
        "mode": mode,
        "backend": backend,
        "id": identifier,
        "count": count,
        "read_only": read_only or None,
        "scratch": scratch,
        "ttl": ttl,
        **prefetch_fields(record, trace, plan, wait_prefetch),
    }
    asked = {key: value for key, value in asked.items() if value is not None}
    if name is not None:
        request = SandboxRequest.from_json({"base": name, "store": store_path(store, root), **asked})
    else:
        assert path is not None
        request = _described(path, asked, store, root)
    if bundle is not None and (request.count > 1 or request.isolation == "none"):
        raise UsageError("--bundle is for one sandbox, of isolation container")
    with service_start.service(root_path(root)) as client:
        with progress.shown() as drawn:
            made = client.create(request, drawn)
        if bundle is not None:
            try:
                _write_bundle(bundle, root_path(root), made[0])
            except BaseException:
                client.remove(made[0].id)
                raise
    if as_json:
        found = [{**document_of(sandbox), "bundle": bundle} for sandbox in made]
        render.print_json(found if request.count > 1 else found[0])
    else:
        for sandbox in made:
            render.print_line(f"{sandbox.id}  {sandbox.rootfs}")


def _described(path: str, asked: dict[str, object], store: str | None, root: str | None) -> SandboxRequest:
    from overlay.service.description import parse  # with a YAML scanner and a validator, which no other form needs
    from overlay.service.yaml_document import MAX_SIZE

    what = "standard input" if path == "-" else printable(path)
    with os_errors(f"read {what}"):
        if path == "-":
            text = sys.stdin.buffer.read(MAX_SIZE + 1)
        else:
            with open(path, "rb") as stream:
                text = stream.read(MAX_SIZE + 1)
    description = parse(text, what)
    if store is not None:
        asked = {**asked, "store": store_path(store, root)}
    request = description.request(store_path(None, root), asked)
    if description.not_ours:
        names = ", ".join(printable(name) for name in description.not_ours)
        render.warn(f"{what}: not imgtool's, only carried into the receipt: {names}")
    return request


def _write_bundle(directory: str, root: str, sandbox: SandboxInfo) -> None:
    from overlay.bundle import write_bundle  # with all that mounting needs, which is the service's without --bundle
    from overlay.process import run_config
    from overlay.sandbox import Sandboxes

    write_bundle(directory, Sandboxes(root).get(sandbox.id), run_config(sandbox.raw.get("run")))
