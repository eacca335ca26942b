"""What a choice of images covers: as text, as JSON, and as a picture. Matplotlib is imported to draw."""

from __future__ import annotations

from typing import Any

from imgtool import render
from layerstore.sync.budget import Choice
from layerstore.sync.second_site import SecondSite

_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def document(site: SecondSite) -> dict[str, Any]:
    """The ``selection`` of ``sync --json``."""
    choice = site.choice
    return {
        **_point(site, choice),
        "bound": choice.bound,
        "chosen": list(choice.names),
        "way": choice.way,
        "tried": [
            {"way": each.way, "tasks": each.tasks, "images": each.images, "bytes": each.bytes} for each in choice.tried
        ],
        "tasks_total": site.tasks,
        "candidates": site.candidates,
        "ineligible": [each.image for each in site.ineligible],
        "unreadable": [each.image for each in site.unreadable],
        "unused": len(site.unused),
        "curve": [_point(site, each) for each in site.curve],
    }


def _point(site: SecondSite, choice: Choice) -> dict[str, Any]:
    return {
        "budget": choice.budget,
        "tasks": choice.tasks,
        "share": round(site.share(choice), 6),
        "images": len(choice.names),
        "bytes": choice.bytes,
    }


def show(site: SecondSite) -> None:
    """Print what was chosen, what it was compared with, and the curve."""
    choice = site.choice
    render.print_line(
        f"{len(choice.names)} of {site.candidates} image(s) cover {_number(choice.tasks)} of {_number(site.tasks)} "
        f"tasks ({_percent(site.share(choice))}) in {render.size(choice.bytes)}"
    )
    bound = choice.bound / site.tasks if site.tasks else 0.0
    others = ", ".join(f"{each.way} {_number(each.tasks)}" for each in choice.tried)
    render.print_line(f"  found by {choice.way}; no choice of that size covers more than {_percent(bound)}")
    render.print_line(f"  compared: {others}")
    if site.ineligible:
        tasks = sum(each.tasks for each in site.ineligible)
        render.print_line(f"  {len(site.ineligible)} image(s) are not eligible to leave: {_number(tasks)} tasks")
    if site.unused:
        render.print_line(f"  {len(site.unused)} image(s) of the store are not in the table")
    rows = [
        (
            render.size(point.budget),
            _number(point.tasks),
            _percent(site.share(point)),
            str(len(point.names)),
            render.size(point.bytes),
            "this one" if point is choice else "",
        )
        for point in site.curve
    ]
    render.print_table(("BUDGET", "TASKS", "SHARE", "IMAGES", "BYTES", ""), rows, right=frozenset(range(5)))


def draw(path: str, site: SecondSite) -> None:
    """Draw the curve: bytes to the right, the part of all tasks upwards.

    Raises:
        UsageError: matplotlib isn't installed, or the name of the file asks for no format that is known.
        NoSpaceError, NotFoundError, PermissionError_, UnavailableError: as the file system says.
    """
    from imgtool.pictures import new_figure, picture_format, save_figure

    picture_format(path)
    figure = new_figure(8, 5)
    axes = figure.subplots()
    name, unit = next((each for each in _UNITS if site.curve[-1].budget >= each[1]), _UNITS[-1])
    points = [(0.0, 0.0), *((point.bytes / unit, 100 * site.share(point)) for point in site.curve)]
    axes.plot(*zip(*points, strict=True), marker=".", color="#1f77b4", label="chosen for each budget")
    bounds = [(point.budget / unit, 100 * point.bound / site.tasks) for point in site.curve] if site.tasks else []
    if bounds:
        axes.plot(*zip(*bounds, strict=True), linestyle=":", color="#7f7f7f", label="no choice covers more")
    choice = site.choice
    axes.plot(
        [choice.bytes / unit],
        [100 * site.share(choice)],
        marker="o",
        linestyle="",
        color="#d62728",
        label="this budget",
    )
    axes.set_xlim(left=0)
    axes.set_ylim(0, 105)
    axes.set_xlabel(f"bytes at the second site, each blob once ({name})")
    axes.set_ylabel("share of all tasks (%)")
    axes.grid(linewidth=0.4, alpha=0.5)
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    title = f"{len(choice.names)} of {site.candidates} images, {_percent(site.share(choice))} of the tasks"
    axes.set_title(title, fontsize=10, loc="left", parse_math=False)
    save_figure(figure, path)


def _number(tasks: float) -> str:
    return f"{tasks:.10g}"


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"
