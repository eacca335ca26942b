"""``imgtool compose``."""

from __future__ import annotations

import click

from imgtool import render
from imgtool.options import examples, existing_store, json_option, open_store, store_option
from layerstore.compose import Stack, plan_stack, publish_stack
from layerstore.errors import printable

_SHOWN = 20


@click.command(
    "compose",
    short_help="Put a base, a workspace and toolkits on top of each other.",
    epilog=examples(
        "imgtool compose --base debian-full --workspace repo --toolkit tools --tag repo-env",
        "imgtool compose --base debian-full --toolkit tools --dry-run --json",
    ),
)
@click.option("--base", required=True, metavar="NAME", help="The lowest layer.")
@click.option("--workspace", metavar="NAME", help="The layer above it.")
@click.option("--toolkit", "toolkits", multiple=True, metavar="NAME", help="Layers on top; the last one wins.")
@click.option("--tag", metavar="NAME", help="Name to publish the stack under.")
@click.option("--force", is_flag=True, help="Accept layers that were made over another base.")
@click.option("--dry-run", is_flag=True, help="Report conflicts; publish nothing.")
@store_option
@json_option
def command(
    base: str,
    workspace: str | None,
    toolkits: tuple[str, ...],
    tag: str | None,
    force: bool,
    dry_run: bool,
    store: str | None,
    root: str | None,
    as_json: bool,
) -> None:
    """Compose a stack: base, then workspace, then toolkits.

    Every path that several of them provide is reported with the one that wins, and the image configs are merged: run
    settings come from the workspace, else the base; environment variables from all, PATH joined.
    """
    target = None if dry_run else existing_store(store, root)
    stack = plan_stack(
        target or open_store(store, root), base=base, workspace=workspace, toolkits=toolkits, force=force
    )
    manifest = None
    if target is not None:
        manifest = str(publish_stack(target, stack, tag=tag).descriptor().digest)
    if as_json:
        render.print_json(_document(stack, tag, manifest))
        return
    conflicts = stack.conflicts
    for conflict in conflicts[:_SHOWN]:
        providers = ", ".join(stack.names[number] for number in conflict.layers)
        render.print_line(
            f"  /{printable(conflict.path)}: in {providers}; {stack.names[conflict.winner]} wins ({conflict.kind})"
        )
    if len(conflicts) > _SHOWN:
        render.print_line(f"  … and {len(conflicts) - _SHOWN} more; --json lists all")
    render.print_line(
        f"{tag or manifest or 'dry run'}: {' < '.join(stack.names)}; {len(conflicts)} path(s) in several layers"
    )


def _document(stack: Stack, tag: str | None, manifest: str | None) -> dict[str, object]:
    return {
        "manifest": manifest,
        "tag": tag,
        "layers": [
            {"name": name, "role": layer.role.value, "layer": str(layer.metadata)}
            for name, layer in zip(stack.names, stack.image.layers, strict=True)
        ],
        "config": stack.config.document,
        "conflicts": [
            {
                "path": "/" + printable(conflict.path),
                "kind": str(conflict.kind),
                "in": [stack.names[number] for number in conflict.layers],
                "winner": stack.names[conflict.winner],
            }
            for conflict in stack.conflicts
        ],
    }
