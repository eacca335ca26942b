"""The simulated link of the benchmarks lets everything pass as it is, and counts it."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from support.faults import fsync_for_free
from support.httpstore import StoreServer, cut_short, reset
from support.stores import image, publish
from support.tools import CHECKOUT

from layerstore.digest import Digest
from layerstore.errors import UnavailableError
from layerstore.store.directory import DirectoryStore
from layerstore.store.http import HttpStore

BIG = hashlib.shake_128(b"link").digest(1_000_000)


class Link:
    def __init__(self, process: subprocess.Popen[bytes], address: str, control: Path) -> None:
        self.process = process
        self.address = address
        self._control = control

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def counts(self) -> dict[str, float]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20)
            connection.connect(str(self._control))
            found = json.loads(b"".join(iter(lambda: connection.recv(4096), b"")))
        assert isinstance(found, dict)
        return found


@contextmanager
def linked(server: StoreServer, control: Path, *options: str) -> Iterator[Link]:
    command = [sys.executable, "-m", "benchmarks.link", "--listen", "127.0.0.1:0", "--to", f"127.0.0.1:{server.port}"]
    command += ["--control", str(control), *options]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield Link(process, json.loads(process.stdout.readline())["listening"], control)
        finally:
            process.terminate()
            out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, b"")
    assert json.loads(out).keys() == {"connections", "turns", "bytes_up", "bytes_down", "processor_seconds"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    with fsync_for_free():
        store = DirectoryStore.create(str(tmp_path / "store"))
        publish(store, "name", image(BIG))
    with StoreServer(store.root) as server:
        yield server


@pytest.mark.parametrize(
    "options", [(), ("--latency", "0.01"), ("--rate", "400M"), ("--latency", "0.005", "--rate", "1G")]
)
def test_what_passes_is_counted_and_unchanged(server: StoreServer, tmp_path: Path, options: tuple[str, ...]) -> None:
    with linked(server, tmp_path / "control", *options) as link, closing(HttpStore(link.url)) as store:
        blob = store.open(Digest.of(BIG))
        spans = [(20_000 + 1_000 * number, 200_000 + number) for number in range(24)]
        with ThreadPoolExecutor(6) as pool:
            for (offset, length), data in zip(spans, pool.map(lambda span: blob.read_at(*span), spans), strict=True):
                assert data == BIG[offset : offset + length]
        counts = link.counts()
        assert counts["connections"] == server.connections <= 6
        assert counts["turns"] == server.requests() == 26
        assert counts["bytes_down"] == server.sent()
        assert 26 * 50 < counts["bytes_up"] < 26 * 1_000


def test_a_turn_takes_at_least_its_latency_and_bytes_their_time(server: StoreServer, tmp_path: Path) -> None:
    options = ("--latency", "0.05", "--rate", "80M")
    with linked(server, tmp_path / "control", *options) as link, closing(HttpStore(link.url)) as store:
        blob = store.open(Digest.of(BIG))
        start = time.monotonic()
        blob.read_at(20_000, 1)
        turn = time.monotonic() - start
        with ThreadPoolExecutor(4) as pool:
            start = time.monotonic()
            list(pool.map(lambda number: blob.read_at(20_000 + number, 200_000), range(4)))
            shared = time.monotonic() - start
    # Timers may be late and are allowed for: nothing here is faster than the link by more than that.
    assert turn > 0.04
    assert shared > 0.04 + 4 * 200_000 * 8 / 80e6 * 0.9


def test_faults_pass_as_well(server: StoreServer, tmp_path: Path) -> None:
    with linked(server, tmp_path / "control") as link, closing(HttpStore(link.url)) as store:
        blob = store.open(Digest.of(BIG))
        for fault in (cut_short(100_000), reset(100_000), reset()):
            server.misbehave(fault, "blobs/")
            with pytest.raises(UnavailableError):
                blob.read_at(20_000, 500_000)
            server.behave()
            assert blob.read_at(20_000, 500_000) == BIG[20_000:520_000]
        server.close()
        with pytest.raises(UnavailableError):
            blob.read_at(20_000, 500_000)
        assert link.process.poll() is None
