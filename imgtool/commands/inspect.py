"""``imgtool inspect``."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from imgtool import render
from imgtool.options import examples, json_option, open_store, store_option
from layerstore.errors import ImgtoolError, UnavailableError, about, printable
from layerstore.image import Image, Layer, find_target, parse_image, read_document
from layerstore.oci.config import ImageConfig
from layerstore.rawpacks import is_raw
from layerstore.store.protocol import Store
from prefetch.plans.published import look

_COUNT = re.compile("[0-9]{1,15}")


@click.command(
    "inspect",
    short_help="Show what an image is made of.",
    epilog=examples("imgtool inspect repo", "imgtool inspect repo --json | jq .layers[0].packs"),
)
@click.argument("name")
@store_option
@json_option
def command(name: str, store: str | None, root: str | None, as_json: bool) -> None:
    """Show the layers, packs and config of image NAME (a tag or a digest).

    It says too which packs are also stored raw, and which layers have a plan.
    """
    source = open_store(store, root)
    target = find_target(source, name)
    data = read_document(source, target, f"manifest of {name!r}")
    with about(repr(name)):
        image = parse_image(data)
    plans = [_plan(source, layer) for layer in image.layers]
    what = f"config of {name!r}"
    config = ImageConfig.parse(read_document(source, image.config, what), what)
    if as_json:
        render.print_json(
            {
                "name": name,
                "manifest": str(target.digest),
                "layers": [
                    {**_layer(source, layer), "plan": plan} for layer, plan in zip(image.layers, plans, strict=True)
                ],
                "config": config.document,
            }
        )
        return
    render.print_line(f"{name}  {target.digest}")
    _print_layers(source, image, plans)
    run = config.run
    command_line = [*(run.entrypoint or ()), *(run.cmd or ())]
    for label, value in (
        ("platform", f"{config.platform.os}/{config.platform.architecture}"),
        ("user", run.user or "root"),
        ("directory", run.working_dir or "/"),
        ("command", " ".join(command_line)),
        ("environment", "  ".join(run.env)),
    ):
        if value:
            render.print_line(f"{label:>12}  {printable(value)}")


def _plan(source: Store, layer: Layer) -> dict[str, object] | None:
    """What is said of the layer's plan; with ``error`` where it is damaged."""
    try:
        plan = look(source, layer.metadata)
    except UnavailableError:
        raise
    except ImgtoolError as error:
        return {"name": None, "plan": None, "runs": None, "bytes": None, "error": str(error)}
    if plan is None:
        return None
    runs = int(plan.runs) if _COUNT.fullmatch(plan.runs) else None
    return {"name": plan.name, "plan": plan.plan, "runs": runs, "bytes": plan.size, "error": None}


def _layer(source: Store, layer: Layer) -> dict[str, object]:
    return {
        "role": layer.role.value,
        "layer": str(layer.metadata),
        "bytes_metadata": layer.metadata_size,
        "bytes_metadata_stored": layer.blob_size,
        "format_version": layer.format_version,
        "base": str(layer.base) if layer.base else None,
        "source": str(layer.source) if layer.source else None,
        "diff_ids": [str(diff_id) for diff_id in layer.diff_ids],
        "packs": [
            {
                "pack": str(pack.digest),
                "bytes": pack.raw_size,
                "blob": str(pack.blob),
                "bytes_stored": pack.blob_size,
                "raw": is_raw(source, pack),
            }
            for pack in layer.packs
        ],
    }


def _print_layers(source: Store, image: Image, plans: Sequence[dict[str, object] | None]) -> None:
    rows: list[tuple[str, ...]] = []
    for layer, plan in zip(image.layers, plans, strict=True):
        rows.append(
            (layer.role, layer.metadata.hex[:12], render.size(layer.metadata_size), render.size(layer.blob_size))
        )
        rows += [
            (
                "  pack, also raw" if is_raw(source, pack) else "  pack",
                pack.digest.hex[:12],
                render.size(pack.raw_size),
                render.size(pack.blob_size),
            )
            for pack in layer.packs
        ]
        if plan is not None:
            size = plan["bytes"]
            what = plan["error"] or f"{plan['name']}, of {plan['runs'] or '?'} run(s)"
            rows.append(("  plan", printable(str(what)), "", render.size(size) if isinstance(size, int) else ""))
    render.print_table(("LAYER", "DIGEST", "RAW", "STORED"), rows, right=frozenset({2, 3}))
