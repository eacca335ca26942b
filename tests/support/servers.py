"""Servers of S3 for the tests: moto's and SeaweedFS, each started once in a session, and killed at its end.

``conftest.py`` has the fixtures ``moto`` and ``seaweedfs``. Without the program a test is skipped on a laptop and fails
in CI, as ``support.tools`` says. Both take the same credentials, which the fixtures put into the environment of the
session; moto looks at none, SeaweedFS checks every signature.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from layerstore.store.s3 import S3Bucket
from layerstore.store.s3client import S3Client, S3Url
from support.faultproxy import FaultProxy
from support.tools import lacking

ACCESS, SECRET = "test-access-key", "test-secret-key"
BUCKET = "images"
"""One for all tests, each with a prefix of its own: to SeaweedFS a bucket is a set of volumes, of which it has few."""
PATIENCE = 90.0

_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": ACCESS,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    "AWS_DEFAULT_REGION": "us-east-1",
}
_numbers = itertools.count()


@dataclass(frozen=True)
class S3Server:
    """A server of S3, and the bucket that is there."""

    name: str
    endpoint: str
    bucket: str = BUCKET
    _made: list[Any] = field(default_factory=list, repr=False)
    _shared: list[S3Client] = field(default_factory=list, repr=False)

    def url(self, prefix: str | None = None, *, endpoint: str | None = None) -> str:
        """The URL of a prefix; of one that nobody has used, if none is given."""
        prefix = f"test-{os.getpid()}-{next(_numbers)}" if prefix is None else prefix
        return f"s3://{self.bucket}/{prefix}?endpoint={endpoint or self.endpoint}"

    def open(self, url: str | None = None) -> S3Bucket:
        """A bucket by a client that all share: to make one takes a tenth of a second."""
        url = url or self.url()
        if not self._shared:
            self._shared.append(S3Client(S3Url.parse(self.url(""))))
        return S3Bucket(url, client=self._shared[0])

    @property
    def client(self) -> Any:
        """A client of boto3, straight to the server."""
        if not self._made:
            self._made.append(_client(self.endpoint))
        return self._made[0]

    def keys(self, url: str) -> list[str]:
        """All that is below the prefix of a URL."""
        prefix = url.partition("?")[0].removeprefix(f"s3://{self.bucket}/") + "/"
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return [item["Key"].removeprefix(prefix) for page in pages for item in page.get("Contents", ())]

    @contextlib.contextmanager
    def proxied(self, url: str) -> Iterator[tuple[FaultProxy, str]]:
        """A proxy in front, and the same prefix as it is reached through it."""
        with FaultProxy(self.endpoint) as proxy:
            yield proxy, url.replace(self.endpoint, proxy.url)


@contextlib.contextmanager
def moto_server(directory: Path) -> Iterator[S3Server]:
    program = Path(sys.executable).with_name("moto_server")
    if not program.exists():
        lacking("moto's server is not installed (scripts/setup test)")
    (port,) = free_ports(1)
    command = [str(program), "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, directory / "moto.log", f"http://127.0.0.1:{port}", "moto") as server:
        yield server


@contextlib.contextmanager
def seaweedfs_server(directory: Path) -> Iterator[S3Server]:
    found = Path(sys.executable).with_name("weed")
    program = str(found) if found.exists() else shutil.which("weed")
    if program is None:
        lacking("seaweedfs is not installed (scripts/setup test)")
    data = directory / "seaweedfs"
    data.mkdir()
    _remove_dead_sockets()
    config = directory / "seaweedfs.json"
    keys = [{"accessKey": ACCESS, "secretKey": SECRET}]
    config.write_text(json.dumps({"identities": [{"name": "tests", "credentials": keys, "actions": ["Admin"]}]}))
    ports = free_ports(8, most=50_000)
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
    names += ("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc")
    options = [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
    s3 = ports[names.index("s3.port")]
    options += [
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=100",
    ]
    options += ["-s3", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    try:
        with _running(
            [program, "server", *options], directory / "seaweedfs.log", f"http://127.0.0.1:{s3}", "seaweedfs"
        ) as server:
            yield server
    finally:
        for path in Path("/tmp").glob("seaweedfs-*.sock"):
            if any(f"-{port}." in path.name for port in ports):
                path.unlink(missing_ok=True)
        shutil.rmtree(data, ignore_errors=True)


def _remove_dead_sockets() -> None:
    """What sessions have left that were killed."""
    for path in Path("/tmp").glob("seaweedfs-*.sock"):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                pass  # gone, or somebody else's


@contextlib.contextmanager
def _running(command: list[str], log: Path, endpoint: str, name: str) -> Iterator[S3Server]:
    """A server that answers; SIGTERM would take some of them ten seconds."""
    with pytest.MonkeyPatch.context() as patch, log.open("wb") as output:
        for variable, value in _ENVIRONMENT.items():
            patch.setenv(variable, value)
        for variable in (
            "AWS_SESSION_TOKEN",
            "AWS_PROFILE",
            "AWS_ENDPOINT_URL",
            "AWS_ENDPOINT_URL_S3",
            "HTTP_PROXY",
            "http_proxy",
        ):
            patch.delenv(variable, raising=False)
        with_us = ["setpriv", "--pdeathsig", "KILL"]  # even where the session itself is killed
        process = subprocess.Popen(
            [*with_us, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=log.parent,
            start_new_session=True,
        )
        try:
            failure = _await(process, endpoint)
            if failure is not None:
                lacking(f"{name} doesn't start: {failure}; {log.read_text(errors='replace')[-500:]}")
            server = S3Server(name, endpoint)
            yield server
            for client in server._made:
                client.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await(process: subprocess.Popen[bytes], endpoint: str) -> str | None:
    """Wait until an object can be written; why that isn't so, else None."""
    client = _client(endpoint)
    until = time.monotonic() + PATIENCE
    error: object = None
    try:
        while time.monotonic() < until:
            if process.poll() is not None:
                return f"it ended with {process.returncode}"
            try:
                client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="ready", Body=b"")
                return None
            except Exception as failure:
                error = failure
                if "BucketAlready" in str(failure):
                    with contextlib.suppress(Exception):
                        client.put_object(Bucket=BUCKET, Key="ready", Body=b"")
                        return None
                time.sleep(0.1)
    finally:
        client.close()
    return f"not ready after {PATIENCE:.0f} s: {error}"


def _client(endpoint: str) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=5,
        read_timeout=30,
        retries={"total_max_attempts": 1},
        request_checksum_calculation="when_required",
        s3={"addressing_style": "path"},
    )
    session = boto3.session.Session(ACCESS, SECRET, region_name="us-east-1")
    return session.client("s3", endpoint_url=endpoint, config=config)


def free_ports(count: int, *, most: int = 65_535) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            if probe.getsockname()[1] <= most:
                ports.append(probe.getsockname()[1])
        return ports
