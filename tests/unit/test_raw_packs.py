"""Packs stored raw: what gets its name is whole and right, what goes is needed by nobody, and nothing else changes."""

from __future__ import annotations

import errno
import json
import os
import stat
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support.children import Child, die_at_call
from support.conversions import Calling, Interrupting, Site, Stop, noise
from support.faults import failing, fsync_for_free
from support.stores import DAY, Sample, SteppedClock, all_blobs, assert_sound, descriptor, document, publish
from support.tars import file, tar

from imgtool.cli import run
from imgtool.exitcodes import ExitCode
from layerstore import rawpacks
from layerstore.audit import ContentCheck
from layerstore.compose import plan_stack, publish_stack
from layerstore.convert import Conversion, Report, convert
from layerstore.digest import Digest
from layerstore.errors import (
    CorruptError,
    NoSpaceError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from layerstore.image import Role
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.source_name import SourceName
from layerstore.pack.stored import StoredPack
from layerstore.rawpacks import RawState, is_raw, packs_of, plan_removal, publish_raw, remove_raw, store_raw
from layerstore.store.clock import FileClock
from layerstore.store.collect import collect, plan_collection
from layerstore.store.copying import copy
from layerstore.store.directory import DirectoryStore
from layerstore.store.memory import MemoryStore
from layerstore.store.protocol import LocalStore, Store
from layerstore.store.verification import Fault, Finding, verify

BASE = tar(*(file(f"f{number}", noise(200_000, number)) for number in range(4)))
WORK = tar(file("new", noise(300_000, 9)), file("same", noise(200_000, 1)))


@pytest.fixture(autouse=True)
def impatience() -> Iterator[None]:
    with fsync_for_free():
        yield


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture
def shop(site: Site) -> Site:
    """A base and a workspace over it, which uses the base's pack and one of its own."""
    site.convert(site.image([BASE]), tag="base")
    site.convert(site.image([BASE, WORK]), Role.WORKSPACE, base="base", tag="work")
    base, work = site.store.resolve("base"), packs_of(site.store, ["work"])
    assert len(work) == 2
    assert packs_of(site.store, ["base"])[0] in work
    assert base.digest != work[0].digest
    return site


def states(packs: list[rawpacks.RawPack]) -> list[str]:
    return [str(pack.state) for pack in packs]


def raw_bytes(site: Site, pack: StoredPack) -> bytes:
    return Path(site.store.local_path(pack.digest)).read_bytes()


def unname(site: Site, *names: str) -> None:
    for name in names:
        site.store.delete_reference(name, expected=site.store.resolve(name))


def sweep(site: Site) -> set[Digest]:
    return {blob.digest for blob in collect(site.store, plan_collection(site.store, grace=0, force=True)).deleted}


# ---- storing


def test_a_raw_pack_is_the_blob_that_the_packs_identity_names(shop: Site) -> None:
    before = shop.snapshot()
    packs = packs_of(shop.store, ["work"])
    assert not any(is_raw(shop.store, pack) for pack in packs)
    done = publish_raw(shop.store, ["work"])
    assert [(pack.digest, pack.size, pack.state) for pack in done] == [
        (pack.digest, pack.raw_size, RawState.STORED) for pack in packs
    ]
    for pack in packs:
        assert is_raw(shop.store, pack)
        assert Digest.of(raw_bytes(shop, pack)) == pack.digest
        status = os.stat(shop.store.local_path(pack.digest))
        assert (stat.S_IMODE(status.st_mode), status.st_size % 4096) == (0o644, 0)
    blobs, references, leftovers = shop.snapshot()
    assert (references, leftovers) == before[1:]
    assert blobs == {**before[0], **{pack.digest: pack.raw_size for pack in packs}}
    assert list(verify(shop.store, check=ContentCheck())) == []


def test_what_is_there_and_right_stays(shop: Site) -> None:
    publish_raw(shop.store, ["work"])
    packs = packs_of(shop.store, ["work"])
    inodes = [os.stat(shop.store.local_path(pack.digest)).st_ino for pack in packs]
    assert states(publish_raw(shop.store, ["work", "base"])) == ["present", "present"]
    assert [os.stat(shop.store.local_path(pack.digest)).st_ino for pack in packs] == inodes


@pytest.mark.case("C05")
@pytest.mark.parametrize("damage", [b"", b"x", None, "more"])
def test_what_is_there_and_wrong_is_replaced(shop: Site, damage: bytes | str | None) -> None:
    (pack,) = packs_of(shop.store, ["base"])
    publish_raw(shop.store, ["base"])
    right = raw_bytes(shop, pack)
    if damage is None:
        shop.flip(pack.digest, 70_000)
    else:
        shop.blob_path(pack.digest).write_bytes(damage if isinstance(damage, bytes) else right + b"more")
    assert states(publish_raw(shop.store, ["base"])) == ["stored"]
    assert raw_bytes(shop, pack) == right


@pytest.mark.parametrize("offset", [0, 300_000, -1, -200])
def test_a_damaged_pack_becomes_no_raw_one(shop: Site, offset: int) -> None:
    (pack,) = packs_of(shop.store, ["base"])
    shop.flip(pack.blob, offset)
    before = shop.snapshot()
    if offset == -1:  # the end of the seek table, which nothing here reads
        assert states(publish_raw(shop.store, ["base"])) == ["stored"]
        return
    with pytest.raises(CorruptError, match=pack.digest.hex):
        publish_raw(shop.store, ["base"])
    assert shop.snapshot() == before


def test_a_missing_pack_is_damage_of_its_image(shop: Site) -> None:
    (pack,) = packs_of(shop.store, ["base"])
    os.unlink(shop.blob_path(pack.blob))
    with pytest.raises(CorruptError, match=rf"store pack {pack.digest} raw: .*{pack.blob}"):
        publish_raw(shop.store, ["base"])


def test_frames_that_are_right_and_a_pack_that_is_another(shop: Site) -> None:
    """Whatever a manifest says, no bytes get a name that isn't theirs."""
    (pack,) = packs_of(shop.store, ["base"])
    wrong = replace(pack, digest=Digest.of(b"another"))
    before = shop.snapshot()
    with shop.store.lease() as lease, pytest.raises(CorruptError, match="expected"):
        store_raw(shop.store, [wrong], lease)
    assert shop.snapshot() == before


def test_an_image_that_is_not_there(shop: Site) -> None:
    for call in (publish_raw, plan_removal):
        with pytest.raises(NotFoundError):
            call(shop.store, ["base", "nothing"])
    assert shop.snapshot()[2] == []


def test_only_stores_whose_blobs_are_files(shop: Site) -> None:
    assert isinstance(shop.store, LocalStore)
    memory = MemoryStore()
    copy("base", shop.store, memory)
    with pytest.raises(UnsupportedError, match="memory: is no directory"):
        publish_raw(memory, ["base"])
    with pytest.raises(UnsupportedError, match="no directory"):  # before the source is looked at
        convert(Conversion(SourceName.parse("tar:/nowhere"), Role.BASE, raw=True), memory)


def test_memory_is_that_of_a_frame(site: Site) -> None:
    site.convert(site.tar(*(file(f"f{number}", noise(4_000_000, number)) for number in range(6))), tag="big")
    tracemalloc.start()
    try:
        publish_raw(site.store, ["big"])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20, peak


@pytest.mark.case("C06")
@pytest.mark.parametrize(("call", "error"), [("write", errno.ENOSPC), ("fsync", errno.EDQUOT), ("close", errno.EDQUOT)])
def test_a_full_disk(shop: Site, call: str, error: int) -> None:
    packs = packs_of(shop.store, ["work"])
    publish_raw(shop.store, ["base"])
    kept = raw_bytes(shop, packs_of(shop.store, ["base"])[0])
    before = shop.snapshot()
    with shop.store.lease() as lease:
        lease.pin([digest for pack in packs for digest in (pack.blob, pack.digest)])
        lease.renew()  # so that only the pack's own writes are left to fail
        missing = [pack for pack in packs if not is_raw(shop.store, pack)]
        with failing(call, error), pytest.raises(NoSpaceError, match="free space"):
            rawpacks._decompress(shop.store, missing[0], Interrupting("never"))
    assert shop.snapshot() == before
    assert raw_bytes(shop, packs_of(shop.store, ["base"])[0]) == kept
    assert states(publish_raw(shop.store, ["work"])).count("stored") == 1


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_interrupted_between_frames(shop: Site, pieces: int) -> None:
    before = shop.snapshot()
    with pytest.raises(Stop):
        publish_raw(shop.store, ["base"], progress=Interrupting("store raw pack", pieces))
    assert shop.snapshot() == before


@pytest.mark.case("C03")
def test_killed_at_any_call(tmp_path: Path) -> None:
    Site(tmp_path)
    clock = SteppedClock(FileClock(str(tmp_path / "store" / "clock")))
    site = Site(tmp_path, clock=clock)
    site.convert(site.tar(file("a", noise(600_000, 1))), tag="one")
    (pack,) = packs_of(site.store, ["one"])
    code, count, whole = -9, 0, 0
    while code == -9:
        count += 1

        def work(child: Child, count: int = count) -> None:
            die_at_call(count)
            publish_raw(DirectoryStore(site.store.root), ["one"])

        with Child(work) as child:
            code = child.wait()
        if is_raw(site.store, pack):
            whole += 1
            assert Digest.of(raw_bytes(site, pack)) == pack.digest
            os.unlink(site.store.local_path(pack.digest))
        assert assert_sound(site.store) == all_blobs(site.store)
    assert code == 0
    assert count > 15
    assert whole > 1  # killed after the name was there, too
    clock.advance(2 * DAY)
    collect(site.store, plan_collection(site.store, grace=0))
    assert site.leftovers() == []


@pytest.mark.case("C03")
def test_several_at_once(shop: Site) -> None:
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child(lambda child: publish_raw(DirectoryStore(shop.store.root), ["work"])))
            for _ in range(3)
        ]
        assert [child.wait() for child in children] == [0, 0, 0]
    assert states(publish_raw(shop.store, ["work"])) == ["present", "present"]
    assert shop.leftovers() == []


# ---- converting and copying


def test_a_conversion_stores_all_packs_of_its_layer_before_its_name(site: Site) -> None:
    site.convert(site.image([BASE]), tag="base")
    seen: list[list[str]] = []
    report = site.convert(
        site.image([BASE, WORK]),
        Role.WORKSPACE,
        base="base",
        tag="work",
        dedup=False,
        raw=True,
        progress=Calling("store raw pack", lambda: seen.append(list(site.store.names()))),
    )
    assert seen == [["base"]]
    assert len(report.layer.packs) == 2
    assert all(is_raw(site.store, pack) for pack in report.layer.packs)
    blobs, _, leftovers = site.snapshot()
    assert leftovers == []
    again = site.convert(site.image([BASE, WORK]), Role.WORKSPACE, base="base", tag="x", dedup=False, raw=True)
    assert (again.manifest, again.stored_size) == (report.manifest, 0)
    assert site.blobs() == blobs
    assert report.stored_size > sum(pack.raw_size for pack in report.layer.packs)


def test_digests_do_not_depend_on_it(tmp_path: Path) -> None:
    reports: list[Report] = []
    for raw in (False, True):
        site = Site(tmp_path / str(raw))
        reports.append(site.convert(site.tar(file("a", noise(50_000, 1))), raw=raw))
    assert reports[0].image == reports[1].image


def test_a_copy_leaves_raw_packs_where_they_are(shop: Site, tmp_path: Path) -> None:
    publish_raw(shop.store, ["work"])
    other = DirectoryStore.create(str(tmp_path / "other"))
    copied = copy("work", shop.store, other)
    packs = packs_of(other, ["work"])
    assert not any(is_raw(other, pack) for pack in packs)
    assert copied.present == 0
    assert all_blobs(other) == assert_sound(other)
    assert not {pack.digest for pack in packs} & all_blobs(other)
    assert states(publish_raw(other, ["work"])) == ["stored", "stored"]


# ---- collecting


@pytest.mark.case("G04")
def test_a_raw_pack_stays_as_long_as_an_image_that_uses_the_pack(shop: Site) -> None:
    stack = plan_stack(shop.store, base="base", workspace="work")
    publish_stack(shop.store, stack, tag="env")
    publish_raw(shop.store, ["env"])
    shared, own = packs_of(shop.store, ["base"])[0], packs_of(shop.store, ["work"])[0]
    assert own != shared
    unname(shop, "base", "work")
    assert not sweep(shop) & {shared.digest, own.digest, shared.blob, own.blob}
    assert is_raw(shop.store, shared) and is_raw(shop.store, own)
    unname(shop, "env")
    assert {shared.digest, own.digest, shared.blob, own.blob} <= sweep(shop)
    assert all_blobs(shop.store) == set()


@pytest.mark.case("G04", "G05")
def test_one_stored_after_the_plan_stays(shop: Site) -> None:
    """Marking doesn't look whether it is there, so it can't have looked too early."""
    (pack,) = packs_of(shop.store, ["base"])
    publish_raw(shop.store, ["base"])
    documents = rawpacks.Documents(shop.store)
    os.rename(shop.blob_path(pack.digest), shop.path / "aside")
    plan = plan_collection(shop.store, grace=0, documents=documents)
    os.rename(shop.path / "aside", shop.blob_path(pack.digest))
    doomed = replace(plan, doomed=tuple(blob for blob in shop.store.blobs() if blob.digest == pack.digest))
    assert [blob.digest for blob in collect(shop.store, doomed, documents=documents).spared] == [pack.digest]
    assert is_raw(shop.store, pack)


@pytest.mark.case("G05")
def test_an_image_without_a_name_is_safe_while_its_packs_are_stored(shop: Site) -> None:
    name = str(shop.store.resolve("work").digest)
    unname(shop, "work")
    publish_raw(shop.store, [name], progress=Calling("store raw pack", lambda: sweep(shop)))
    assert all(is_raw(shop.store, pack) for pack in packs_of(shop.store, [name]))
    assert shop.rows(name)
    assert len(sweep(shop)) == 5  # manifest, config, metadata image, and the pack of its own, twice


@pytest.mark.case("G04")
def test_an_error_while_marking_keeps_raw_packs_too(shop: Site) -> None:
    publish_raw(shop.store, ["work"])
    unname(shop, "work")
    plan = plan_collection(shop.store, grace=0)
    removal = plan_removal(shop.store, ["base"])
    assert len(removal.doomed) == 1
    before = shop.blobs()
    (Path(shop.store.root) / "refs" / "broken").write_bytes(b"{")
    calls: list[Callable[[], object]] = [
        lambda: collect(shop.store, plan),
        lambda: remove_raw(shop.store, removal),
        lambda: plan_removal(shop.store, ["base"]),
    ]
    for call in calls:
        with pytest.raises(CorruptError, match="broken"):
            call()
    assert shop.blobs() == before


# ---- verifying


@pytest.mark.case("C05")
def test_a_damaged_raw_pack_is_named_and_the_image_stays_usable(shop: Site) -> None:
    rows = shop.rows("base")
    publish_raw(shop.store, ["base"])
    (pack,) = packs_of(shop.store, ["base"])
    shop.flip(pack.digest)
    found = [(str(each.fault), each.digest, each.reference, each.raw) for each in verify(shop.store)]
    assert found == [
        ("corrupt", pack.digest, None, False),
        ("corrupt", pack.digest, "base", True),
        ("corrupt", pack.digest, "work", True),
    ]
    (finding,) = verify(shop.store, quarantine=True, check=ContentCheck())
    assert finding.quarantined is not None
    assert Path(finding.quarantined).stat().st_size == pack.raw_size
    assert list(verify(shop.store, check=ContentCheck())) == []
    assert shop.rows("base") == rows
    assert states(publish_raw(shop.store, ["base"])) == ["stored"]


def test_a_damaged_raw_pack_hides_nothing_else(shop: Site) -> None:
    """The content of the image is checked all the same."""
    publish_raw(shop.store, ["base"])
    (pack,) = packs_of(shop.store, ["base"])
    shop.flip(pack.digest)
    checked: list[str] = []

    def check(store: Store, name: str, target: Descriptor) -> list[Finding]:
        checked.append(name)
        return []

    assert {finding.fault for finding in verify(shop.store, check=check)} == {Fault.CORRUPT}
    assert checked == ["base", "work"]


# ---- removing


def test_raw_packs_that_nobody_else_uses_go(shop: Site) -> None:
    before = shop.snapshot()
    publish_raw(shop.store, ["work"])
    shared, own = packs_of(shop.store, ["base"])[0], packs_of(shop.store, ["work"])[0]
    plan = plan_removal(shop.store, ["work"])
    assert [raw.digest for raw in plan.doomed] == [own.digest]
    assert [(raw.digest, raw.users) for raw in plan.kept] == [(shared.digest, ("base",))]
    assert is_raw(shop.store, own), "a plan changes nothing"
    assert sorted(states(remove_raw(shop.store, plan))) == ["kept", "removed"]
    assert (is_raw(shop.store, own), is_raw(shop.store, shared)) == (False, True)
    assert states(remove_raw(shop.store, plan)) == ["kept"]
    assert states(remove_raw(shop.store, plan_removal(shop.store, ["work", "base"]))) == ["removed"]
    assert shop.snapshot() == before
    assert remove_raw(shop.store, plan_removal(shop.store, ["work", "base"])) == []


def test_two_names_of_one_image_are_one_user(shop: Site) -> None:
    publish_raw(shop.store, ["base"])
    unname(shop, "work")
    copy("base", shop.store, shop.store, rename="base:again")
    assert states(remove_raw(shop.store, plan_removal(shop.store, ["base"]))) == ["removed"]
    publish_raw(shop.store, ["base"])
    by_digest = plan_removal(shop.store, [str(shop.store.resolve("base").digest)])
    assert states(remove_raw(shop.store, by_digest)) == ["removed"]


def test_an_image_published_after_the_plan_keeps_it(shop: Site) -> None:
    publish_raw(shop.store, ["work"])
    plan = plan_removal(shop.store, ["work", "base"])
    assert len(plan.doomed) == 2
    publish_stack(shop.store, plan_stack(shop.store, base="base", workspace="work"), tag="env")
    assert {raw.users for raw in remove_raw(shop.store, plan)} == {("env",)}
    assert all(is_raw(shop.store, pack) for pack in packs_of(shop.store, ["env"]))


def test_a_lease_keeps_it(shop: Site) -> None:
    publish_raw(shop.store, ["base"])
    unname(shop, "work")
    (pack,) = packs_of(shop.store, ["base"])
    with shop.store.lease() as lease:
        lease.pin([pack.digest])
        (raw,) = remove_raw(shop.store, plan_removal(shop.store, ["base"]))
    assert (raw.state, raw.users) == (RawState.KEPT, ("a lease",))


def test_a_manifest_that_lists_it_as_a_blob_keeps_it(shop: Site) -> None:
    publish_raw(shop.store, ["base"])
    unname(shop, "work")
    (pack,) = packs_of(shop.store, ["base"])
    data = raw_bytes(shop, pack)
    publish(shop.store, "foreign", document({"layers": [descriptor(data).to_json()]}, [data]))
    (raw,) = remove_raw(shop.store, plan_removal(shop.store, ["base"]))
    assert (raw.state, raw.users) == (RawState.KEPT, ("foreign",))
    assert_sound(shop.store)


def test_a_plan_is_for_its_own_store(shop: Site, tmp_path: Path) -> None:
    publish_raw(shop.store, ["base"])
    with pytest.raises(UsageError, match="not for"):
        remove_raw(DirectoryStore.create(str(tmp_path / "other")), plan_removal(shop.store, ["base"]))


# ---- what documents say


@pytest.mark.parametrize(
    "notes",
    [
        {},
        {"org.erofs.role": "overlay-lower"},
        {"org.imgtool.uncompressed-size": "-4096"},
        {"org.imgtool.uncompressed-size": "1e3"},
        {"org.imgtool.uncompressed-size": "9" * 20},
        {"org.erofs.uncompressed-digest": "sha256:../../refs/x"},
        {"org.erofs.uncompressed-digest": "blake3:00"},
    ],
)
def test_annotations_of_others_name_no_raw_packs(shop: Site, notes: dict[str, str]) -> None:
    """They stop neither a collection nor a verification, and name nothing that could be stored."""
    right = {
        "org.erofs.role": "device",
        "org.erofs.uncompressed-digest": str(Digest.of(b"raw")),
        "org.imgtool.uncompressed-size": "3",
    }
    foreign = {**descriptor(b"packed").to_json(), "annotations": {**right, **notes} if notes else {}}
    sample: Sample = document({"layers": [foreign]}, [b"packed"])
    publish(shop.store, "foreign", sample)
    with shop.store.upload() as upload:
        upload.write(b"raw")
        upload.commit(Digest.of(b"raw"), 3)
    assert Digest.of(b"raw") in sweep(shop)
    assert list(verify(shop.store)) == []


# ---- on the command line


class Shell:
    def __init__(self, site: Site, capture: pytest.CaptureFixture[str]) -> None:
        self.site = site
        self._capture = capture

    def __call__(self, *arguments: str, code: ExitCode = ExitCode.OK) -> str:
        self._capture.readouterr()
        done = run(arguments)
        out, err = self._capture.readouterr()
        assert done == code, err
        return out or err


@pytest.fixture
def shell(shop: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setenv("IMGTOOL_STORE", shop.store.root)
    return Shell(shop, capsys)


def test_raw_stores_says_and_removes(shell: Shell) -> None:
    packs = packs_of(shell.site.store, ["work"])
    document = json.loads(shell("raw", "work", "--json"))
    assert document == [
        {"pack": str(pack.digest), "bytes": pack.raw_size, "state": "stored", "needed_by": []} for pack in packs
    ]
    assert "present" in shell("raw", "work")
    assert "0 pack(s), 0 B, stored raw" in shell("raw", "work")
    text = shell("raw", "work", "--remove")
    assert "kept, needed by base" in text
    assert "1 pack(s)" in text
    assert "removed" in text
    assert json.loads(shell("raw", "work", "base", "--remove", "--json"))[0]["state"] == "removed"
    assert "nothing" in shell("raw", "nothing", code=ExitCode.NOT_FOUND)


def test_inspect_says_which_packs_are_raw(shell: Shell) -> None:
    shell("raw", "base")
    shared = packs_of(shell.site.store, ["base"])[0]
    (layer,) = json.loads(shell("inspect", "work", "--json"))["layers"]
    assert {pack["pack"]: pack["raw"] for pack in layer["packs"]} == {
        str(pack.digest): pack == shared for pack in packs_of(shell.site.store, ["work"])
    }
    assert shell("inspect", "work").count("pack, also raw") == 1
    shell.site.blob_path(shared.digest).write_bytes(b"short")
    assert "also raw" not in shell("inspect", "work")


def test_convert_and_copy_store_raw_when_asked(shell: Shell, tmp_path: Path) -> None:
    site = shell.site
    shell("convert", site.tar(file("a", noise(30_000, 77))), "--role", "toolkit", "--tag", "tool", "--raw")
    assert all(is_raw(site.store, pack) for pack in packs_of(site.store, ["tool"]))
    other = str(tmp_path / "other")
    assert json.loads(shell("copy", "tool", site.store.root, other, "--json"))["bytes_raw"] == 0
    store = DirectoryStore(other)
    (pack,) = packs_of(store, ["tool"])
    assert not is_raw(store, pack)
    copied = json.loads(shell("copy", "tool", site.store.root, other, "--raw", "--json"))
    assert (copied["bytes_raw"], copied["blobs_copied"]) == (pack.raw_size, 0)
    assert is_raw(store, pack)
    assert "1 pack(s) are stored raw, 0 B of them new" in shell("copy", "tool", site.store.root, other, "--raw")


def test_a_copy_with_raw_packs_has_its_name_last(shell: Shell, tmp_path: Path) -> None:
    site, other = shell.site, str(tmp_path / "other")
    with failing("fsync", errno.ENOSPC, after=9):
        shell("copy", "base", site.store.root, other, "--raw", code=ExitCode.NO_SPACE)
    assert list(DirectoryStore(other).names()) == []


def test_verify_tells_scripts_what_is_only_a_raw_pack(shell: Shell) -> None:
    shell("raw", "base")
    shell.site.flip(packs_of(shell.site.store, ["base"])[0].digest)
    findings = json.loads(shell("verify", "--json", code=ExitCode.FINDINGS))
    assert [(finding["tag"], finding["raw"]) for finding in findings] == [(None, False), ("base", True), ("work", True)]
