"""``imgtool plan show``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from imgtool import render
from imgtool.learning import figures, lost, percent
from imgtool.options import examples, json_option, open_store, store_option
from imgtool.planfile import load_plan
from layerstore.digest import Digest
from layerstore.errors import ImgtoolError, printable
from prefetch.plans.format import CERTAIN, Plan, PlannedRange

if TYPE_CHECKING:
    from layerstore.image import Image
    from prefetch.learn.describe import PartRow


@click.command(
    "show",
    short_help="Show what a plan fetches, how good it is, and how it was learned.",
    epilog=examples(
        "imgtool plan show numpy",
        "imgtool plan show numpy --ranges 0 | grep site-packages",
        "imgtool plan show numpy.json --picture numpy.svg",
        "imgtool plan show numpy --json | jq .learned.tried",
    ),
)
@click.argument("plan", metavar="NAME|FILE")
@click.option("--ranges", type=click.IntRange(0), metavar="N", help="List the first N ranges too; 0 is all.")
@click.option("--picture", metavar="FILE", help="Draw it to FILE.svg, FILE.png or FILE.pdf.")
@click.option(
    "--image", metavar="IMAGE", help="For the sizes of its frames and packs [default: the plan's, where it is there]."
)
@store_option
@json_option
def command(
    plan: str,
    ranges: int | None,
    picture: str | None,
    image: str | None,
    store: str | None,
    root: str | None,
    as_json: bool,
) -> None:
    """Show a plan by layer: ranges, their bytes, the frames that are fetched for them, and when they are due.

    BYTES are raw, FETCHED compressed: guessed where the image isn't in the store. DUE is milliseconds from the start,
    CHANCE how many of a hundred runs read a range.
    """
    from prefetch.learn.describe import describe_plan  # with what learns, which few commands need
    from prefetch.learn.sizes import GUESSED, open_sizes

    loaded = load_plan(plan, root)
    found = _image(loaded, image, store, root)
    sizes = GUESSED if found is None else open_sizes(open_store(store, root), found)
    rows = describe_plan(loaded, sizes).parts
    if picture is not None:
        _draw(picture, loaded, found)
    listed = _ranges(loaded)
    if ranges is not None:
        listed = listed[: ranges or None]
    if as_json:
        render.print_json(_document(loaded, rows, listed if ranges is not None else None, guessed=found is None))
        return
    _print(loaded, rows, guessed=found is None)
    if ranges is not None:
        render.print_line("")
        render.print_table(
            ("DUE MS", "LAYER", "PATH", "RANGE", "BYTES", "CHANCE"),
            [_row(layer, planned) for layer, planned in listed],
            right=frozenset({0, 3, 4, 5}),
        )


def _image(plan: Plan, name: str | None, store: str | None, root: str | None) -> Image | None:
    """The image that was named, or the one that the plan names if it is there and has one of its layers."""
    from layerstore.image import load_image

    if name is not None:
        return load_image(open_store(store, root), name)
    layers = {part.metadata for part in plan.parts}
    for own in filter(None, (plan.manifest, plan.image)):
        try:
            image = load_image(open_store(store, root), own)
        except ImgtoolError:
            continue  # what can't be read is as good as not there: sizes are guessed
        if layers & {layer.metadata for layer in image.layers}:
            return image
    return None


def _ranges(plan: Plan) -> list[tuple[int, PlannedRange]]:
    """Layers, counted from 0, and their ranges; first due first."""
    found = [(number, planned) for number, part in enumerate(plan.parts) for planned in part.ranges]
    return sorted(found, key=lambda each: (each[1].due, each[0], each[1].device, each[1].offset))


def _row(layer: int, planned: PlannedRange) -> tuple[str, ...]:
    path = planned.path
    return (
        f"{planned.due / 1000:.1f}",
        str(layer),
        f"? pack {planned.device}" if path is None else _shown(path),
        f"{planned.offset if path is None else planned.file_offset}+",
        str(planned.length),
        f"{planned.chance * 100 // CERTAIN}%",
    )


def _shown(text: str) -> str:
    """A path, which is printable already unless somebody has made the plan by hand."""
    return text if text.isprintable() else printable(text)


def _print(plan: Plan, rows: tuple[PartRow, ...], *, guessed: bool) -> None:
    fetched = "ABOUT" if guessed else "FETCHED"
    render.print_table(
        ("LAYER", "", "RANGES", "BYTES", "SURE", "FRAMES", fetched, "FIRST DUE", "LAST DUE"),
        [
            (
                str(number),
                row.layer.hex[:12],
                str(row.ranges),
                render.size(row.bytes),
                render.size(row.likely_bytes),
                str(row.frames),
                render.size(row.frame_bytes),
                f"{row.first_due / 1000:.1f} ms",
                f"{row.last_due / 1000:.1f} ms",
            )
            for number, row in enumerate(rows)
        ],
        right=frozenset({2, 3, 4, 5, 6, 7, 8}),
    )
    lines = [
        ("name", printable(plan.name)),
        ("plan", str(plan.digest)),
        ("image", " ".join(filter(None, (printable(plan.image), printable(plan.manifest or ""))))),
        *_learned(plan),
        *figures(dict(plan.score)),
    ]
    for label, text in lines:
        if text:
            render.print_line(f"{label:>12}  {text}")


def _learned(plan: Plan) -> list[tuple[str, str]]:
    learned = plan.learned
    lines = []
    if learned.get("learner"):
        runs, folds = learned.get("runs"), learned.get("folds")
        scored = f", scored in {folds} parts that it had not seen" if folds and plan.score else ""
        lines.append(("learned", printable(f"by {learned['learner']} from {runs} run(s){scored}")))
    if isinstance(learned.get("note"), str):
        lines.append(("", printable(str(learned["note"]))))
    lines.append(("lost", lost(learned)))
    remapped = learned.get("remapped")
    if isinstance(remapped, dict):
        lines.append(("re-mapped", f"{percent(remapped.get('rate'))} of what it was was found"))
    return lines


def _document(
    plan: Plan, rows: tuple[PartRow, ...], ranges: list[tuple[int, PlannedRange]] | None, *, guessed: bool
) -> dict[str, object]:
    document: dict[str, object] = {
        "name": plan.name,
        "plan": str(plan.digest),
        "image": plan.image,
        "manifest": plan.manifest,
        "layers": [
            {
                "layer": str(row.layer),
                "ranges": row.ranges,
                "bytes": row.bytes,
                "bytes_sure": row.likely_bytes,
                "frames": row.frames,
                "bytes_fetched": row.frame_bytes,
                "first_due": row.first_due,
                "last_due": row.last_due,
            }
            for row in rows
        ],
        "guessed": guessed,
        "learned": dict(plan.learned),
        "score": dict(plan.score),
    }
    if ranges is not None:
        document["ranges"] = [
            {
                "layer": layer,
                "device": planned.device,
                "offset": planned.offset,
                "length": planned.length,
                "due": planned.due,
                "chance": planned.chance / CERTAIN,
                "path": planned.path,
                "file_offset": planned.file_offset if planned.path is not None else None,
            }
            for layer, planned in ranges
        ]
    return document


def _draw(path: str, plan: Plan, image: Image | None) -> None:
    """The plan over the packs of its layers: as the picture of a run of them that has read nothing yet."""
    from imgtool.pictures import draw_trace, pack_sizes
    from prefetch.trace.format import Trace, TracedLayer, TraceHeader

    sizes: dict[Digest, int] = {}
    for part in plan.parts:
        for planned in part.ranges:
            pack = part.packs[planned.device - 1]
            sizes[pack] = max(sizes.get(pack, 0), planned.end)
    sizes |= pack_sizes(image) if image is not None else {}
    layers = tuple(TracedLayer(part.metadata, part.packs) for part in plan.parts)
    last = max((planned.due for part in plan.parts for planned in part.ranges), default=0)
    trace = Trace(TraceHeader(layers, plan.image), (), ended=last)
    draw_trace(path, trace, title=f"plan {printable(plan.name)}", sizes=sizes, plan=plan)
