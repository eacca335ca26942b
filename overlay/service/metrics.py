"""Metrics of the node in Prometheus' text format; ``docs/api.md`` lists them. Only the worker imports it: 80 ms.

What happens in the worker is counted here, call by call. What others count, or what is a state, is taken from the
service's status (``GET /v1/status``) when somebody asks: so both say the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from layerstore.version import FORMAT_VERSION, VERSION
from overlay.service.log import log

Status = Mapping[str, Any]
Source = Callable[[], Status]
Value = tuple[tuple[str, ...], float]

_CALL = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 600.0)
"""Seconds: from making a sandbox of what is there, 0.5 ms, to fetching a large image before it is made."""
_READ = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds: from a store on the same host, 1 ms, to the read deadline, 30 s."""
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Described:
    """A metric. Series of a counter have ``_total`` behind its name."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    help: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Taken(Described):
    """A metric that is taken from the status."""

    values: Callable[[Status], Iterable[Value]]

    def family(self, status: Status) -> Metric:
        """With as many values as the status has: what is missing there is missing here."""
        made = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = made(self.name, self.help, labels=self.labels)
        if not status:
            return family  # nobody has a status yet, or it is only described
        try:
            for labels, value in self.values(status):
                family.add_metric(labels, value)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            log("metric not taken", level="debug", metric=self.name, error=error)
        return family


DEMAND = Described(
    "histogram", "imgtool_demand_seconds", "Readers that had to wait, from the question to the answer.", ("outcome",)
)
FETCH = Described(
    "histogram", "imgtool_fetch_seconds", "One read from a store, with verification and writing.", ("priority",)
)
UP = Described("histogram", "imgtool_up_seconds", "Making one sandbox.", ("mode",))
REQUEST = Described(
    "histogram", "imgtool_api_request_seconds", "From the first byte of a request to its answer.", ("method", "route")
)
REQUESTS = Described("counter", "imgtool_api_requests", "Requests that were answered.", ("method", "route", "status"))


class Metrics:
    """Any thread may call."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, with the time of its first use
        self._registry = CollectorRegistry(auto_describe=False)
        self._source: Source = dict
        self._demand = self._histogram(DEMAND, _READ)
        self._fetch = self._histogram(FETCH, _READ)
        self._up = self._histogram(UP, _CALL)
        self._request = self._histogram(REQUEST, _CALL)
        self._requests = Counter(REQUESTS.name, REQUESTS.help, REQUESTS.labels, registry=self._registry)
        self._registry.register(_OfStatus(lambda: self._source()))

    def _histogram(self, metric: Described, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(metric.name, metric.help, metric.labels, buckets=buckets, registry=self._registry)

    def set_source(self, source: Source) -> None:
        """``source`` gives the status; what it lacks isn't shown, and when it raises nothing of it is."""
        self._source = source

    def observe_demand(self, seconds: float, outcome: str) -> None:
        """A reader waited for data; ``outcome`` is ok or failed."""
        self._demand.labels(outcome).observe(seconds)

    def observe_fetch(self, priority: str, seconds: float) -> None:
        """A read from a store; ``priority`` is demand or background."""
        self._fetch.labels(priority).observe(seconds)

    def observe_up(self, mode: str, seconds: float, count: int = 1) -> None:
        """``count`` sandboxes were made in ``seconds``, all together."""
        one = self._up.labels(mode)
        for _ in range(count):
            one.observe(seconds / count)

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered; for :class:`overlay.service.server.ApiServer`."""
        self._requests.labels(method, route, str(status)).inc()
        self._request.labels(method, route).observe(seconds)

    def families(self) -> Iterable[Metric]:
        """All metrics, with their values."""
        return self._registry.collect()

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)


class _OfStatus(Collector):
    def __init__(self, source: Source) -> None:
        self._source = source

    def describe(self) -> Iterable[Metric]:
        return [one.family({}) for one in TAKEN]

    def collect(self) -> Iterable[Metric]:
        try:
            status = self._source()
        except Exception as error:  # whatever it is: the other metrics may tell what is wrong
            log("no status for the metrics", level="error", exception=error)
            status = {}
        return [one.family(status) for one in TAKEN]


def _one(*path: str) -> Callable[[Status], Iterable[Value]]:
    def values(status: Status) -> Iterator[Value]:
        value: Any = status
        for key in path:
            value = value[key]
        if value is not None:
            yield (), float(value)

    return values


def _each(*path: str) -> Callable[[Status], Iterable[Value]]:
    """One value for each key of the object at ``path``, the key as the label."""

    def values(status: Status) -> Iterator[Value]:
        found: Any = status
        for key in path:
            found = found[key]
        for key, value in found.items():
            yield (str(key),), float(value)

    return values


def _by_priority(key: str) -> Callable[[Status], Iterable[Value]]:
    def values(status: Status) -> Iterator[Value]:
        for priority in ("demand", "background"):
            yield (priority,), float(status["fetch"][priority][key])

    return values


def _queued(status: Status) -> Iterator[Value]:
    for priority in ("demand", "background"):
        yield (priority,), float(status["fetch"][f"queued_{priority}"])


def _layers(status: Status) -> Iterator[Value]:
    """Keys of layers are ``<hex>`` or ``<hex>.<variant>``, as ``fuse.2`` or ``direct`` (overlay.layerkey)."""
    counts: dict[str, int] = {}
    for key in status["layers"]:
        variant = re.match("[a-z]*", key.partition(".")[2])
        backend = (variant and variant[0]) or "files"
        counts[backend] = counts.get(backend, 0) + 1
    for backend, count in counts.items():
        yield (backend,), float(count)


def _guarded(status: Status) -> Iterator[Value]:
    for backend, state in status["backends"].items():
        yield (backend,), float(state["guarded_packs"])


def _recordings(status: Status) -> Iterator[Value]:
    yield (), float(len(status["recordings"]))


def _planned(status: Status) -> Iterator[Value]:
    for outcome in ("brought", "present", "failed"):
        yield (outcome,), float(status["prefetch"][outcome])


def _build(status: Status) -> Iterator[Value]:
    yield (VERSION, str(FORMAT_VERSION)), 1.0


def _resident(status: Status) -> Iterator[Value]:
    for process, pid in status["pids"].items():
        for words in _words(f"/proc/{int(pid)}/statm"):
            yield (process,), float(int(words[1]) * _PAGE)


def _cpu(status: Status) -> Iterator[Value]:
    for process, pid in status["pids"].items():
        for words in _words(f"/proc/{int(pid)}/stat"):
            yield (process,), (int(words[11]) + int(words[12])) / _TICKS


def _words(path: str) -> Iterator[list[str]]:
    """The words of a file of /proc, those of ``stat`` behind the command's name; nothing when the process has ended."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            yield stream.read().rpartition(")")[2].split()
    except OSError:
        pass


_Rows = tuple[tuple[str, str, tuple[str, ...], Callable[[Status], Iterable[Value]]], ...]
_GAUGES: _Rows = (
    ("build_info", "1; the release and the format version of layers are its labels.", ("version", "format"), _build),
    ("uptime_seconds", "Since the worker has started.", (), _one("uptime")),
    ("sandboxes", "Sandboxes that exist, by mode.", ("mode",), _each("sandboxes", "mode")),
    ("sandbox_conditions", "The same, by condition.", ("condition",), _each("sandboxes", "condition")),
    ("layers", "Layers that are mounted, by what their data are read from.", ("backend",), _layers),
    ("guarded_packs", "Packs that are mounted and not complete yet.", ("backend",), _guarded),
    ("cache_bytes", "Of the cache, on disk.", (), _one("cache", "bytes")),
    ("cache_limit_bytes", "That it may have; absent without a limit.", (), _one("cache", "limit")),
    ("cache_in_use_bytes", "Of it, of what sandboxes use.", (), _one("cache", "in_use_bytes")),
    ("cache_pinned_bytes", "Of it, of what is pinned.", (), _one("cache", "pinned_bytes")),
    ("cache_packs", "Packs in the cache.", (), _one("cache", "packs")),
    ("cache_metadata_images", "Metadata images in the cache.", (), _one("cache", "metadata_images")),
    (
        "cache_unverified_frames",
        "Frames from before an unclean stop that have not been verified again.",
        (),
        _one("cache", "unverified_frames"),
    ),
    ("fetch_queued_frames", "Frames that wait for a thread.", ("priority",), _queued),
    ("fetch_in_flight", "Reads from stores under way.", (), _one("fetch", "in_flight")),
    ("fetch_waiting", "Requests for frames that have not been answered.", (), _one("fetch", "waiting")),
    ("prefetch_replays", "Replays of plans under way.", (), _one("prefetch", "replays")),
    ("recordings", "Sandboxes whose reads are being recorded.", (), _recordings),
    ("events_pending", "Readers that the kernel keeps waiting for the keeper's answer.", (), _one("events", "pending")),
    ("resident_bytes", "Memory of each process, shared pages in every one.", ("process",), _resident),
)
_COUNTERS: _Rows = (
    ("cache_evicted_bytes", "Evicted from the cache.", (), _one("cache", "evicted_bytes")),
    ("cache_rejected_frames", "Frames of the cache that were found wrong.", (), _one("cache", "rejected_frames")),
    ("cache_discarded_packs", "Packs thrown away as damaged.", (), _one("cache", "discarded_packs")),
    ("fetch_requests", "Requests to stores.", ("priority",), _by_priority("requests")),
    ("fetch_bytes", "Bytes from stores, as stored.", ("priority",), _by_priority("compressed")),
    ("fetch_raw_bytes", "The same, decompressed.", ("priority",), _by_priority("raw")),
    ("fetch_frames", "Frames that came and were right.", ("priority",), _by_priority("frames")),
    ("fetch_retries", "Frames that were tried again.", (), _one("fetch", "retries")),
    ("fetch_failures", "Requests for frames that were answered with an error.", (), _one("fetch", "failures")),
    ("fetch_stalled", "Reads given up since the store didn't answer.", (), _one("fetch", "stalled")),
    ("fetch_coalesced_frames", "Frames that came with a neighbour's request.", (), _one("fetch", "coalesced")),
    ("fetch_verified_frames", "Frames that were there already, and right.", (), _one("fetch", "verified")),
    ("prefetch_frames", "Frames of plans: fetched, there already, or not to be had.", ("outcome",), _planned),
    ("prefetch_used_frames", "Of those fetched, read afterwards.", (), _one("prefetch", "used")),
    ("prefetch_late_frames", "Of those fetched, waited for by a reader already.", (), _one("prefetch", "late")),
    ("prefetch_bytes", "Bytes from stores for plans, as stored.", (), _one("prefetch", "compressed")),
    ("prefetch_raw_bytes", "The same, decompressed.", (), _one("prefetch", "raw")),
    ("plan_problems", "Plans that could not be used, or only in part.", ("kind",), _each("prefetch", "problems")),
    ("events", "Reads that the kernel asked the keeper about.", (), _one("events", "events")),
    ("events_allowed", "Of these, those that went on.", (), _one("events", "allowed")),
    ("events_waited", "Of these, those that had to wait for data.", (), _one("events", "waited")),
    ("events_denied", "Of these, those that failed with EIO.", (), _one("events", "denied")),
    ("restarts", "Times that a process of the node was started again.", ("process",), _each("restarts")),
    ("cpu_seconds", "Of each process.", ("process",), _cpu),
)
TAKEN: tuple[Taken, ...] = (
    *(Taken("gauge", f"imgtool_{name}", help, labels, values) for name, help, labels, values in _GAUGES),
    *(Taken("counter", f"imgtool_{name}", help, labels, values) for name, help, labels, values in _COUNTERS),
)
ALL: tuple[Described, ...] = (DEMAND, FETCH, UP, REQUEST, REQUESTS, *TAKEN)
