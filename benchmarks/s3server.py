"""A server of S3 on the loopback interface: SeaweedFS, from its package on PyPI, with what it holds in a directory."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.fileserver import await_listener

BUCKET = "images"
ACCESS, SECRET = "benchmark", "benchmark"
_PATIENCE = 90.0
_PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")


def lacking() -> str | None:
    """Why there is none; None: there is."""
    return None if _program().exists() else "no weed here: scripts/setup test"


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[str]:
    """``HOST:PORT`` of a server that has the bucket, for as long as the block runs; it takes any credentials."""
    directory.mkdir(parents=True)
    ports = _free_ports(len(_PORTS) + 2)
    s3 = ports[-2]
    options = [f"-{name}={port}" for name, port in zip((*_PORTS, "s3.port", "s3.port.grpc"), ports, strict=True)]
    options += [f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.volumeSizeLimitMB=1024", "-s3"]
    options += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    log = directory.with_name(directory.name + ".log")
    with log.open("wb") as output:
        process = subprocess.Popen([str(_program()), "server", *options], stdout=output, stderr=output)
    try:
        await_listener(f"127.0.0.1:{s3}", process)
        _await_bucket(process, f"http://127.0.0.1:{s3}")
        yield f"127.0.0.1:{s3}"
    finally:
        process.send_signal(signal.SIGKILL)  # it takes SIGTERM for ten seconds of leave
        process.wait()
        for path in Path("/tmp").glob("seaweedfs-*.sock"):
            if any(f"-{port}." in path.name for port in ports):
                path.unlink(missing_ok=True)


def client(endpoint: str) -> Any:
    """boto3's, as its documentation makes it."""
    import boto3
    from botocore.config import Config

    session = boto3.session.Session(ACCESS, SECRET, region_name="us-east-1")
    config = Config(s3={"addressing_style": "path"}, request_checksum_calculation="when_required")
    return session.client("s3", endpoint_url=endpoint, config=config)


def credentials() -> None:
    """For processes that are started from here on."""
    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true"}


def _await_bucket(process: subprocess.Popen[bytes], endpoint: str) -> None:
    until = time.monotonic() + _PATIENCE
    made = client(endpoint)
    while True:
        try:
            made.create_bucket(Bucket=BUCKET)
            made.put_object(Bucket=BUCKET, Key="ready", Body=b"")
            return
        except Exception as error:
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"SeaweedFS doesn't start: {error}") from error
            if "BucketAlready" in str(error):
                with contextlib.suppress(Exception):
                    made.put_object(Bucket=BUCKET, Key="ready", Body=b"")
                    return
            time.sleep(0.2)


def _program() -> Path:
    return Path(sys.executable).with_name("weed")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
