"""A registry in this process that keeps all in memory, and misbehaves when told: for what a real one does rarely.

::

    with FakeRegistry() as registry:
        registry.misbehave(cut_short(100), "GET /v2/a/blobs/", times=1)
        RegistryStore(f"oci://{registry.host}/a")...

Faults are those of :mod:`support.httpstore`, functions of an exchange that has the answer that would have been right; a
fault is found by a part of ``METHOD /path?query``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

from support.httpstore import PAGE, Exchange, Fault, requested_range
from support.listener import Listener, Request

JSON = "application/json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"


@dataclass
class RegistryExchange(Exchange):
    """One request and its right answer.

    Attributes:
        method: of HTTP.
        query: of the URL; the last value of each name.
        request: its body.
    """

    method: str = "GET"
    query: dict[str, str] = field(default_factory=dict)
    request: bytes = b""

    def set_body(self, body: bytes, *, status: int = 200, **headers: str) -> None:
        super().set_body(body, status=status, **headers)
        if self.method == "HEAD":
            self.body = b""

    def set_error(self, status: int, code: str, detail: object = None, **headers: str) -> None:
        document = {"errors": [{"code": code, "message": code.lower(), "detail": detail}]}
        self.set_body(json.dumps(document).encode(), status=status, Content_Type=JSON, **headers)


@dataclass
class Repository:
    """What a repository has, by the text of digests."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    uploads: dict[str, bytearray] = field(default_factory=dict)


@dataclass
class Gate:
    """Who may come in: tokens that are good for so many requests, or basic authentication.

    Attributes:
        user: and password; None lets everybody have a token.
        uses: requests for which a token is good; None: any number.
        seconds: said of a token's life; None says nothing.
        basic: no tokens: user and password with each request.
        issued: the scopes that tokens were asked for with, in order.
        realm: of the challenge.
        refuses: every token.
    """

    user: tuple[str, str] | None = None
    uses: int | None = None
    seconds: int | None = None
    basic: bool = False
    realm: str = ""
    refuses: bool = False
    identity_token: str | None = None
    issued: list[tuple[str, ...]] = field(default_factory=list)
    tokens: dict[str, tuple[list[str], int]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def issue(self, scopes: list[str]) -> dict[str, object]:
        with self.lock:
            token = secrets.token_hex(16)
            self.tokens[token] = (scopes, 0)
            self.issued.append(tuple(scopes))
        return {"token": token} | ({} if self.seconds is None else {"expires_in": self.seconds})

    def knows(self, header: str) -> bool:
        if self.user is None:
            return True
        return header == "Basic " + base64.b64encode(":".join(self.user).encode()).decode()

    def admits(self, header: str, needed: list[str]) -> bool:
        if self.basic:
            return bool(header) and self.knows(header)
        with self.lock:
            scopes, used = self.tokens.get(header.removeprefix("Bearer "), ([], 0))
            granted = {
                (scope.rpartition(":")[0], action) for scope in scopes for action in scope.split(":")[2].split(",")
            }
            wanted = {
                (scope.rpartition(":")[0], action) for scope in needed for action in scope.split(":")[2].split(",")
            }
            if self.refuses or not scopes or not wanted <= granted or (self.uses is not None and used >= self.uses):
                return False
            self.tokens[header.removeprefix("Bearer ")] = scopes, used + 1
            return True

    def expire(self) -> None:
        """All tokens there are."""
        with self.lock:
            self.tokens.clear()


@dataclass
class FakeRegistry(Listener):
    """A registry on the loopback interface; a context manager.

    Attributes:
        referrers_api: whether it lists referrers.
        deletes: ``tags`` and manifests, ``manifests`` only, or nothing.
        validates: a manifest is refused whose blobs it lacks.
        page: entries of a list at a time.
        conditions: whether writes of manifests are conditional.
        digests: whether it says the digests of what it gives.
        location: makes the Location of an upload of its path, which has a query.
        elsewhere: makes the URL to which requests for a blob are sent of its digest; None: nowhere.
        gate: who may come in; None: everybody.
    """

    referrers_api: bool = False
    deletes: str = "tags"
    validates: bool = True
    page: int = 1000
    conditions: bool = False
    digests: bool = True
    location: Callable[[str], str] = lambda path: path
    elsewhere: Callable[[str], str] | None = None
    mounts: bool = True
    gate: Gate | None = None
    tls: Callable[[socket.socket], socket.socket] | None = None
    address: str = "127.0.0.1"
    repositories: dict[str, Repository] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._orders: list[tuple[Fault, str, list[int | None], bool]] = []
        self._requests: list[tuple[str, Mapping[str, str]]] = []
        self.listen("fake registry", host=self.address, tls=self.tls)

    @property
    def host(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://{self.host}"

    def repository(self, name: str) -> Repository:
        with self._lock:
            return self.repositories.setdefault(name, Repository())

    def misbehave(self, fault: Fault, request: str = "", *, times: int | None = None, reach: bool = True) -> None:
        """Answer requests whose line contains ``request`` by ``fault``: so many of them, or all.

        What is not to ``reach`` the registry does nothing there; its right answer is an empty one.
        """
        with self._lock:
            self._orders.append((fault, request, [times], reach))

    def behave(self) -> None:
        with self._lock:
            self._orders.clear()

    def requests(self, request: str = "") -> list[str]:
        """The lines of those that contain ``request``."""
        with self._lock:
            return [line for line, _ in self._requests if request in line]

    def headers(self, request: str = "") -> list[Mapping[str, str]]:
        """Of these requests, names in lower case."""
        with self._lock:
            return [headers for line, headers in self._requests if request in line]

    def forget(self) -> None:
        with self._lock:
            self._requests.clear()
            self.connections = 0

    # For the connections' threads

    def exchange(self, connection: socket.socket, request: Request) -> bool:
        found = self.fault_for(f"{request.method} {request.shown}", request.headers)
        exchange = self.right_answer(connection, request, found is None or found[1])
        if found is None:
            exchange.answer()
        else:
            found[0](exchange)
        return exchange.keep

    def fault_for(self, line: str, headers: Mapping[str, str]) -> tuple[Fault, bool] | None:
        with self._lock:
            self._requests.append((line, headers))
            for fault, part, left, reach in self._orders:
                if part in line and left[0] != 0:
                    if left[0] is not None:
                        left[0] -= 1
                    return fault, reach
        return None

    def right_answer(self, connection: socket.socket, request: Request, reach: bool) -> RegistryExchange:
        parts = urlsplit(request.target)
        query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        exchange = RegistryExchange(
            self,
            connection,
            unquote(parts.path),
            request.headers,
            b"",
            404,
            {},
            b"",
            True,
            request.method,
            query,
            request.body,
        )
        if reach:
            with self._lock:
                self._route(exchange, parse_qs(parts.query))
        return exchange

    def _route(self, exchange: RegistryExchange, query: Mapping[str, list[str]]) -> None:
        exchange.set_error(404, "NAME_UNKNOWN")
        if exchange.path == "/token":
            self._token(exchange, query)
            return
        if exchange.path == "/v2/":
            exchange.set_body(b"{}", Content_Type=JSON)
            return
        match = re.fullmatch(r"/v2/(.+)/(blobs|manifests|tags|referrers)/(.*)", exchange.path)
        if match is None:
            return
        name, kind, rest = match.groups()
        if self.gate is not None and not self._admitted(exchange, name):
            return
        if kind == "blobs" and rest.startswith("uploads/"):
            self._upload(exchange, name, self.repository(name), rest.removeprefix("uploads/"))
            return
        if kind == "manifests" and exchange.method == "PUT":
            self._put_manifest(exchange, self.repository(name), rest)
            return
        repository = self.repositories.get(name)
        if repository is None:
            return
        if kind == "blobs":
            self._blob(exchange, repository, rest)
        elif kind == "manifests":
            self._manifest(exchange, repository, rest)
        elif kind == "tags":
            self._list(exchange, sorted(repository.tags), lambda part: {"name": name, "tags": part}, JSON)
        elif self.referrers_api:
            found = _referrers(repository, rest)
            self._list(
                exchange, found, lambda part: {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": part}, OCI_INDEX
            )
        else:
            exchange.set_body(b"404 page not found", status=404, Content_Type="text/plain")

    def _admitted(self, exchange: RegistryExchange, name: str) -> bool:
        assert self.gate is not None
        actions = {"GET": "pull", "HEAD": "pull", "DELETE": "delete"}.get(exchange.method, "pull,push")
        if exchange.method == "DELETE" and "/uploads/" in exchange.path:
            actions = "pull,push"
        needed = [f"repository:{name}:{actions}"]
        if "from" in exchange.query:
            needed.append(f"repository:{exchange.query['from']}:pull")
        if self.gate.admits(exchange.headers.get("authorization", ""), needed):
            return True
        realm = self.gate.realm or f"{self.url}/token"
        bearer = f'Bearer realm="{realm}",service="fake",scope="{" ".join(needed)}"'
        exchange.set_error(401, "UNAUTHORIZED", WWW_Authenticate='Basic realm="fake"' if self.gate.basic else bearer)
        return False

    def _token(self, exchange: RegistryExchange, query: Mapping[str, list[str]]) -> None:
        assert self.gate is not None
        scopes = list(query.get("scope", []))
        known = self.gate.knows(exchange.headers.get("authorization", ""))
        if exchange.method == "POST":
            form = parse_qs(exchange.request.decode())
            scopes = form["scope"][0].split()
            known = form["refresh_token"] == [self.gate.identity_token] and form["grant_type"] == ["refresh_token"]
        if not known:
            exchange.set_error(401, "UNAUTHORIZED")
            return
        exchange.set_body(json.dumps(self.gate.issue(scopes)).encode(), Content_Type=JSON)

    def _blob(self, exchange: RegistryExchange, repository: Repository, digest: str) -> None:
        data = repository.blobs.get(digest)
        if data is None:
            exchange.set_error(404, "BLOB_UNKNOWN", digest)
            return
        if self.elsewhere is not None:
            exchange.set_body(b"", status=307, Location=self.elsewhere(digest))
            return
        exchange.whole = data
        serve(exchange, **({"Docker_Content_Digest": digest} if self.digests else {}), ETag=f'"{digest}"')

    def _manifest(self, exchange: RegistryExchange, repository: Repository, reference: str) -> None:
        digest = reference if ":" in reference else repository.tags.get(reference, "")
        found = repository.manifests.get(digest)
        if found is None:
            exchange.set_error(404, "MANIFEST_UNKNOWN", {"Tag": reference})
            return
        if exchange.method == "DELETE":
            self._delete(exchange, repository, reference)
            return
        headers = {"Docker_Content_Digest": digest} if self.digests else {}
        exchange.set_body(found[1], Content_Type=found[0], ETag=f'"{digest}"', **headers)

    def _delete(self, exchange: RegistryExchange, repository: Repository, reference: str) -> None:
        if self.deletes == "nothing":
            exchange.set_error(405, "UNSUPPORTED")
        elif ":" in reference:
            del repository.manifests[reference]
            repository.tags = {tag: digest for tag, digest in repository.tags.items() if digest != reference}
            exchange.set_body(b"", status=202)
        elif self.deletes == "tags":
            del repository.tags[reference]
            exchange.set_body(b"", status=202)
        else:
            exchange.set_error(400, "DIGEST_INVALID")

    def _put_manifest(self, exchange: RegistryExchange, repository: Repository, reference: str) -> None:
        data, media_type = exchange.request, exchange.headers.get("content-type", "")
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if ":" in reference:
            digest = f"{reference.partition(':')[0]}:{hashlib.new(reference.partition(':')[0], data).hexdigest()}"
            if digest != reference:
                exchange.set_error(400, "DIGEST_INVALID")
                return
        document = json.loads(data)
        missing = [each for each in _named(document) if each not in repository.blobs]
        missing += [
            each["digest"] for each in document.get("manifests", ()) if each["digest"] not in repository.manifests
        ]
        if self.validates and missing:
            exchange.set_error(400, "MANIFEST_BLOB_UNKNOWN", missing[0])
            return
        present = repository.tags.get(reference)
        match = exchange.headers.get("if-match")
        absent = exchange.headers.get("if-none-match") == "*"
        if self.conditions and ((match and match != f'"{present}"') or (absent and present is not None)):
            exchange.set_error(412, "PRECONDITION_FAILED")
            return
        repository.manifests[digest] = media_type, data
        if ":" not in reference:
            repository.tags[reference] = digest
        headers = {"OCI_Subject": document["subject"]["digest"]} if self.referrers_api and "subject" in document else {}
        exchange.set_body(
            b"", status=201, Docker_Content_Digest=digest, Location=f"/v2/x/manifests/{digest}", **headers
        )

    def _upload(self, exchange: RegistryExchange, name: str, repository: Repository, identifier: str) -> None:
        if exchange.method == "POST":
            source = self.repositories.get(exchange.query.get("from", ""))
            mounted = exchange.query.get("mount", "")
            if self.mounts and source is not None and mounted in source.blobs:
                repository.blobs[mounted] = source.blobs[mounted]
                exchange.set_body(b"", status=201, Docker_Content_Digest=mounted)
                return
            identifier = secrets.token_hex(8)
            repository.uploads[identifier] = bytearray()
            exchange.set_body(b"", status=202, Location=self._location(name, repository, identifier), Range="0-0")
            return
        upload = repository.uploads.get(identifier)
        if upload is None or (exchange.method != "DELETE" and exchange.query.get("_state") != str(len(upload))):
            exchange.set_error(404, "BLOB_UPLOAD_UNKNOWN")
            if upload is not None and exchange.method == "GET":
                self._tell(exchange, name, repository, identifier, 204)
            return
        if exchange.method == "DELETE":
            del repository.uploads[identifier]
            exchange.set_body(b"", status=204)
            return
        if exchange.method == "PATCH" and "content-range" in exchange.headers:
            first = int(exchange.headers["content-range"].partition("-")[0])
            if first != len(upload):
                exchange.set_error(416, "BLOB_UPLOAD_INVALID")
                return
        upload += exchange.request
        if exchange.method != "PUT":
            self._tell(exchange, name, repository, identifier, 202 if exchange.method == "PATCH" else 204)
            return
        digest = exchange.query.get("digest", "")
        del repository.uploads[identifier]
        if f"{digest.partition(':')[0]}:{hashlib.new(digest.partition(':')[0], upload).hexdigest()}" != digest:
            exchange.set_error(400, "DIGEST_INVALID")
            return
        repository.blobs[digest] = bytes(upload)
        exchange.set_body(b"", status=201, Docker_Content_Digest=digest, Location=f"/v2/{name}/blobs/{digest}")

    def _tell(
        self, exchange: RegistryExchange, name: str, repository: Repository, identifier: str, status: int
    ) -> None:
        end = max(0, len(repository.uploads[identifier]) - 1)
        where = self._location(name, repository, identifier)
        exchange.set_body(b"", status=status, Location=where, Range=f"0-{end}")

    def _location(self, name: str, repository: Repository, identifier: str) -> str:
        """With the offset as its state: who doesn't follow it is refused, as by docker's registry."""
        return self.location(f"/v2/{name}/blobs/uploads/{identifier}?_state={len(repository.uploads[identifier])}")

    def _list(
        self,
        exchange: RegistryExchange,
        items: list[object] | list[str],
        document: Callable[[list[object]], object],
        kind: str,
    ) -> None:
        start = int(exchange.query.get("start", 0))
        size = min(self.page, int(exchange.query.get("n", self.page)))
        headers = {}
        if start + size < len(items):
            query = urlencode({**exchange.query, "start": start + size})
            headers["Link"] = f'<{quote(exchange.path, safe="/:")}?{query}>; rel="next"'
        exchange.set_body(
            json.dumps(document(list(items[start : start + size]))).encode(), Content_Type=kind, **headers
        )


def serve(exchange: RegistryExchange, **headers: str) -> None:
    """The file of an exchange, or the range of it that is asked for."""
    size = len(exchange.whole)
    if "range" not in exchange.headers:
        exchange.set_body(exchange.whole, Content_Type="application/octet-stream", **headers)
        return
    text = exchange.headers["range"]
    first, last = requested_range({"range": text if not text.endswith("-") else f"{text}{size}"}, size)
    if first >= size:
        exchange.set_body(PAGE, status=416, Content_Type="text/plain", Content_Range=f"bytes */{size}", **headers)
        return
    exchange.set_body(
        exchange.whole[first : last + 1],
        status=206,
        Content_Type="application/octet-stream",
        Content_Range=f"bytes {first}-{last}/{size}",
        **headers,
    )


def _named(document: Mapping[str, object]) -> list[str]:
    below = [document.get("config"), *cast(list[object], document.get("layers") or [])]
    return [str(each["digest"]) for each in below if isinstance(each, dict)]


def _referrers(repository: Repository, subject: str) -> list[object]:
    found: list[object] = []
    for digest, (media_type, data) in sorted(repository.manifests.items()):
        document = json.loads(data)
        if document.get("subject", {}).get("digest") == subject:
            kind = document.get("artifactType") or document["config"]["mediaType"]
            found.append({"mediaType": media_type, "digest": digest, "size": len(data), "artifactType": kind})
    return found


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it doesn't happen"
        time.sleep(0.005)


def load_layout(registry: FakeRegistry, repository: str, layout: Path) -> None:
    """Put the content of an OCI layout into a repository, with its tags; an image without one is ``latest``."""
    there = registry.repository(repository)
    for path in layout.glob("blobs/*/*"):
        there.blobs[f"{path.parent.name}:{path.name}"] = path.read_bytes()
    pending = json.loads((layout / "index.json").read_bytes())["manifests"]
    while pending:
        entry = pending.pop()
        data = there.blobs.get(entry["digest"])
        if data is None or ("manifest" not in entry["mediaType"] and "index" not in entry["mediaType"]):
            continue
        there.manifests[entry["digest"]] = entry["mediaType"], data
        tag = entry.get("annotations", {}).get("org.opencontainers.image.ref.name", "latest")
        there.tags.setdefault(re.sub("[^A-Za-z0-9_.-]", "-", tag), entry["digest"])
        pending.extend(json.loads(data).get("manifests", ()))
