"""The metrics: what they say, and that nothing keeps them from being said."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from support.service import FakeService, logged
from support.tools import CHECKOUT

from layerstore.version import FORMAT_VERSION, VERSION
from overlay.service.metrics import ALL, Metrics


def samples(metrics: Metrics) -> dict[str, float]:
    """All series by their text, such as ``imgtool_layers{backend="fuse"}``."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def test_what_is_counted_here() -> None:
    metrics = Metrics()
    metrics.observe_demand(0.02, "ok")
    metrics.observe_demand(40.0, "failed")
    metrics.observe_fetch("demand", 0.5)
    metrics.observe_up("lazy", 0.5, 1000)
    metrics.observe_up("eager", 3.0)
    metrics.observe_request("GET", "/v1/status", 200, 0.0003)
    metrics.observe_request("GET", "/v1/status", 200, 0.0003)
    found = samples(metrics)
    assert found['imgtool_demand_seconds_count{outcome="ok"}'] == 1
    assert found['imgtool_demand_seconds_bucket{le="0.025",outcome="ok"}'] == 1
    assert found['imgtool_demand_seconds_bucket{le="0.01",outcome="ok"}'] == 0
    assert found['imgtool_demand_seconds_bucket{le="30.0",outcome="failed"}'] == 0
    assert found['imgtool_demand_seconds_sum{outcome="failed"}'] == 40
    assert found['imgtool_fetch_seconds_count{priority="demand"}'] == 1
    assert found['imgtool_up_seconds_bucket{le="0.0005",mode="lazy"}'] == 1000
    assert found['imgtool_up_seconds_count{mode="eager"}'] == 1
    assert found['imgtool_api_requests_total{method="GET",route="/v1/status",status="200"}'] == 2
    assert found['imgtool_api_request_seconds_count{method="GET",route="/v1/status"}'] == 2
    assert not [name for name in found if "_created" in name]


def test_what_is_taken_from_the_status() -> None:
    service, metrics = FakeService(), Metrics()
    status: dict[str, Any] = {**service.status(), "pids": {"worker": os.getpid(), "keeper": (1 << 22) + 1}}
    metrics.set_source(lambda: status)
    found = samples(metrics)
    assert found[f'imgtool_build_info{{format="{FORMAT_VERSION}",version="{VERSION}"}}'] == 1
    assert found["imgtool_uptime_seconds"] == 86.5
    assert found['imgtool_sandboxes{mode="lazy"}'] == 0
    assert found['imgtool_sandbox_conditions{condition="ok"}'] == 0
    assert found['imgtool_layers{backend="files"}'] == 1
    assert found['imgtool_layers{backend="fuse"}'] == 1
    assert found['imgtool_guarded_packs{backend="fanotify"}'] == 2
    assert found["imgtool_cache_bytes"] == 1_450_000_000
    assert found["imgtool_cache_evicted_bytes_total"] == 0
    assert found['imgtool_fetch_requests_total{priority="demand"}'] == 4
    assert found['imgtool_fetch_frames_total{priority="background"}'] == 40
    assert found['imgtool_fetch_queued_frames{priority="demand"}'] == 0
    assert found["imgtool_prefetch_replays"] == 1
    assert found["imgtool_recordings"] == 0
    assert found['imgtool_prefetch_frames_total{outcome="brought"}'] == 180
    assert found['imgtool_prefetch_frames_total{outcome="present"}'] == 10
    assert found["imgtool_prefetch_used_frames_total"] == 170
    assert found["imgtool_prefetch_late_frames_total"] == 4
    assert found["imgtool_prefetch_bytes_total"] == 17_000_000
    assert found['imgtool_plan_problems_total{kind="damaged"}'] == 1
    assert found["imgtool_events_total"] == 25
    assert found["imgtool_events_waited_total"] == 3
    assert found["imgtool_events_pending"] == 1
    assert found['imgtool_restarts_total{process="worker"}'] == 0
    assert found['imgtool_resident_bytes{process="worker"}'] > 1 << 20
    assert found['imgtool_cpu_seconds_total{process="worker"}'] > 0
    assert 'imgtool_resident_bytes{process="keeper"}' not in found  # no such process
    status["cache"]["limit"] = None
    assert "imgtool_cache_limit_bytes" not in samples(metrics)


def test_what_the_status_lacks_or_has_in_another_shape_is_left_out() -> None:
    metrics = Metrics()
    complete = len(samples_of_status(metrics, FakeService().status()))
    for key in (
        "prefetch",
        "recordings",
        "cache",
        "fetch",
        "events",
        "sandboxes",
        "layers",
        "pids",
        "restarts",
        "backends",
        "uptime",
    ):
        for value in (None, 5, "text", {}, [], {"x": "y"}):
            found = samples_of_status(metrics, {**FakeService().status(), key: value})
            assert found[f'imgtool_build_info{{format="{FORMAT_VERSION}",version="{VERSION}"}}'] == 1
            assert len(found) <= complete + 1


def samples_of_status(metrics: Metrics, status: dict[str, Any]) -> dict[str, float]:
    metrics.set_source(lambda: status)
    return samples(metrics)


def test_a_status_that_fails_takes_nothing_else_with_it() -> None:
    metrics = Metrics()
    metrics.observe_fetch("demand", 0.5)

    def failing() -> dict[str, Any]:
        raise RuntimeError("no status")

    metrics.set_source(failing)
    with logged() as records:
        assert samples(metrics)['imgtool_fetch_seconds_count{priority="demand"}'] == 1
    assert "no status for the metrics" in [record.getMessage() for record in records]


def test_names_follow_the_rules_of_prometheus() -> None:
    units = ("_seconds", "_bytes")
    for metric in ALL:
        assert metric.name.startswith("imgtool_")
        assert not metric.name.endswith("_total"), "it is added"
        assert metric.help.endswith(".")
        if metric.kind == "histogram":
            assert metric.name.endswith(units)
    assert len({metric.name for metric in ALL}) == len(ALL)


def test_two_do_not_mix_and_the_process_has_none() -> None:
    one, other = Metrics(), Metrics()
    one.observe_fetch("demand", 1.0)
    assert 'imgtool_fetch_seconds_count{priority="demand"}' not in samples(other)
    script = (
        "from prometheus_client import REGISTRY; before = len(list(REGISTRY.collect())); "
        "from overlay.service.metrics import Metrics; Metrics(); print(len(list(REGISTRY.collect())) - before)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=CHECKOUT)
    assert ran.stdout == "0\n"
