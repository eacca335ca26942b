"""``imgtool node``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

from imgtool import environment, render, service_start
from imgtool.options import examples, json_option, root_option, root_path, store_option, store_path
from imgtool.quantity import SIZE
from layerstore.errors import printable
from overlay.privilege import require_root
from overlay.service.options import (
    LOG_FORMATS,
    LOG_LEVELS,
    READ_DEADLINE,
    STANDARD_ERROR,
    THREADS,
    LogFormat,
    LogLevel,
    NodeOptions,
)
from overlay.service.place import socket_path


@click.group(
    "node",
    short_help="Run the node service, look at it, and keep its cache.",
    epilog=examples(
        "imgtool node run --limit 200G",
        "imgtool node status",
        "imgtool node status --json | jq .cache",
        "imgtool node pin repo-env",
        "imgtool node evict 10G",
        "imgtool node receipt box | jq .end",
        "imgtool node stop",
    ),
)
def command() -> None:
    """Look after the service of this node: it makes sandboxes, fetches what they read, and keeps the cache.

    Commands that need it start it; `imgtool node run` is for systemd and for those who want to set its options.
    """


@command.command("run", short_help="Be the service, in the foreground.")
@click.option("--limit", type=SIZE, metavar="SIZE", help="At most so many bytes of cache [default: what the disk has].")
@click.option(
    "--read-deadline",
    type=click.FloatRange(0.1, 86_400),
    default=READ_DEADLINE,
    show_default=True,
    metavar="SECONDS",
    help="After so long a read whose data don't come fails.",
)
@click.option(
    "--threads", type=click.IntRange(1, 256), default=THREADS, show_default=True, help="Requests to stores at once."
)
@click.option(
    "--prefetch-bandwidth",
    type=SIZE,
    metavar="RATE",
    help="At most so many bytes a second for plans, as 20M [default: what readers leave].",
)
@click.option(
    "--log", default=STANDARD_ERROR, show_default=True, metavar="FILE", help="Where to log; - is standard error."
)
@click.option(
    "--log-format", type=click.Choice(LOG_FORMATS), help="[default: text for a terminal, else json: an object a line]"
)
@click.option(
    "--log-level",
    type=click.Choice(LOG_LEVELS),
    default="info",
    show_default=True,
    help="debug: every read that waits.",
)
@click.option(
    "--idle-exit",
    type=click.FloatRange(1),
    metavar="SECONDS",
    help="End after so long without sandbox and request [default: never].",
)
@root_option
def run(
    limit: int | None,
    read_deadline: float,
    threads: int,
    prefetch_bandwidth: int | None,
    log: str,
    log_format: LogFormat | None,
    log_level: LogLevel,
    idle_exit: float | None,
    root: str | None,
) -> None:
    """Be the node service until `imgtool node stop`, SIGTERM or Ctrl-C, which unmount in an orderly way."""
    from overlay.service.start import run as run_service  # with all that the service needs, which nobody else does

    require_root()
    to_terminal = log == STANDARD_ERROR and sys.stderr.isatty()
    run_service(
        root_path(root),
        NodeOptions(
            limit=limit,
            read_deadline=read_deadline,
            threads=threads,
            prefetch_bandwidth=prefetch_bandwidth,
            log=log,
            log_format=log_format or ("text" if to_terminal else "json"),
            log_level=log_level,
            idle_exit=idle_exit,
            notify_socket=environment.notify_socket(),
            watchdog=environment.watchdog(),
            listen_fds=environment.listen_fds(),
        ),
    )


@command.command("status", short_help="Say how the service is.")
@root_option
@json_option
def status(root: str | None, as_json: bool) -> None:
    """Say how the service is: processes, backends, cache, sandboxes, and what has been fetched.

    The exit code is 3 where none runs.
    """
    with service_start.needed(root_path(root)) as client:
        found = client.status()
    document = {**found.raw, "socket": socket_path(root_path(root))}
    if as_json:
        render.print_json(document)
        return
    for label, text in _lines(document):
        render.print_line(f"{label:>10}  {text}")


@command.command("stop", short_help="End the service.")
@click.option("--force", is_flag=True, help="Kill the processes that can't go on without it.")
@root_option
@json_option
def stop(force: bool, root: str | None, as_json: bool) -> None:
    """End the service. Sandboxes whose data are all here go on; others are unmounted until it runs again.

    Where a process uses one that reads what isn't here yet, nothing is stopped, unless --force kills it.
    """
    require_root()
    client = service_start.running(root_path(root))
    killed: list[int] = []
    if client is not None:
        with client:
            killed = client.stop(force=force).raw.get("killed", [])
        service_start.wait_for_end(root_path(root))
    if as_json:
        render.print_json({"stopped": client is not None, "killed": killed})
    elif client is None:
        render.print_line(f"no node service of {printable(root_path(root))} was running")
    else:
        render.print_line("stopped" + (f"; killed {', '.join(map(str, killed))}" if killed else ""))


@command.command("pin", short_help="Keep what the cache has of an image.")
@click.argument("name")
@store_option
@json_option
def pin(name: str, store: str | None, root: str | None, as_json: bool) -> None:
    """Keep in the cache what it has, and will have, of image NAME: none of it is evicted."""
    with service_start.service(root_path(root)) as client:
        found = client.pin(name, store_path(store, root))
    if as_json:
        render.print_json(found.raw)
    else:
        render.print_line(f"{found.name}: {len(found.content)} pack(s) and metadata image(s) are kept")


@command.command("unpin", short_help="Let an image be evicted again.")
@click.argument("name")
@root_option
@json_option
def unpin(name: str, root: str | None, as_json: bool) -> None:
    """Undo `imgtool node pin NAME`."""
    with service_start.service(root_path(root)) as client:
        client.unpin(name)
    if as_json:
        render.print_json({"name": name})
    else:
        render.print_line(f"{name} is not kept any more")


@command.command("pins", short_help="List what is pinned.")
@root_option
@json_option
def pins(root: str | None, as_json: bool) -> None:
    """List the images that the cache keeps."""
    with service_start.service(root_path(root)) as client:
        found = client.pins()
    if as_json:
        render.print_json([item.raw for item in found])
        return
    render.print_table(
        ("NAME", "CONTENT"), [(item.name, str(len(item.content))) for item in found], right=frozenset({1})
    )


@command.command("evict", short_help="Free space of the cache.")
@click.argument("size", type=SIZE)
@root_option
@json_option
def evict(size: int, root: str | None, as_json: bool) -> None:
    """Free SIZE bytes of the cache, of what no sandbox uses and nothing pins, least recently used first."""
    with service_start.service(root_path(root)) as client:
        freed = client.evict(size)
    if as_json:
        render.print_json({"freed": freed})
    else:
        render.print_line(f"freed {render.size(freed)}")


@command.command("metrics", short_help="Print what Prometheus gets.")
@root_option
def metrics(root: str | None) -> None:
    """Print the service's metrics, in the format of Prometheus."""
    with service_start.needed(root_path(root)) as client:
        render.print_line(client.metrics().rstrip("\n"))


@command.command("receipt", short_help="Print the receipt of a sandbox.")
@click.argument("identifier", metavar="ID")
@root_option
def receipt(identifier: str, root: str | None) -> None:
    """Print, as JSON, what sandbox ID is made of; and if it has ended, what it read and wrote (kept for a week)."""
    client = service_start.running(root_path(root))
    if client is None:
        render.print_json(_receipt(root_path(root), identifier))
        return
    with client:
        render.print_json(client.receipt(identifier))


def _receipt(root: str, identifier: str) -> Mapping[str, object]:
    """Without a service: of a sandbox that stands, or of the last one of this name that has ended."""
    from layerstore.errors import NotFoundError
    from overlay.sandbox import Sandboxes  # with all that mounting needs, which the service has otherwise
    from overlay.service.receipts import Receipts

    try:
        return Sandboxes(root).get(identifier).state.receipt
    except NotFoundError:
        return Receipts(root).get(identifier).to_json()


def _lines(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a person wants to know of it; the rest is in the JSON."""
    pids = ", ".join(f"{name} {pid}" for name, pid in status["pids"].items())
    restarts = ", ".join(f"{name} {count}" for name, count in status["restarts"].items() if count)
    cache, sandboxes = status["cache"], status["sandboxes"]
    limit = "no limit" if cache["limit"] is None else f"limit {render.size(cache['limit'])}"
    kinds = ", ".join(
        f"{count} {name}" for group in ("mode", "condition") for name, count in sandboxes.get(group, {}).items()
    )
    lines = [
        (
            "service",
            f"imgtool {status['version']}, up {render.span(status['uptime'])}" + ", stopping" * status["stopping"],
        ),
        ("processes", pids + (f"; started again: {restarts}" if restarts else "")),
        ("root", printable(status["root"])),
        ("socket", printable(status["socket"])),
        ("backend", f"{status['preferred']['backend']}: {status['preferred']['why']}"),
        ("usable", ", ".join(status.get("backends") or ()) or "none for lazy loading"),
        (
            "cache",
            f"{render.size(cache['bytes'])}, {limit}, {cache['packs']} packs; "
            f"in use {render.size(cache['in_use_bytes'])}, pinned {render.size(cache['pinned_bytes'])}",
        ),
        ("sandboxes", f"{sandboxes['total']}" + (f": {kinds}" if kinds else "")),
    ]
    fetch, events = status.get("fetch"), status.get("events")
    if fetch:
        lines += [("fetched", _fetched(fetch)), ("fetching", _fetching(fetch))]
    prefetch, recordings = status.get("prefetch"), status.get("recordings")
    if prefetch:
        lines.append(("plans", _plans(prefetch)))
    if recordings:
        lines.append(("recording", ", ".join(f"{item['sandbox']} ({item['way']})" for item in recordings)))
    if events:
        lines.append(("reads asked", ", ".join(f"{count} {name}" for name, count in events.items() if name != "packs")))
    return lines


def _fetched(fetch: Mapping[str, Any]) -> str:
    parts = []
    for name, words in (("demand", "for readers"), ("background", "ahead")):
        part = fetch.get(name, {})
        size, requests = render.size(part.get("raw", 0)), part.get("requests", 0)
        parts.append(f"{size} in {requests} requests {words}")
    waits, seconds = fetch.get("demand_waits", 0), fetch.get("demand_seconds", 0.0)
    return ", ".join(parts) + f"; {waits} reads waited {seconds:.3g} s, all together"


def _plans(prefetch: Mapping[str, Any]) -> str:
    parts = [f"{prefetch.get('replays', 0)} under way, {render.size(prefetch.get('raw', 0))} brought"]
    parts += [f"{count} {name}" for name, count in prefetch.get("problems", {}).items() if count]
    return ", ".join(parts)


def _fetching(fetch: Mapping[str, Any]) -> str:
    parts = [f"{fetch.get('in_flight', 0)} requests under way", f"{fetch.get('waiting', 0)} readers wait"]
    parts += [f"{count} {name}" for name in ("retries", "failures", "stalled") if (count := fetch.get(name, 0))]
    return ", ".join(parts)
