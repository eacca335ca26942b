"""Writing blobs to a registry: sessions, where they go on, and what becomes of them when something fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.httpstore import Exchange, Fault, reset, status
from support.registries import Recorded, client_of, own_authority
from support.registry_faults import FakeRegistry, Gate, Repository

from layerstore.digest import Digest
from layerstore.errors import CorruptError, PermissionError_, UnavailableError, UnsupportedError
from layerstore.registry import uploads as uploads_module
from layerstore.registry.blobs import Blobs
from layerstore.registry.client import RegistryClient
from layerstore.registry.uploads import Uploads

CHUNK = 100_000
DATA = os.urandom(350_000)
DIGEST = Digest.of(DATA)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads_module, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with FakeRegistry() as registry:
        yield registry


@pytest.fixture
def client(registry: FakeRegistry) -> Iterator[RegistryClient]:
    client = client_of(registry)
    yield client
    client.close()


@pytest.fixture
def uploads(client: RegistryClient) -> Uploads:
    return Uploads(client, Blobs(client))


def there(registry: FakeRegistry) -> Repository:
    return registry.repository("a")


def send(uploads: Uploads, data: bytes = DATA) -> None:
    uploads.send(Digest.of(data), len(data), lambda offset, length: data[offset : offset + length])


def methods(registry: FakeRegistry) -> list[str]:
    return [line.partition(" ")[0] for line in registry.requests()]


def assert_written(registry: FakeRegistry, data: bytes = DATA) -> None:
    assert there(registry).blobs == {str(Digest.of(data)): data}
    assert there(registry).uploads == {}


@pytest.mark.parametrize("data", [b"", b"x", DATA[:CHUNK]])
def test_what_is_small_takes_two_requests(registry: FakeRegistry, uploads: Uploads, data: bytes) -> None:
    send(uploads, data)
    assert_written(registry, data)
    assert methods(registry) == ["POST", "PUT"]


def test_what_is_large_goes_in_chunks(registry: FakeRegistry, uploads: Uploads) -> None:
    send(uploads)
    assert_written(registry)
    assert methods(registry) == ["POST", "PATCH", "PATCH", "PATCH", "PATCH", "PUT"]
    assert [each["content-range"] for each in registry.headers("PATCH")] == [
        "0-99999",
        "100000-199999",
        "200000-299999",
        "300000-349999",
    ]


def test_chunks_are_as_large_as_the_registry_wants(registry: FakeRegistry, uploads: Uploads) -> None:
    def least(size: str) -> Fault:
        def fault(exchange: Exchange) -> None:
            exchange.answer_headers["OCI-Chunk-Min-Length"] = size
            exchange.answer()

        return fault

    registry.misbehave(least("200000"), "POST", times=1)
    send(uploads)
    assert_written(registry)
    assert [each["content-length"] for each in registry.headers("PATCH")] == ["200000", "150000"]
    registry.misbehave(least("999999999999"), "POST", times=1)
    with pytest.raises(UnsupportedError, match="no chunks below"):
        send(uploads)


# Failures


def arrives(registry: FakeRegistry, count: int, then: Fault) -> Fault:
    """So many bytes of the chunk arrive, and then that happens."""

    def fault(exchange: Exchange) -> None:
        for upload in there(registry).uploads.values():
            size = int(exchange.headers["content-length"])
            del upload[len(upload) - size + count :]
        then(exchange)

    return fault


@pytest.mark.parametrize("count", [0, 1, 40_000, CHUNK])
@pytest.mark.parametrize("then", [reset(), status(500), status(503), status(416)], ids=["reset", "500", "503", "416"])
def test_an_upload_goes_on_where_it_broke_off(
    registry: FakeRegistry, uploads: Uploads, count: int, then: Fault
) -> None:
    registry.misbehave(arrives(registry, count, then), "PATCH", times=1)
    send(uploads)
    assert_written(registry)
    assert methods(registry).count("POST") in (1, 2)
    if count > 1:
        assert methods(registry).count("POST") == 1
        first = int(registry.headers("PATCH")[-1]["content-range"].partition("-")[0])
        assert first >= count


def test_a_chunk_of_which_less_arrived_than_was_said(registry: FakeRegistry, uploads: Uploads) -> None:
    def short(exchange: Exchange) -> None:
        identifier, upload = next(iter(there(registry).uploads.items()))
        del upload[60_000:]
        exchange.answer_headers |= {
            "Range": "0-59999",
            "Location": f"/v2/a/blobs/uploads/{identifier}?_state=60000",
        }
        exchange.answer()

    registry.misbehave(short, "PATCH", times=1)
    send(uploads)
    assert_written(registry)
    assert registry.headers("PATCH")[1]["content-range"] == "60000-159999"


def test_a_session_that_is_lost_is_begun_anew(registry: FakeRegistry, uploads: Uploads) -> None:
    def lose(exchange: Exchange) -> None:
        there(registry).uploads.clear()
        status(404)(exchange)

    registry.misbehave(lose, "PATCH", times=2)
    send(uploads)
    assert_written(registry)
    assert methods(registry).count("POST") == 3
    registry.misbehave(lose, "PATCH")
    with pytest.raises(UnavailableError, match="the upload was lost"):
        send(uploads, DATA[::-1])
    assert there(registry).uploads == {}


def test_a_lost_answer_to_the_last_request_loses_nothing(registry: FakeRegistry, uploads: Uploads) -> None:
    registry.misbehave(reset(), "PUT", times=1)
    send(uploads)
    assert_written(registry)
    assert methods(registry)[-2:] == ["PUT", "HEAD"]


def test_what_the_registry_did_not_take_is_sent_again(registry: FakeRegistry, uploads: Uploads) -> None:
    def other_bytes(exchange: Exchange) -> None:
        next(iter(there(registry).uploads.values()))[0] ^= 1
        exchange.answer()

    registry.misbehave(other_bytes, "PATCH", times=1)
    send(uploads)
    assert_written(registry)
    assert methods(registry).count("POST") == 2


def test_another_digest_is_corrupt(registry: FakeRegistry, uploads: Uploads) -> None:
    def another(exchange: Exchange) -> None:
        exchange.answer_headers["Docker-Content-Digest"] = "sha256:" + "1" * 64
        exchange.answer()

    registry.misbehave(another, "PUT")
    with pytest.raises(CorruptError, match="something else"):
        send(uploads)


def test_an_upload_that_fails_is_given_up(registry: FakeRegistry, uploads: Uploads) -> None:
    registry.misbehave(status(403), "PATCH")
    with pytest.raises(PermissionError_, match=DIGEST.hex):
        send(uploads)
    registry.behave()

    def read(offset: int, length: int) -> bytes:
        if offset:
            raise ZeroDivisionError
        return DATA[:length]

    with pytest.raises(ZeroDivisionError):
        uploads.send(DIGEST, len(DATA), read)
    assert there(registry) == Repository()


def test_only_what_was_not_looked_at_is_repeated_blindly(registry: FakeRegistry) -> None:
    recorded = Recorded()
    client = client_of(registry, patience=recorded.patience())
    registry.misbehave(status(429, Retry_After="3"), "POST", times=1, reach=False)
    registry.misbehave(status(503, Retry_After="4"), "PUT", times=1, reach=False)
    registry.misbehave(status(500), "DELETE")
    with pytest.raises(UnavailableError), client.ask("DELETE", "blobs/uploads/x", "it"):
        pass
    Uploads(client, Blobs(client)).send(Digest.of(b"x"), 1, lambda offset, length: b"x")
    assert recorded.pauses == [3, 4]
    assert methods(registry) == ["DELETE", "POST", "POST", "PUT", "PUT"]
    client.close()


# Locations


@pytest.mark.case("R09")
@pytest.mark.parametrize(
    "location",
    [
        lambda registry, path: path,
        lambda registry, path: f"http://127.0.0.1:{registry.port}{path}",
        lambda registry, path: f"//127.0.0.1:{registry.port}{path}",
        lambda registry, path: f"{path}#fragment",
        lambda registry, path: f"http://user:secret@127.0.0.1:{registry.port}{path}",
    ],
    ids=["path", "url", "host", "fragment", "credentials"],
)
def test_locations_are_followed_as_they_are(
    registry: FakeRegistry, uploads: Uploads, location: Callable[[FakeRegistry, str], str]
) -> None:
    registry.location = lambda path: location(registry, path)
    send(uploads)
    assert_written(registry)
    assert "?_state=350000&digest=sha256:" in registry.requests("PUT")[0]


@pytest.mark.case("R09")
def test_a_location_relative_to_the_request(registry: FakeRegistry, uploads: Uploads) -> None:
    def relative(exchange: Exchange) -> None:
        name = exchange.answer_headers["Location"].rpartition("/")[2]
        exchange.answer_headers["Location"] = f"../uploads/{name}"
        exchange.answer()

    registry.misbehave(relative, "POST")
    registry.misbehave(relative, "PATCH")
    send(uploads)
    assert_written(registry)


@pytest.mark.case("R09")
def test_a_location_without_a_query(registry: FakeRegistry, uploads: Uploads) -> None:
    def bare(exchange: Exchange) -> None:
        exchange.answer_headers["Location"] = exchange.answer_headers["Location"].partition("?")[0]
        exchange.answer()

    registry.misbehave(bare, "POST")
    registry.misbehave(lambda exchange: (exchange.set_body(b"", status=201), exchange.answer()), "PUT")
    send(uploads, b"x")
    assert registry.requests("PUT")[0].endswith(f"?digest={Digest.of(b'x')}")


@pytest.mark.case("R09")
def test_another_host_gets_no_authorization(registry: FakeRegistry) -> None:
    with FakeRegistry(repositories=registry.repositories) as elsewhere:
        registry.gate = Gate()
        registry.location = lambda path: f"{elsewhere.url}{path}"
        client = client_of(registry)
        send(Uploads(client, Blobs(client)))
        client.close()
        assert_written(registry)
        assert [line.partition(" ")[0] for line in elsewhere.requests()] == ["PATCH"] * 4 + ["PUT"]
        assert not any("authorization" in each for each in elsewhere.headers())
        assert "authorization" in registry.headers("POST")[-1]


@pytest.mark.case("R09")
def test_a_location_that_leads_from_https_to_http_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with own_authority(tmp_path, monkeypatch) as tls, FakeRegistry(tls=tls) as secure:
        secure.location = lambda path: f"http://{secure.host}{path}"
        client = client_of(secure)
        with pytest.raises(UnavailableError, match="from https to http"):
            send(Uploads(client, Blobs(client)))
        client.close()
        assert methods(secure) == ["POST"]


@pytest.mark.parametrize("location", ["", "ftp://h/x", "http://[/"])
def test_locations_that_lead_nowhere(registry: FakeRegistry, uploads: Uploads, location: str) -> None:
    registry.location = lambda path: location
    with pytest.raises(UnavailableError, match="no address"):
        send(uploads)


# Mounts


@pytest.mark.case("R13")
def test_a_blob_is_taken_over_from_another_repository(registry: FakeRegistry, uploads: Uploads) -> None:
    registry.repository("b").blobs[str(DIGEST)] = DATA
    assert uploads.mount(DIGEST, "b") is None
    assert_written(registry)
    assert registry.requests() == [f"POST /v2/a/blobs/uploads/?mount={DIGEST}&from=b"]


@pytest.mark.case("R13")
def test_where_it_can_not_be_taken_over_it_is_sent_in_that_session(registry: FakeRegistry, uploads: Uploads) -> None:
    session = uploads.mount(DIGEST, "b")
    assert session is not None
    assert there(registry).blobs == {}
    uploads.send(DIGEST, len(DATA), lambda offset, length: DATA[offset : offset + length], session=session)
    assert_written(registry)
    assert methods(registry).count("POST") == 1


@pytest.mark.case("R13")
@pytest.mark.parametrize("fault", [status(404), status(405), status(400), status(403)])
def test_a_registry_that_refuses_mounts(registry: FakeRegistry, uploads: Uploads, fault: Fault) -> None:
    registry.misbehave(fault, "POST /v2/a/blobs/uploads/?mount", times=1, reach=False)
    session = uploads.mount(DIGEST, "b")
    assert session is not None
    uploads.send(DIGEST, len(DATA), lambda offset, length: DATA[offset : offset + length], session=session)
    assert_written(registry)
