"""Who may do what in a registry: tokens, credentials, and where they go."""

from __future__ import annotations

import base64
import json
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.httpstore import Exchange, cut_short, status
from support.registries import NOBODY, PASSWORD, USER, client_of, docker_config
from support.registry_faults import FakeRegistry, Gate

from layerstore.digest import Digest
from layerstore.errors import ImgtoolError, MalformedError, PermissionError_, UnavailableError
from layerstore.oci.descriptor import Descriptor
from layerstore.registry.address import RegistryAddress
from layerstore.registry.blobs import Blobs
from layerstore.registry.client import RegistryClient
from layerstore.registry.credentials import DockerConfig, Login
from layerstore.registry.tokens import MARGIN, Scope, Token, Tokens, pull, push
from layerstore.registry.uploads import Uploads

DATA = os.urandom(300_000)
DIGEST = Digest.of(DATA)


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with FakeRegistry(gate=Gate()) as registry:
        registry.repository("a").blobs[str(DIGEST)] = DATA
        yield registry


@pytest.fixture
def client(registry: FakeRegistry) -> Iterator[RegistryClient]:
    client = client_of(registry)
    yield client
    client.close()


def gate_of(registry: FakeRegistry) -> Gate:
    assert registry.gate is not None
    return registry.gate


# Tokens


def test_the_first_request_learns_how_and_the_others_know(registry: FakeRegistry, client: RegistryClient) -> None:
    blobs = Blobs(client)
    for _ in range(3):
        assert blobs.size(DIGEST) == len(DATA)
    assert registry.requests() == [
        f"HEAD /v2/a/blobs/{DIGEST}",
        "GET /token?service=fake&scope=repository:a:pull",
        *[f"HEAD /v2/a/blobs/{DIGEST}"] * 3,
    ]


def test_each_scope_has_its_token(registry: FakeRegistry, client: RegistryClient) -> None:
    blobs = Blobs(client)
    uploads = Uploads(client, blobs)
    registry.repository("b").blobs["sha256:" + "1" * 64] = b"x"
    blobs.size(DIGEST)
    uploads.send(Digest.of(b"x"), 1, lambda offset, length: b"x")
    assert uploads.mount(Digest("sha256", "1" * 64), "b") is None
    with client.ask("DELETE", "manifests/x", "x", scopes=(Scope("a", ("delete", "pull")),), also=(404,)):
        pass
    assert gate_of(registry).issued == [
        ("repository:a:pull",),
        ("repository:a:pull,push",),
        ("repository:a:pull,push", "repository:b:pull"),
        ("repository:a:delete,pull",),
    ]


def test_a_token_for_more_serves_for_less(registry: FakeRegistry, client: RegistryClient) -> None:
    blobs = Blobs(client)
    Uploads(client, blobs).send(Digest.of(b"x"), 1, lambda offset, length: b"x")
    assert blobs.size(DIGEST) == len(DATA)
    assert gate_of(registry).issued == [("repository:a:pull,push",)]


@pytest.mark.case("R01")
def test_a_token_that_is_used_up_is_renewed_once_for_all_threads(
    registry: FakeRegistry, client: RegistryClient
) -> None:
    gate, blobs = gate_of(registry), Blobs(client)
    gate.uses = 20
    barrier = threading.Barrier(8)

    def work(number: int) -> bytes:
        barrier.wait()
        place = blobs.place(DIGEST)
        return b"".join(
            blobs.read(place, offset, min(10_000, len(DATA) - offset), len(DATA))
            for offset in range(0, len(DATA), 10_000)
        )

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [DATA] * 8
    used = [uses for _, uses in gate.tokens.values()]
    assert sum(used) == 8 * 30
    assert used == [20] * 12  # none was replaced before it was used up


@pytest.mark.case("R01")
def test_a_download_goes_on_where_it_was_after_a_token_expired(
    registry: FakeRegistry, client: RegistryClient, tmp_path: Path
) -> None:
    def cut_and_expire(exchange: Exchange) -> None:
        gate_of(registry).expire()  # first: the client is quick to come back
        cut_short(200_000)(exchange)

    registry.misbehave(cut_and_expire, "GET /v2/a/blobs", times=2)  # the first isn't let in at all
    with (tmp_path / "x").open("w+b") as file:
        Blobs(client).download(Descriptor("x", DIGEST, len(DATA)), file.fileno(), "a layer", threading.Event())
        assert file.read() == DATA
    ranges = [each.get("range") for each in registry.headers("GET /v2/a/blobs")]
    assert ranges == [None, None, "bytes=200000-299999", "bytes=200000-299999"]
    assert len(gate_of(registry).issued) == 2


@pytest.mark.case("R01")
def test_what_is_refused_for_good_is_tried_once_more(registry: FakeRegistry, client: RegistryClient) -> None:
    gate_of(registry).refuses = True
    with pytest.raises(PermissionError_, match=r"blob .* in oci://.*docker login"):
        Blobs(client).size(DIGEST)
    assert len(registry.requests("/v2/a/blobs")) == 2
    gate_of(registry).refuses = False
    assert Blobs(client).size(DIGEST) == len(DATA)
    gate_of(registry).refuses = True
    registry.forget()
    with pytest.raises(PermissionError_):
        Blobs(client).start(Blobs(client).place(DIGEST), 10)
    assert len(registry.requests("GET /v2/a/blobs")) == 2


def test_a_blob_that_is_open_outlives_its_token(registry: FakeRegistry, client: RegistryClient) -> None:
    blobs = Blobs(client)
    place = blobs.place(DIGEST)
    assert blobs.start(place, 10) == (len(DATA), DATA[:10])
    gate_of(registry).expire()
    assert blobs.read(place, 100, 1000, len(DATA)) == DATA[100:1100]
    assert len(gate_of(registry).issued) == 2


def test_a_token_server_that_fails_is_asked_again(registry: FakeRegistry, client: RegistryClient) -> None:
    registry.misbehave(status(503, Retry_After="0"), "/token", times=2)
    assert Blobs(client).size(DIGEST) == len(DATA)
    registry.misbehave(status(500), "/token")
    gate_of(registry).expire()
    with pytest.raises(UnavailableError, match="token server"):
        Blobs(client).size(DIGEST)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"token": 1}', b'{"token": "a b"}', b'{"token": "a\\nb"}', b"{}"])
def test_answers_of_token_servers_that_are_no_tokens(
    registry: FakeRegistry, client: RegistryClient, body: bytes
) -> None:
    def fault(exchange: Exchange) -> None:
        exchange.set_body(body, Content_Type="application/json")
        exchange.answer()

    registry.misbehave(fault, "/token")
    with pytest.raises(UnavailableError):
        Blobs(client).size(DIGEST)


class Realm:
    """A token server that is a function, and a clock."""

    def __init__(self, **fields: object) -> None:
        self.now = 0.0
        self.asked: list[str] = []
        self.fields = fields
        address = RegistryAddress("registry.example", "a")
        self.tokens = Tokens(address, self, DockerConfig(NOBODY), clock=lambda: self.now)

    def __call__(self, url: str, headers: Mapping[str, str], form: Mapping[str, str] | None) -> tuple[int, bytes]:
        self.asked.append(url)
        return 200, json.dumps({"access_token": f"token{len(self.asked)}", **self.fields}).encode()

    def refused(self, sent: Token | None = None) -> Token:
        return self.tokens.refused(
            'Bearer realm="https://auth.example/token",scope="repository:a:pull"', pull("a"), sent
        )


@pytest.mark.parametrize(("fields", "life"), [({}, 60), ({"expires_in": 20}, 20), ({"expires_in": 3600}, 3600)])
def test_tokens_are_renewed_before_they_expire(fields: dict[str, object], life: float) -> None:
    realm = Realm(**fields)
    assert realm.tokens.current(pull("a")) is None
    first = realm.refused()
    realm.now = life - min(MARGIN, life / 5) - 0.1
    assert realm.tokens.current(pull("a")) is first
    realm.now += 0.2
    second = realm.tokens.current(pull("a"))
    assert second is not None
    assert second.header == "Bearer token2"
    assert realm.asked == ["https://auth.example/token?scope=repository%3Aa%3Apull"] * 2


def test_a_token_that_let_somebody_in_is_renewed_and_one_that_did_not_is_not() -> None:
    realm = Realm()
    first = realm.refused()
    first.accepted = True
    second = realm.refused(first)
    assert realm.refused(first) is second  # who was refused with the first, too, takes the second
    with pytest.raises(PermissionError_, match="a new token was refused"):
        realm.refused(second)
    assert len(realm.asked) == 2


@pytest.mark.parametrize(
    "challenge",
    [
        'Bearer realm="http://auth.example/token"',  # credentials without TLS, of a registry with it
        "Bearer",
        'Bearer realm="ftp://auth.example/"',
        'Bearer realm="https://user@auth.example/"',
        'Negotiate realm="x"',
        "",
    ],
)
def test_challenges_that_are_not_answered(challenge: str) -> None:
    realm = Realm()
    with pytest.raises(PermissionError_):
        realm.tokens.refused(challenge, push("a"), None)
    assert realm.asked == []


def test_of_several_challenges_tokens_are_taken() -> None:
    realm = Realm()
    header = 'Basic realm="a, b", Bearer realm="https://auth.example/t?x=1",service="s, basic", error="e"'
    assert realm.tokens.refused(header, push("a"), None).header == "Bearer token1"
    assert realm.asked == ["https://auth.example/t?x=1&service=s%2C+basic&scope=repository%3Aa%3Apull%2Cpush"]


def test_the_registry_may_ask_for_more() -> None:
    realm = Realm()
    header = 'Bearer realm="https://auth.example/t",scope="repository:a:pull,metadata registry:catalog:*"'
    realm.tokens.refused(header, pull("a"), None)
    query = "scope=repository%3Aa%3Ametadata%2Cpull&scope=registry%3Acatalog%3A%2A"
    assert realm.asked == [f"https://auth.example/t?{query}"]


# Credentials


def test_credentials_come_from_dockers_configuration(registry: FakeRegistry, tmp_path: Path) -> None:
    gate_of(registry).user = (USER, PASSWORD)
    client = client_of(registry, config=docker_config(tmp_path, registry.host))
    assert Blobs(client).size(DIGEST) == len(DATA)
    client.close()
    client = client_of(registry)
    with pytest.raises(PermissionError_, match="no credentials"):
        Blobs(client).size(DIGEST)
    client.close()
    client = client_of(registry, config=docker_config(tmp_path, registry.host, password="wrong"))
    with pytest.raises(PermissionError_, match="refuses the credentials") as caught:
        Blobs(client).size(DIGEST)
    assert "wrong" not in str(caught.value)
    client.close()


def test_basic_authentication(registry: FakeRegistry, tmp_path: Path) -> None:
    gate_of(registry).user, gate_of(registry).basic = (USER, PASSWORD), True
    client = client_of(registry, config=docker_config(tmp_path, registry.host))
    assert [Blobs(client).size(DIGEST) for _ in range(3)] == [len(DATA)] * 3
    assert len(registry.requests()) == 4
    client.close()
    for config in (NOBODY, docker_config(tmp_path, registry.host, password="wrong")):
        client = client_of(registry, config=config)
        with pytest.raises(PermissionError_, match="user"):
            Blobs(client).start(Blobs(client).place(DIGEST), 1)
        client.close()


def test_credentials_that_changed_are_looked_up_again(registry: FakeRegistry, tmp_path: Path) -> None:
    gate = gate_of(registry)
    gate.user, gate.basic = (USER, PASSWORD), True
    path = docker_config(tmp_path, registry.host)
    client = client_of(registry, config=path)
    assert Blobs(client).size(DIGEST) == len(DATA)
    gate.user = (USER, "new")
    docker_config(tmp_path, registry.host, password="new")
    assert Blobs(client).size(DIGEST) == len(DATA)
    client.close()


def test_an_identity_token_is_exchanged(registry: FakeRegistry, tmp_path: Path) -> None:
    gate_of(registry).user, gate_of(registry).identity_token = (USER, PASSWORD), "identity"
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"auths": {registry.host: {"identitytoken": "identity"}}}))
    client = client_of(registry, config=str(path))
    assert Blobs(client).size(DIGEST) == len(DATA)
    assert registry.requests("POST /token") == ["POST /token"]
    client.close()


def helper(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A credential helper ``test`` that is found in PATH."""
    path = directory / "docker-credential-test"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def login(directory: Path, document: object, *names: str) -> Login:
    path = directory / "config.json"
    path.write_text(json.dumps(document))
    return DockerConfig(str(path)).login(names or ("r.example:5000",))


def basic(user: str, secret: str) -> str:
    return base64.b64encode(f"{user}:{secret}".encode()).decode()


@pytest.mark.parametrize("where", [{"credHelpers": {"r.example:5000": "test"}}, {"credsStore": "test"}])
def test_helpers_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: dict[str, object]) -> None:
    helper(tmp_path, monkeypatch, 'read host; echo "{\\"Username\\": \\"$1\\", \\"Secret\\": \\"$host\\"}"')
    assert login(tmp_path, {"auths": {"r.example:5000": {}}, **where}) == Login(basic("get", "r.example:5000"))
    helper(tmp_path, monkeypatch, 'echo "{\\"Username\\": \\"<token>\\", \\"Secret\\": \\"t\\"}"')
    assert login(tmp_path, where) == Login(identity_token="t")
    helper(tmp_path, monkeypatch, "echo credentials not found in native keychain; exit 1")
    assert login(tmp_path, where) == Login()
    helper(tmp_path, monkeypatch, "echo secret-service is broken >&2; exit 1")
    with pytest.raises(UnavailableError, match=r"docker-credential-test failed .*broken"):
        login(tmp_path, where)
    helper(tmp_path, monkeypatch, "echo nonsense")
    with pytest.raises(MalformedError, match="answer of credential helper"):
        login(tmp_path, where)


def test_a_helper_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"docker-credential-nowhere.*not in PATH"):
        login(tmp_path, {"credsStore": "nowhere"})
    with pytest.raises(MalformedError, match="names no program"):
        login(tmp_path, {"credsStore": "../sh"})


def test_hosts_are_found_as_docker_writes_them(tmp_path: Path) -> None:
    auth = {"auth": basic("a", "b")}
    hub = RegistryAddress("docker.io", "library/a")
    for name in ("https://index.docker.io/v1/", "docker.io", "registry-1.docker.io"):
        assert login(tmp_path, {"auths": {name: auth}}, *hub.login_names) == Login(auth["auth"])
    for name in ("r.example:5000", "https://r.example:5000", "https://r.example:5000/v2/", "r.example:5000/v1"):
        assert login(tmp_path, {"auths": {name: auth}}) == Login(auth["auth"])
    assert login(tmp_path, {"auths": {"r.example": auth, "r.example:5001": auth}}) == Login()
    assert login(tmp_path, {"auths": {"r.example:5000": {"username": "a", "password": "b"}}}) == Login(auth["auth"])


@pytest.mark.parametrize(
    "document",
    [[], {"auths": []}, {"auths": {"r.example:5000": "x"}}, {"auths": {"r.example:5000": {"auth": "no base64!"}}}],
)
def test_configurations_that_are_none(tmp_path: Path, document: object) -> None:
    with pytest.raises(MalformedError, match="docker's configuration"):
        login(tmp_path, document)


def test_a_configuration_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(ImgtoolError, match="docker's configuration"):
        DockerConfig(str(tmp_path)).login(("r.example",))
    assert DockerConfig(str(tmp_path / "nowhere")).login(("r.example",)) == Login()
