"""Registries for tests: docker's own, with and without authentication, and benches for the conformance suite.

Debian's ``docker-registry`` is started on the loopback interface with its content in a directory, and always stopped.
Its tokens are JSON web tokens, signed by a key that it was given the certificate of; a server of our own issues them.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import http.server
import ipaddress
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import parse_qs, urlsplit

import pytest

from layerstore.digest import Digest
from layerstore.registry.address import RegistryAddress
from layerstore.registry.client import Patience, RegistryClient
from layerstore.store.protocol import BlobInfo, PruneStore
from layerstore.store.registry import RegistryStore
from support.registry_faults import FakeRegistry
from support.stores import SteppedClock
from support.tools import need_tool

USER, PASSWORD = "alice", "s3cret:with-colon"
BCRYPT = "$2b$04$imgtooltestsimgtoolteeSu1Q8IzW.G0QpbZdWkX.uEaAO6KiHfe"
"""The password's hash, as the registry takes it."""
NOBODY = "/nonexistent/config.json"
"""A docker configuration without credentials."""
IMPATIENT = Patience(attempts=3, pause=0.01, total=1.0)


@dataclass
class DockerRegistry:
    """docker's registry 2.8 on the loopback interface; a context manager.

    Attributes:
        root: a directory for its content; it is made.
        auth: the section of its configuration.
        deletes: whether it deletes manifests and blobs.
        http: more of the section of that name.
    """

    root: Path
    auth: dict[str, object] = field(default_factory=dict)
    deletes: bool = True
    http: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self.host = ""

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    def start(self) -> None:
        """Also after :meth:`stop`, at the same address."""
        program = need_tool("docker-registry")
        self.host = self.host or f"127.0.0.1:{_free_port()}"
        configuration = {
            "version": "0.1",
            "log": {"level": "error", "accesslog": {"disabled": True}},
            "storage": {
                "filesystem": {"rootdirectory": str(self.root)},
                "delete": {"enabled": self.deletes},
                "maintenance": {"uploadpurging": {"enabled": False}},
            },
            "http": {"addr": self.host, "secret": "for tests", **self.http},
        }
        if self.auth:
            configuration["auth"] = self.auth
        path = self.root.with_name(f"{self.root.name}.json")  # JSON is YAML
        path.write_text(json.dumps(configuration))
        with self.root.with_name(f"{self.root.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [program, "serve", str(path)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        end = time.monotonic() + 20
        while not _listens(self.host):
            assert self._process.poll() is None, self.root.with_name(f"{self.root.name}.log").read_text()[-2000:]
            assert time.monotonic() < end, "docker-registry doesn't listen"
            time.sleep(0.01)

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def uploads(self) -> list[str]:
        """Sessions that nobody has ended; of those that were, the registry keeps an empty rest."""
        return [str(path.parent) for path in self.root.glob("**/_uploads/*/startedat")]

    def __enter__(self) -> DockerRegistry:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _listens(host: str) -> bool:
    name, _, port = host.rpartition(":")
    try:
        socket.create_connection((name, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def basic_auth(directory: Path) -> dict[str, object]:
    """Of a registry that lets USER in alone."""
    path = directory / "htpasswd"
    path.write_text(f"{USER}:{BCRYPT}\n")
    return {"htpasswd": {"realm": "tests", "path": str(path)}}


def docker_config(directory: Path, host: str, user: str = USER, password: str = PASSWORD) -> str:
    """The path of a configuration with credentials for ``host``."""
    path = directory / "config.json"
    auth = base64.b64encode(f"{user}:{password}".encode()).decode()
    path.write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    return str(path)


class TokenServer:
    """Issues tokens that docker's registry believes, for USER alone; a context manager.

    Attributes:
        seconds: for which a token is good.
        issued: the scopes asked for, in order.
    """

    SERVICE, ISSUER = "registry of the tests", "token server of the tests"

    def __init__(self, directory: Path, seconds: int = 300) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import rsa

        self.seconds = seconds
        self.issued: list[list[str]] = []
        self._key = rsa.generate_private_key(65537, 2048)
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, self.ISSUER)])
        now = datetime.datetime.now(datetime.UTC)
        self._certificate = (
            x509.CertificateBuilder(name, name, self._key.public_key(), 1)
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self._bundle = directory / "token.pem"
        self._bundle.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _TokenHandler)
        self._server.daemon_threads = False
        cast(Any, self._server).owner = self
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(0.01), name="token server")

    @property
    def auth(self) -> dict[str, object]:
        """The section of a registry's configuration."""
        return {
            "token": {
                "realm": f"http://127.0.0.1:{self._server.server_address[1]}/token",
                "service": self.SERVICE,
                "issuer": self.ISSUER,
                "rootcertbundle": str(self._bundle),
            }
        }

    def token(self, scopes: Sequence[str]) -> str:
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import padding

        self.issued.append(list(scopes))
        now = int(time.time())
        access = []
        for scope in scopes:
            kind, _, rest = scope.partition(":")
            name, _, actions = rest.rpartition(":")
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        chain = [base64.b64encode(self._certificate.public_bytes(serialization.Encoding.DER)).decode()]
        header = {"typ": "JWT", "alg": "RS256", "x5c": chain}
        claims = {
            "iss": self.ISSUER,
            "sub": USER,
            "aud": self.SERVICE,
            "exp": now + self.seconds,
            "nbf": now - 10,
            "iat": now - 10,
            "jti": os.urandom(8).hex(),
            "access": access,
        }
        text = f"{_base64url(json.dumps(header).encode())}.{_base64url(json.dumps(claims).encode())}"
        signature = self._key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256())
        return f"{text}.{_base64url(signature)}"

    def __enter__(self) -> TokenServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class _TokenHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        owner: TokenServer = cast(Any, self.server).owner
        known = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if self.headers.get("Authorization") != f"Basic {known}":
            self.send_error(401)
            return
        scopes = parse_qs(urlsplit(self.path).query).get("scope", [])
        body = json.dumps({"token": owner.token(scopes), "expires_in": owner.seconds}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class Contents(Protocol):
    """What a registry has in a repository, by the back door."""

    def sizes(self) -> dict[Digest, int]: ...
    def delete(self, digest: Digest) -> None: ...
    def damage(self, digest: Digest, data: bytes) -> None: ...


class FakeContents:
    def __init__(self, registry: FakeRegistry, repository: str) -> None:
        self._repository = registry.repository(repository)

    def sizes(self) -> dict[Digest, int]:
        found = {Digest.parse(name): len(data) for name, data in self._repository.blobs.items()}
        return found | {Digest.parse(name): len(data) for name, (_, data) in self._repository.manifests.items()}

    def delete(self, digest: Digest) -> None:
        self._repository.blobs.pop(str(digest), None)
        self._repository.manifests.pop(str(digest), None)

    def damage(self, digest: Digest, data: bytes) -> None:
        name = str(digest)
        if name in self._repository.blobs:
            self._repository.blobs[name] = data
        if name in self._repository.manifests:
            self._repository.manifests[name] = self._repository.manifests[name][0], data


class DockerContents:
    """The files of docker's registry, distribution's layout."""

    def __init__(self, registry: DockerRegistry, repository: str) -> None:
        self._top = registry.root / "docker/registry/v2"
        self._repository = self._top / "repositories" / repository

    def sizes(self) -> dict[Digest, int]:
        found = {}
        for kind in ("_layers", "_manifests/revisions"):
            for path in self._repository.glob(f"{kind}/*/*/link"):
                digest = Digest(path.parent.parent.name, path.parent.name)
                found[digest] = self._data(digest).stat().st_size
        return found

    def delete(self, digest: Digest) -> None:
        for kind in ("_layers", "_manifests/revisions"):
            shutil.rmtree(self._repository / kind / digest.algorithm / digest.hex, ignore_errors=True)

    def damage(self, digest: Digest, data: bytes) -> None:
        self._data(digest).write_bytes(data)

    def _data(self, digest: Digest) -> Path:
        return self._top / "blobs" / digest.algorithm / digest.hex[:2] / digest.hex / "data"


class EmptiedStore(RegistryStore):
    """What the suite needs to see what is there, and to take something away, as an operator does."""

    def __init__(self, url: str, contents: Contents) -> None:
        super().__init__(url, docker_config=NOBODY, patience=IMPATIENT)
        self._contents = contents

    def blobs(self) -> Iterator[BlobInfo]:
        for digest, size in sorted(self._contents.sizes().items()):
            yield BlobInfo(digest, size, 0.0)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        yield

    def delete(self, digest: Digest, *, older_than: float = 0.0) -> bool:
        there = digest in self._contents.sizes()
        self._contents.delete(digest)
        return there

    def reclaim(self, *, older_than: float, dry_run: bool = False) -> int:
        return 0


class RegistryBench:
    """A repository of a registry on the bench of the conformance suite."""

    EXEMPT = frozenset(
        {
            "test_it_has_all_capabilities",  # a registry collects by itself, or not at all
            "test_a_target_keeps_annotations_and_unknown_fields",  # a tag has none
            "test_leases_pin_until_they_are_released",  # leases protect nothing
            "test_a_lease_expires_by_the_stores_clock_and_stays_expired",
            "test_reclaim_forgets_leases_some_time_after_they_expired",
            "test_listing_tells_size_and_age",
            "test_deletion_is_idempotent_and_looks_at_the_age",
            "test_deletion_needs_the_lock",
            "test_collecting_excludes_publishers_and_collectors",
            "test_quarantine_takes_only_what_is_corrupt",
        }
    )

    def __init__(self, registry: FakeRegistry | DockerRegistry, repository: str = "suite/store") -> None:
        self._stack = contextlib.ExitStack()
        self.registry = self._stack.enter_context(registry)
        fake = isinstance(registry, FakeRegistry)
        contents: Contents = (FakeContents if fake else DockerContents)(cast(Any, registry), repository)
        self.damage = contents.damage
        self.clock = SteppedClock(time.time_ns)
        store = EmptiedStore(f"oci://{registry.host}/{repository}", contents)
        self._stack.callback(store.close)
        self.store = cast(PruneStore, store)

    def stamp(self, digest: Digest) -> None:
        pass

    def close(self) -> None:
        self._stack.close()


class DockerBench(RegistryBench):
    """docker's own."""

    EXEMPT = RegistryBench.EXEMPT | {
        "test_a_damaged_blob_is_named_and_replaced",  # it doesn't replace a blob that it has
        "test_no_reference_to_a_target_of_another_size",  # it fails to read a damaged manifest, with status 500
        "test_sha512_is_another_name_space",  # it also has what has another digest by its sha256
    }


def client_of(
    registry: FakeRegistry | DockerRegistry,
    repository: str = "a",
    *,
    config: str = NOBODY,
    patience: Patience = IMPATIENT,
    read_timeout: float = 5.0,
) -> RegistryClient:
    """A client of a repository; the caller closes it."""
    address = RegistryAddress(registry.host, repository, registry.url.startswith("http:"))
    return RegistryClient(address, docker_config=config, patience=patience, read_timeout=read_timeout)


class Recorded:
    """Pauses that are noted instead of taken."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def patience(self, attempts: int = 5, total: float = 30.0) -> Patience:
        return Patience(attempts, 0.2, total, self.pauses.append)


@contextmanager
def own_authority(directory: Path, monkeypatch: pytest.MonkeyPatch, *, trusted: bool = True) -> Iterator[Any]:
    """What a server of this machine needs for TLS: wraps its sockets. The system trusts it, or not."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority of the tests")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = directory / "authority.pem"
    path.write_bytes(
        certificate.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    with monkeypatch.context() as patch:
        if trusted:
            patch.setenv("SSL_CERT_FILE", str(path))
        yield lambda connection: context.wrap_socket(connection, server_side=True)
