"""``imgtool up``."""

from __future__ import annotations

import click

from imgtool import progress, render
from imgtool.options import examples, jobs_option, json_option, open_store, root_path, store_option
from imgtool.quantity import SIZE
from overlay.node import Node
from overlay.privilege import require_root


@click.command(
    "up",
    short_help="Make a sandbox and leave it standing.",
    epilog=examples(
        "imgtool up repo-env",
        "imgtool up repo-env --json | jq -r .rootfs",
        "imgtool up repo-env --scratch 2G --bundle ./bundle && runc run -b ./bundle box",
    ),
)
@click.argument("name")
@click.option("--id", "identifier", metavar="ID", help="Name of the sandbox [default: made up].")
@click.option("--read-only", is_flag=True, help="Nothing can be written in it.")
@click.option("--scratch", type=SIZE, metavar="SIZE", help="At most so many bytes can be written in it (10G, 512M).")
@click.option("--bundle", metavar="DIR", help="Also write an OCI runtime bundle there, for runc run and crun run.")
@jobs_option
@store_option
@json_option
def command(
    name: str,
    identifier: str | None,
    read_only: bool,
    scratch: int | None,
    bundle: str | None,
    jobs: int,
    store: str | None,
    root: str | None,
    as_json: bool,
) -> None:
    """Make a sandbox of image NAME: its layers, shared with other sandboxes, under a writable layer of its own."""
    require_root()
    node = Node(root_path(root))
    with progress.shown() as drawn:
        image = node.prepare(open_store(store, root), name, jobs=jobs, progress=drawn)
    sandbox = node.up(image, id=identifier, read_only=read_only, scratch=scratch)
    if bundle is not None:
        from overlay.bundle import write_bundle

        try:
            write_bundle(bundle, sandbox, image.config.run)
        except BaseException:
            node.sandboxes.remove(sandbox.id)
            raise
    if as_json:
        render.print_json({**sandbox.to_json(), "bundle": bundle})
    else:
        render.print_line(f"{sandbox.id}  {sandbox.rootfs}")
