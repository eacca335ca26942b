"""Serves a directory over HTTP, with ranges and connections that stay open: nginx, one process.

::

    python -m benchmarks.fileserver DIR [--listen HOST:PORT] [--log FILE] [--tls CERTIFICATE KEY]

prints one JSON line with the URL once it answers, and ends with SIGTERM. It is nginx and not something of ours because
a server in Python would take a good part of the two processors that a client and its link are measured on.
``docs/operations.md`` has the same configuration for a server that stays.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness import tool

CONFIGURATION = """
daemon off;
master_process off;
{user}
pid {work}/pid;
error_log stderr warn;
events {{ worker_connections 1024; }}
http {{
    log_not_found off;
    {log}
    default_type application/octet-stream;
    sendfile on;  # without tcp_nopush: on the loopback interface, segments of 64 KiB then wait for late ACKs
    keepalive_timeout 600;
    keepalive_requests 1000000;
    client_body_temp_path {work}/body;
    proxy_temp_path {work}/proxy;
    fastcgi_temp_path {work}/fastcgi;
    uwsgi_temp_path {work}/uwsgi;
    scgi_temp_path {work}/scgi;
    server {{
        listen {listen}{tls};
        root "{directory}";
        location /blobs/ {{ add_header Cache-Control "public, max-age=31536000, immutable"; }}
        location /refs/ {{ add_header Cache-Control no-cache; autoindex on; autoindex_format json; }}
    }}
}}
"""
LOG_FORMAT = """log_format requests escape=json '{{"path": "$request_uri", "status": $status, "range": "$http_range", '
        '"bytes": $bytes_sent, "body": $body_bytes_sent, "seconds": $request_time}}';
    access_log {log} requests;"""


@contextlib.contextmanager
def serving(
    directory: Path, *, listen: str | None = None, log: Path | None = None, tls: Sequence[Path] | None = None
) -> Iterator[str]:
    """The URL of ``directory`` for as long as the block runs.

    Args:
        directory: what is served.
        listen: ``HOST:PORT``; without, a free port of 127.0.0.1.
        log: where one JSON line a request goes.
        tls: certificate and key, both PEM; without, it is plain HTTP.
    """
    program = tool("nginx")
    if program is None:
        raise SystemExit("nginx is not there: scripts/setup test")
    address = listen or free_address()
    with tempfile.TemporaryDirectory(prefix="imgtool-fileserver-") as work:
        configuration = Path(work, "nginx.conf")
        configuration.write_text(
            CONFIGURATION.format(
                user="user root;" if os.geteuid() == 0 else "",
                work=work,
                log=LOG_FORMAT.format(log=log) if log else "access_log off;",
                listen=address,
                tls=" ssl; ssl_certificate {}; ssl_certificate_key {}".format(*tls) if tls else "",
                directory=directory.resolve(),
            )
        )
        process = subprocess.Popen([program, "-p", work, "-e", "stderr", "-c", str(configuration)])
        try:
            await_listener(address, process)
            yield f"{'https' if tls else 'http'}://{address}"
        finally:
            process.terminate()
            process.wait()


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "{}:{}".format(*probe.getsockname())


def await_listener(address: str, process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until somebody listens there."""
    host, _, port = address.rpartition(":")
    for _ in range(500):
        if process is not None and process.poll() is not None:
            raise SystemExit(f"{process.args!r} ended with {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        time.sleep(0.01)
    raise SystemExit(f"nobody listens on {address}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--listen", metavar="HOST:PORT")
    parser.add_argument("--log", type=Path, metavar="FILE", help="one JSON line a request")
    parser.add_argument("--tls", type=Path, nargs=2, metavar=("CERTIFICATE", "KEY"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with serving(options.directory, listen=options.listen, log=options.log, tls=options.tls) as url:
        print(json.dumps({"url": url}), flush=True)
        while True:
            signal.pause()


if __name__ == "__main__":
    main()
