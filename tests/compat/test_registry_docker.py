"""docker's own registry, and the tools that read what we publish there and publish what we read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.conversions import Site
from support.faultproxy import FaultProxy, Request, twice
from support.httpstore import cut_short, reset, status
from support.layouts import Layout, tar_of
from support.registries import (
    IMPATIENT,
    NOBODY,
    DockerRegistry,
    TokenServer,
    basic_auth,
    client_of,
    docker_config,
)
from support.stores import MANIFEST, assert_sound, document, image, index, publish, put, unpublish
from support.tools import CHECKOUT, need_tool

from layerstore.convert import Conversion, convert
from layerstore.digest import Digest
from layerstore.errors import NotFoundError, PermissionError_, UnsupportedError
from layerstore.image import Role, load_image
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.source_name import SourceName
from layerstore.registry import uploads as uploads_module
from layerstore.registry.manifests import Manifests
from layerstore.registry.referrers import Referrers
from layerstore.store.copying import copy
from layerstore.store.memory import MemoryStore
from layerstore.store.registry import RegistryStore

pytestmark = pytest.mark.compat

LAYERS = [
    tar_of({"bin/": None, "bin/sh": os.urandom(3_000_000), "etc/": None, "etc/passwd": b"root:x:0:0::/:/bin/sh\n"}),
    tar_of({"etc/passwd": b"changed\n", "data": os.urandom(500_000)}),
]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerRegistry]:
    with DockerRegistry(tmp_path_factory.mktemp("registry") / "content") as registry:
        yield registry
        # It neither resumes nor ends a session whose last chunk came in part: those are left for its own purging.
        assert [path for path in registry.uploads() if "/an-upload-survives/" not in path] == []


@pytest.fixture
def repository(request: pytest.FixtureRequest) -> str:
    """One for each test."""
    return f"tests/{request.node.name.partition('[')[0].removeprefix('test_').lower().replace('_', '-')}"


@pytest.fixture
def store(registry: DockerRegistry, repository: str) -> Iterator[RegistryStore]:
    store = opened(registry.host, repository)
    yield store
    store.close()


def opened(host: str, repository: str, config: str = NOBODY) -> RegistryStore:
    return RegistryStore(f"oci://{host}/{repository}", docker_config=config, patience=IMPATIENT)


def skopeo(*arguments: str) -> str:
    done = subprocess.run(
        [need_tool("skopeo"), "--insecure-policy", *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{arguments}: {done.stderr}"
    return done.stdout


def layout(path: Path) -> Layout:
    made = Layout(path)
    made.image(LAYERS, tag="it")
    return made


# Sources


def test_what_skopeo_pushed_converts_to_what_its_layout_does(
    registry: DockerRegistry, repository: str, tmp_path: Path
) -> None:
    source = layout(tmp_path / "layout")
    skopeo(
        "copy", "--quiet", "--dest-tls-verify=false", source.name("it"), f"docker://{registry.host}/{repository}:1.0"
    )
    site = Site(tmp_path)
    direct = site.convert(source.name("it"), tag="direct")
    pulled = site.convert(f"docker://{registry.host}/{repository}:1.0", tag="pulled")
    by_digest = site.convert(f"docker://{registry.host}/{repository}@{direct.layer.source}", tag="digest")
    digests = {site.store.resolve(name).digest for name in ("direct", "pulled", "digest")}
    assert len(digests) == 1
    assert pulled.layer.source == by_digest.layer.source == direct.layer.source
    assert site.leftovers() == []


def test_commands_log_in_as_docker_does(tmp_path: Path) -> None:
    source = layout(tmp_path / "layout")
    with DockerRegistry(tmp_path / "registry", auth=basic_auth(tmp_path)) as registry:
        config = docker_config(tmp_path, registry.host)
        name = f"docker://{registry.host}/team/app:1"
        skopeo("copy", "--quiet", "--dest-tls-verify=false", f"--dest-authfile={config}", source.name("it"), name)
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "IMGTOOL_ROOT": str(tmp_path / "root")}
        for command in (
            ("convert", name, "--role", "base", "--tag", "app", "--json"),
            ("ls", "--store", f"oci://{registry.host}/team/app", "--json"),
        ):
            for directory, welcome in ((str(tmp_path), True), ("/nonexistent", False)):
                ran = subprocess.run(
                    [sys.executable, "-m", "imgtool", *command],
                    env={**environment, "DOCKER_CONFIG": directory},
                    capture_output=True,
                    text=True,
                    timeout=120,
                )
                assert (ran.returncode == 0) == welcome, ran.stderr
                if welcome:
                    assert json.loads(ran.stdout)
                else:
                    assert "docker login" in ran.stderr


# Stores


def test_skopeo_reads_what_we_publish(registry: DockerRegistry, store: RegistryStore, tmp_path: Path) -> None:
    site = Site(tmp_path)
    source = SourceName.parse(layout(tmp_path / "layout").name("it"))
    report = convert(Conversion(source, Role.BASE), store, tag="team/app:1")
    target = store.resolve("team/app:1")
    assert load_image(store, "team/app:1").layers == report.image.layers
    site.convert(str(source), tag="app")
    assert site.store.resolve("app").digest == target.digest  # every store holds the same bytes
    place = f"docker://{registry.host}/{store.address.repository}"
    for number, end in enumerate((":_team_.app_-1", f"@{target.digest}")):
        skopeo("copy", "--quiet", "--src-tls-verify=false", f"{place}{end}", f"oci:{tmp_path}/pulled{number}:x")
        document = json.loads((tmp_path / f"pulled{number}" / "index.json").read_bytes())
        assert document["manifests"][0]["digest"] == str(target.digest)
    assert json.loads(skopeo("list-tags", "--tls-verify=false", place))["Tags"] == ["_team_.app_-1"]


def test_oras_reads_what_we_publish(registry: DockerRegistry, store: RegistryStore) -> None:
    import oras.provider

    sample = image(b"layer")
    publish(store, "v1", sample)
    client = oras.provider.Registry(registry.host, insecure=True)
    found = client.get_manifest(f"{registry.host}/{store.address.repository}:v1")
    client.session.close()
    assert found == json.loads(sample.blobs[sample.target.digest])


def test_an_index_and_its_images_travel_both_ways(registry: DockerRegistry, store: RegistryStore) -> None:
    sample = index(image(b"one"), image(b"two", os.urandom(200_000)))
    memory, back = MemoryStore(), MemoryStore()
    publish(memory, "all", sample)
    copy("all", memory, store)
    copy("all", store, back)
    assert assert_sound(back) == sample.blobs.keys()
    assert json.loads(
        skopeo("inspect", "--raw", "--tls-verify=false", f"docker://{registry.host}/{store.address.repository}:all")
    ) == json.loads(sample.blobs[sample.target.digest])


def test_blobs_by_sha512(store: RegistryStore) -> None:
    data = os.urandom(100_000)
    with store.upload("sha512") as upload:
        upload.write(data)
        digest = upload.digest()
        upload.commit(digest, len(data))
    with store.open(digest) as blob:
        assert blob.read_at(0, blob.size) == data


def test_names_are_deleted_with_their_manifests(store: RegistryStore) -> None:
    publish(store, "one", image(b"1"))
    publish(store, "two", image(b"2"))
    publish(store, "twin", image(b"2"))
    unpublish(store, "one")
    assert list(store.names()) == ["twin", "two"]
    with pytest.raises(UnsupportedError, match="tag twin needs this one"):
        unpublish(store, "two")


def test_a_registry_that_does_not_delete(tmp_path: Path) -> None:
    with DockerRegistry(tmp_path / "registry", deletes=False) as registry:
        store = opened(registry.host, "a")
        publish(store, "one", image(b"1"))
        with pytest.raises(UnsupportedError, match=r"storage\.delete\.enabled"):
            unpublish(store, "one")
        store.close()


@pytest.mark.case("R13")
def test_blobs_of_other_repositories_are_mounted(registry: DockerRegistry, store: RegistryStore) -> None:
    data = os.urandom(100_000)
    digest = put(store, data)
    other = opened(registry.host, "tests/mounted")
    assert other.mount(digest, len(data), store.address.repository)
    assert other.stat(digest) == len(data)
    assert not other.mount(Digest.of(b"nowhere"), 7, store.address.repository)
    other.close()


# Access


def test_tokens_are_for_what_is_done(tmp_path: Path) -> None:
    with (
        TokenServer(tmp_path) as tokens,
        DockerRegistry(tmp_path / "registry", auth=tokens.auth) as registry,
    ):
        store = opened(registry.host, "a", docker_config(tmp_path, registry.host))
        publish(store, "one", image(b"1", os.urandom(100_000)))
        data = os.urandom(100_000)
        assert put(store, data)
        other = opened(registry.host, "b", docker_config(tmp_path, registry.host))
        assert other.mount(Digest.of(data), len(data), "a")
        unpublish(store, "one")
        store.close()
        other.close()
        assert [" ".join(scopes) for scopes in tokens.issued] == [
            "repository:a:pull",
            "repository:a:pull,push",
            "repository:b:pull,push repository:a:pull",
            "repository:a:delete,pull",
        ]
        stranger = opened(registry.host, "a")
        with pytest.raises(PermissionError_, match="docker login"):
            list(stranger.names())
        stranger.close()


def test_basic_authentication(tmp_path: Path) -> None:
    with DockerRegistry(tmp_path / "registry", auth=basic_auth(tmp_path)) as registry:
        store = opened(registry.host, "a", docker_config(tmp_path, registry.host))
        publish(store, "one", image(b"1"))
        assert list(store.names()) == ["one"]
        store.close()
        for config in (NOBODY, docker_config(tmp_path, registry.host, password="wrong")):
            stranger = opened(registry.host, "a", config)
            with pytest.raises(PermissionError_, match="docker login"):
                stranger.resolve("one")
            stranger.close()


# Faults in between


@pytest.fixture
def proxied(registry: DockerRegistry, repository: str) -> Iterator[tuple[FaultProxy, RegistryStore]]:
    with FaultProxy(registry.url) as proxy:
        store = opened(proxy.url.removeprefix("http://"), repository)
        yield proxy, store
        store.close()


def halved(request: Request) -> None:
    request.body = request.body[: len(request.body) // 2]


@pytest.mark.parametrize("fault", ["half", "answer", "refused"])
def test_an_upload_survives(
    proxied: tuple[FaultProxy, RegistryStore], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    proxy, store = proxied
    monkeypatch.setattr(uploads_module, "CHUNK_BYTES", 200_000)
    if fault == "half":
        proxy.alter(halved, method="PATCH", times=1, skip=1)
        proxy.misbehave(reset(), method="PATCH", times=1, skip=1)
    elif fault == "answer":
        proxy.misbehave(reset(), method="PATCH", times=1, skip=1)
        proxy.misbehave(reset(), method="PUT", times=1)
    else:
        proxy.misbehave(status(503, Retry_After="0"), method="PATCH", times=1, skip=1, reach=False)
    data = os.urandom(900_000)
    digest = put(store, data)
    with store.open(digest) as blob:
        assert blob.read_at(0, blob.size) == data


@pytest.mark.case("R02")
def test_a_read_survives(proxied: tuple[FaultProxy, RegistryStore]) -> None:
    proxy, store = proxied
    data = os.urandom(900_000)
    digest = put(store, data)
    proxy.misbehave(cut_short(300_000), f"blobs/{digest}", method="GET", times=1, skip=1)
    proxy.misbehave(status(503, Retry_After="0"), f"blobs/{digest}", method="GET", times=1, reach=False)
    with store.open(digest) as blob:
        assert blob.read_at(0, blob.size) == data


def test_what_arrives_twice_is_there_once(proxied: tuple[FaultProxy, RegistryStore]) -> None:
    proxy, store = proxied
    sample = image(b"twice", os.urandom(100_000))
    proxy.alter(twice, "manifests/", method="PUT")
    publish(store, "name", sample)
    assert assert_sound(store) == sample.blobs.keys()


# Referrers

_ATTACH = """
import json, sys
from layerstore.registry.address import RegistryAddress
from layerstore.registry.client import RegistryClient
from layerstore.registry.manifests import Manifests
from layerstore.registry.referrers import Referrers

host, repository = sys.argv[1:3]
data = sys.stdin.buffer.readline().strip()
client = RegistryClient(RegistryAddress(host, repository, True), docker_config="/nonexistent")
print("ready", flush=True)
sys.stdin.buffer.readline()
print(Referrers(client, Manifests(client), warn=print).push("tag-" + sys.argv[3], data, sys.argv[4]).digest)
client.close()
"""


@pytest.mark.case("R10")
def test_two_processes_that_attach_at_once(registry: DockerRegistry, store: RegistryStore) -> None:
    subject = image(b"subject")
    publish(store, "subject", subject)
    put(store, b"{}")
    children = []
    for number in range(3):
        fields: dict[str, object] = {
            "artifactType": f"application/vnd.test.{number}",
            "config": Descriptor("application/vnd.oci.empty.v1+json", Digest.of(b"{}"), 2).to_json(),
            "layers": [],
            "subject": subject.target.to_json(),
        }
        sample = document(fields, [b"{}"])
        child = subprocess.Popen(
            [sys.executable, "-c", _ATTACH, registry.host, store.address.repository, str(number), MANIFEST],
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdin is not None
        child.stdin.write(sample.blobs[sample.target.digest] + b"\n")
        child.stdin.flush()
        children.append((child, sample))
    for child, _ in children:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
    for child, _ in children:
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.flush()
    for child, sample in children:
        printed, _ = child.communicate(timeout=60)
        assert printed.decode().strip() == str(sample.target.digest)
    listed = {each.digest for each in store.referrers.of(subject.target.digest)}
    assert listed == {sample.target.digest for _, sample in children}


def test_what_is_not_there(registry: DockerRegistry) -> None:
    client = client_of(registry, "tests/nowhere")
    manifests = Manifests(client)
    assert manifests.tags() == []
    for missing in ("tag", Digest.of(b"x")):
        with pytest.raises(NotFoundError):
            manifests.get(missing)
    assert Referrers(client, manifests, warn=lambda line: None).of(Digest.of(b"x")) == []
    client.close()
