"""The command line: every verb that needs no root, its text, its JSON, its exit codes, and its one-line errors."""

from __future__ import annotations

import base64
import errno
import importlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.conversions import Site, noise
from support.faults import failing, fsync_for_free
from support.layouts import OCI_LAYER
from support.manual import options_of
from support.tars import directory, fifo, file, hardlink, opaque, sparse_gnu, symlink, tar, whiteout
from support.tools import CHECKOUT

from imgtool import render
from imgtool.cli import VERBS, run
from imgtool.exitcodes import ExitCode
from layerstore import convert as convert_module
from layerstore.store import directory as directory_store
from layerstore.store.collect import collect, plan_collection
from layerstore.version import FORMAT_VERSION, VERSION

BASE = tar(
    directory("etc"),
    file("etc/os-release", b"NAME=base\n", mode=0o644, mtime=1_000_000_000),
    symlink("os", "/etc/os-release"),
    file("bin/tool", noise(20_000, 1), mode=0o755),
    file("gone", b"gone"),
)
WORK = tar(
    file("src/main.py", b"print('work')\n", uid=1000, gid=1000),
    whiteout("gone"),
    file("etc/os-release", b"NAME=work\n"),
)
TOOLS = tar(directory("opt/tools"), file("opt/tools/run", b"#!"), file("bin/tool", b"better"))
ODD = tar(
    file(b"caf\xe9", b"latin"),
    file("new\nline", b"n"),
    file("back\\slash", b"b"),
    file("\x1b[31mred", b"r"),
    file("snow ☃", b"s"),
    symlink("link", b"\x80\n"),
    file("x", pax={"SCHILY.xattr.user.\xe9": b"\0\xff"}),
    fifo("pipe"),
)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shell:
    """Runs commands in this process, with their output captured."""

    def __init__(self, site: Site, capture: pytest.CaptureFixture[str]) -> None:
        self.site = site
        self._capture = capture

    def __call__(self, *arguments: str) -> Result:
        self._capture.readouterr()
        code = run(arguments)
        out, err = self._capture.readouterr()
        return Result(int(code), out, err)

    def ok(self, *arguments: str) -> Result:
        result = self(*arguments)
        assert result.code == 0, result.err
        assert result.err == ""
        return result

    def fails(self, code: ExitCode, *arguments: str) -> str:
        """One line on standard error, nothing on standard output; returns the line."""
        result = self(*arguments)
        assert (result.code, result.out) == (code, ""), result.err
        assert result.err.startswith("imgtool: ") and result.err.endswith("\n")
        line = result.err[:-1]
        assert line.isprintable(), line
        assert "Traceback" not in line
        return line


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.setenv("IMGTOOL_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("IMGTOOL_STORE", str(tmp_path / "store"))
    with fsync_for_free():
        yield Shell(Site(tmp_path), capsys)


@pytest.fixture
def shop(shell: Shell) -> Shell:
    """With a base, a workspace over it, a toolkit, and the three of them as ``env``."""
    site = shell.site
    base, work, tools = site.image([BASE]), site.image([BASE, WORK]), site.image([TOOLS])
    shell.ok("convert", base, "--role", "base", "--tag", "base")
    shell.ok("convert", work, "--role", "workspace", "--base", "base", "--tag", "work")
    shell.ok("convert", tools, "--role", "toolkit", "--tag", "tools")
    shell.ok("compose", "--base", "base", "--workspace", "work", "--toolkit", "tools", "--tag", "env")
    return shell


def imgtool(*arguments: str | bytes, **fields: Any) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT), **fields.pop("env", {})}
    command = [sys.executable, "-m", "imgtool", *arguments]
    return subprocess.run(command, env=env, **{"stdin": subprocess.DEVNULL, "capture_output": True, **fields})


# -- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for option in ("--help", "-h"):
        assert run([verb, option]) == 0
        texts.append(capsys.readouterr())
    assert texts[0] == texts[1]
    assert texts[0].err == ""
    assert texts[0].out.startswith(f"Usage: imgtool {verb} ")
    assert "Examples:\n" in texts[0].out
    assert "--json" in texts[0].out


def test_help_lists_every_verb_and_is_what_one_gets_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    nothing = capsys.readouterr()
    assert run(["--help"]) == 0
    assert capsys.readouterr() == nothing
    for verb in VERBS:
        assert re.search(rf"^  {verb} ", nothing.out, re.MULTILINE)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"imgtool {VERSION} (layer format {FORMAT_VERSION})\n"


def test_every_example_of_the_help_parses(capsys: pytest.CaptureFixture[str]) -> None:
    """Options that the examples use exist."""
    for verb in VERBS:
        command = importlib.import_module(f"imgtool.commands.{verb}").command
        known = {*options_of(command), "--"}
        for line in command.epilog.splitlines():
            for words in re.findall(rf"imgtool {verb} ([^|&]*)", line):
                own = words.split(" -- ")[0]
                assert set(re.findall(r"(?<!\S)--[a-z-]+", own)) <= known, line
    assert capsys.readouterr().out == ""


# -- publishing -------------------------------------------------------------------------------------------------------


def test_convert(shell: Shell) -> None:
    source = shell.site.image([BASE])
    text = shell.ok("convert", source, "--role", "base", "--tag", "it").out.splitlines()
    assert text[0] == "it: base, 7 entries"
    assert re.fullmatch(r"  read \S+ kB; data 20.5 kB: 20.5 kB new, 0 B shared; stored \S+ kB more", text[1])
    assert re.fullmatch(r"  metadata image 4.1 kB, 1 pack\(s\); manifest sha256:[0-9a-f]{64}", text[2])
    document = shell.ok("convert", source, "--role", "base", "--tag", "it", "--json").json
    assert list(document) == [
        "manifest", "tag", "role", "layer", "base", "entries", "bytes_in", "bytes_data", "bytes_new", "bytes_shared",
        "bytes_stored", "bytes_metadata", "packs", "warnings",
    ]  # fmt: skip
    assert DIGEST.fullmatch(document["manifest"]) and DIGEST.fullmatch(document["layer"])
    assert (document["tag"], document["role"], document["base"]) == ("it", "base", None)
    assert (document["entries"], document["bytes_data"], document["bytes_stored"]) == (7, 20_480, 0)
    assert document["bytes_new"] + document["bytes_shared"] == document["bytes_data"]
    assert document["warnings"] == []
    assert str(shell.site.store.resolve("it").digest) == document["manifest"]
    untagged = shell.ok("convert", source, "--role", "toolkit", "--json").json
    assert untagged["tag"] is None
    assert shell.ok("inspect", untagged["manifest"], "--json").json["layers"][0]["role"] == "toolkit"


def test_convert_passes_its_options_on(shell: Shell) -> None:
    site = shell.site
    many = site.tar(*(file(f"{number}") for number in range(50)))
    line = shell.fails(ExitCode.LIMIT, "convert", many, "--role", "base", "--max-entries", "20")
    assert "20" in line
    sparse = site.tar(sparse_gnu("disk", 3 << 30, [(0, b"x" * 512)]))
    assert "disk" in shell.fails(ExitCode.LIMIT, "convert", sparse, "--role", "base", "--max-file-gib", "1")
    shell.ok("convert", sparse, "--role", "base", "--max-file-gib", "3", "--max-layer-gib", "1")
    arguments = ("--role", "toolkit", "--platform", "linux/arm64/v8", "--level", "19", "--jobs", "3", "--no-dedup")
    shell.ok("convert", site.tar(file("a", noise(5000, 2))), *arguments, "--tag", "arm")
    config = shell.ok("inspect", "arm", "--json").json["config"]
    assert (config["os"], config["architecture"]) == ("linux", "arm64")


def test_warnings_go_to_standard_error_and_into_the_json(shell: Shell) -> None:
    source = shell.site.tar(file("twice\n", b"1"), file("twice\n", b"2"))
    result = shell("convert", source, "--role", "base", "--json")
    assert result.code == 0
    assert result.err == "imgtool: warning: " + result.json["warnings"][0] + "\n"
    assert "twice\\x0a" in result.err


def test_compose(shop: Shell) -> None:
    arguments = ("compose", "--base", "base", "--workspace", "work", "--toolkit", "tools")
    assert shop.ok(*arguments, "--tag", "env").out.splitlines() == [
        "  /bin/tool: in base, tools; tools wins (file-over-file)",
        "  /etc/os-release: in base, work; work wins (file-over-file)",
        "  /gone: in base; work wins (whiteout-hides)",
        "env: base < work < tools; 3 path(s) in several layers",
    ]
    document = shop.ok(*arguments, "--dry-run", "--json").json
    assert list(document) == ["manifest", "tag", "layers", "config", "conflicts"]
    assert (document["manifest"], document["tag"]) == (None, None)
    assert [(layer["name"], layer["role"]) for layer in document["layers"]] == [
        ("base", "base"),
        ("work", "workspace"),
        ("tools", "toolkit"),
    ]
    assert document["conflicts"][0] == {
        "path": "/bin/tool",
        "kind": "file-over-file",
        "in": ["base", "tools"],
        "winner": "tools",
    }
    assert document["config"]["config"]["Env"] == ["PATH=/usr/bin:/bin"]
    published = shop.ok(*arguments, "--tag", "env", "--json").json
    assert str(shop.site.store.resolve("env").digest) == published["manifest"]


def test_a_dry_run_of_compose_and_a_wrong_store_make_nothing(shop: Shell) -> None:
    before = shop.site.snapshot()
    shop.ok("compose", "--base", "base", "--toolkit", "tools", "--dry-run")
    assert shop.site.snapshot() == before
    wrong = shop.site.path / "wrong"
    for arguments in (["compose", "--base", "base"], ["tag", "a", "b"], ["ls"], ["gc"], ["verify"], ["rm", "a"]):
        assert "is not a store" in shop.fails(ExitCode.NOT_FOUND, *arguments, "--store", str(wrong))
    assert not wrong.exists()


def test_many_conflicts_are_cut_in_text_and_whole_in_json(shell: Shell) -> None:
    files = [file(f"f{number:02}", b"%d" % number) for number in range(30)]
    for role in ("base", "toolkit"):
        shell.ok("convert", shell.site.tar(*files, file(role)), "--role", role, "--tag", role)
    lines = shell.ok("compose", "--base", "base", "--toolkit", "toolkit", "--dry-run").out.splitlines()
    assert lines[19].startswith("  /f19:")
    assert lines[20:] == ["  … and 10 more; --json lists all", "dry run: base < toolkit; 30 path(s) in several layers"]
    document = shell.ok("compose", "--base", "base", "--toolkit", "toolkit", "--dry-run", "--json").json
    assert len(document["conflicts"]) == 30


def test_tag_and_rm(shop: Shell) -> None:
    target = str(shop.site.store.resolve("base").digest)
    assert shop.ok("tag", "base", "team/base:1").out == f"team/base:1: {target}\n"
    assert shop.ok("tag", target, "rescued", "--json").json == {"tag": "rescued", "manifest": target}
    assert shop.ok("rm", "team/base:1").out == f"removed team/base:1 ({target})\n"
    assert shop.ok("rm", "rescued", "base", "--json").json == [
        {"tag": "rescued", "manifest": target},
        {"tag": "base", "manifest": target},
    ]
    shop.fails(ExitCode.NOT_FOUND, "rm", "work", "nothing")
    assert "work" in list(shop.site.store.names()), "a wrong name removes nothing"
    shop.ok("rm", "work", "work")


def test_copy(shop: Shell) -> None:
    store, other = shop.site.store.root, str(shop.site.path / "other")
    document = shop.ok("copy", "env", store, other, "--json").json
    assert list(document) == [
        "tag", "manifest", "blobs_copied", "bytes_copied", "blobs_present", "bytes_raw", "plans_copied",
        "plans_present", "plans_kept", "plans_failed",
    ]  # fmt: skip
    assert document["tag"] == "env" and document["blobs_present"] == 0
    assert document["manifest"] == str(shop.site.store.resolve("env").digest)
    text = shop.ok("copy", "env", store, other).out
    assert text == f"env: copied 0 blob(s), 0 B; {document['blobs_copied']} were there already\n"
    shop.ok("copy", "base", store, other, "--as", "env:base")
    shop.fails(ExitCode.CONFLICT, "copy", "work", store, other, "--as", "env")
    shop.ok("copy", "work", store, other, "--as", "env", "--replace")
    names = [item["name"] for item in shop.ok("ls", "--store", other, "--json").json]
    assert names == ["env", "env:base"]
    assert shop("verify", "--store", other).code == 0


def test_gc(shop: Shell) -> None:
    shop.ok("rm", "tools", "env")
    dry = shop.ok("gc", "--dry-run", "--grace", "0", "--json").json
    assert list(dry) == [
        "dry_run", "references", "kept_blobs", "kept_bytes", "young_blobs", "deleted_blobs", "deleted_bytes",
        "leftover_bytes", "plans_dropped",
    ]  # fmt: skip
    assert dry["dry_run"] is True and dry["references"] == 2
    young = shop.ok("gc").out.splitlines()
    assert young[0].startswith("deleted 0 blob(s), 0 B, and 0 B of leftovers; ")
    assert re.fullmatch(r"\d+ unreachable blob\(s\) are younger than 3600 s and were kept", young[1])
    text = shop.ok("gc", "--dry-run", "--grace", "0").out
    assert text.startswith(f"would delete {len(dry['deleted_blobs'])} blob(s)")
    wet = shop.ok("gc", "--grace", "0", "--json").json
    assert list(wet) == [*list(dry)[:5], "spared_blobs", *list(dry)[5:]]
    assert (wet["dry_run"], wet["deleted_blobs"], wet["spared_blobs"]) == (False, dry["deleted_blobs"], 0)
    assert shop("verify").code == 0
    shop.ok("rm", "base", "work")
    assert "references" in shop.fails(ExitCode.CONFLICT, "gc", "--grace", "0")
    shop.ok("gc", "--grace", "0", "--force")
    assert shop.site.blobs() == {}


# -- looking ----------------------------------------------------------------------------------------------------------


def test_ls(shop: Shell) -> None:
    shop.ok("tag", "base", "again")
    lines = shop.ok("ls").out.splitlines()
    assert lines[0].split() == ["NAME", "ROLES", "SIZE", "ITS", "OWN", "MANIFEST"]
    assert [line.split()[:2] for line in lines[1:]] == [
        ["again", "base"],
        ["base", "base"],
        ["env", "base+workspace+toolkit"],
        ["tools", "toolkit"],
        ["work", "workspace"],
    ]
    listed = shop.ok("ls", "--json").json
    assert [list(item) for item in listed] == [
        ["name", "manifest", "roles", "bytes", "bytes_own", "error", "plans"]
    ] * 5
    env = listed[2]
    assert env["roles"] == ["base", "workspace", "toolkit"] and env["error"] is None
    assert env["bytes"] > listed[1]["bytes"] > 0
    assert 0 < env["bytes_own"] < env["bytes"], "its config and manifest"
    assert listed[0]["bytes_own"] == listed[1]["bytes_own"], "two names of one image share everything"


@pytest.mark.case("C05")
def test_ls_lists_what_it_cannot_read_with_the_reason(shop: Shell) -> None:
    shop.site.flip(shop.site.store.resolve("work").digest)
    Path(shop.site.store.root, "refs", "torn").write_bytes(b"{")
    listed = {item["name"]: item for item in shop.ok("ls", "--json").json}
    assert set(listed) == {"base", "env", "tools", "torn", "work"}
    assert "expected sha256:" in listed["work"]["error"] and listed["work"]["roles"] == []
    assert listed["torn"]["manifest"] is None and "not JSON" in listed["torn"]["error"]
    lines = shop.ok("ls").out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["base", "env", "tools", "torn", "work"]
    assert listed["work"]["error"] in lines[5], "what goes into a pipe is never cut"
    assert listed["torn"]["error"] in lines[4]


def test_tables_are_never_cut_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    cells = ["x" * 3000, "y" * 500]
    render.print_table(("A", "B"), [cells, ["1", "2"]])
    assert capsys.readouterr().out.splitlines()[1].split() == cells


def test_inspect(shop: Shell) -> None:
    document = shop.ok("inspect", "env", "--json").json
    assert list(document) == ["name", "manifest", "layers", "config"]
    assert [list(layer) for layer in document["layers"]] == [
        [
            "role", "layer", "bytes_metadata", "bytes_metadata_stored", "format_version", "base", "source", "diff_ids",
            "packs", "plan",
        ]
    ] * 3  # fmt: skip
    base, work, tools = document["layers"]
    assert (base["role"], base["base"], work["base"]) == ("base", None, base["layer"])
    assert work["diff_ids"][0] == base["diff_ids"][0] and len(work["diff_ids"]) == 2
    assert [list(pack) for pack in base["packs"]] == [["pack", "bytes", "blob", "bytes_stored", "raw"]]
    assert tools["packs"] == []
    assert document["config"]["rootfs"]["diff_ids"] == [
        base["packs"][0]["pack"], base["layer"], work["layer"], tools["layer"],
    ]  # fmt: skip
    lines = shop.ok("inspect", "env").out.splitlines()
    assert lines[0] == f"env  {document['manifest']}"
    assert [line.split()[0] for line in lines[1:6]] == ["LAYER", "base", "pack", "workspace", "toolkit"]
    assert lines[6:] == [
        "    platform  linux/amd64",
        "        user  root",
        "   directory  /",
        "     command  /bin/sh",
        " environment  PATH=/usr/bin:/bin",
    ]


@pytest.mark.case("T39")
def test_inspect_prints_no_control_characters_of_a_config(shell: Shell) -> None:
    config = {"config": {"Env": ["A=\x1b[31m\nB"], "Cmd": ["a\nb"], "User": "x\r"}}
    shell.ok("convert", shell.site.image([BASE], config=config), "--role", "base", "--tag", "it")
    lines = shell.ok("inspect", "it").out.splitlines()
    assert all(line.isprintable() for line in lines)
    assert " environment  A=\\x1b[31m\\x0aB" in lines
    assert shell.ok("inspect", "it", "--json").json["config"]["config"]["Cmd"] == ["a\nb"]


def test_tree(shop: Shell) -> None:
    lines = shop.ok("tree", "env").out.splitlines()
    assert [line.split()[-1] for line in lines] == [
        "/", "/bin", "/bin/tool", "/etc", "/etc/os-release", "/opt", "/opt/tools", "/opt/tools/run", "/etc/os-release",
        "/src", "/src/main.py",
    ]  # fmt: skip
    assert lines[8].endswith(" /os -> /etc/os-release")
    assert lines[10] == "-rw-r--r--  1000  1000          14 1970-01-01 00:00 /src/main.py"
    assert shop.ok("tree", "env", "/os").out.split()[-1] == "/os"
    assert [line.split()[-1] for line in shop.ok("tree", "env", "--depth", "1").out.splitlines()] == [
        "/", "/bin", "/etc", "/opt", "/etc/os-release", "/src",
    ]  # fmt: skip
    assert [line.split()[-1] for line in shop.ok("tree", "env", "/opt/").out.splitlines()] == [
        "/opt", "/opt/tools", "/opt/tools/run",
    ]  # fmt: skip
    document = shop.ok("tree", "base", "/etc", "--json").json
    assert document[1] == {
        "path": "/etc/os-release",
        "mode": "100644",
        "uid": 0,
        "gid": 0,
        "mtime": 1_000_000_000,
        "mtime_nsec": 0,
        "size": 10,
    }
    shop.fails(ExitCode.NOT_FOUND, "tree", "env", "/gone")
    shop.fails(ExitCode.NOT_FOUND, "tree", "nothing")


@pytest.mark.case("T39")
def test_names_of_any_bytes_are_shown_reversibly(shell: Shell) -> None:
    shell.ok("convert", shell.site.raw_tar(ODD), "--role", "base", "--tag", "odd")
    lines = shell.ok("tree", "odd").out.splitlines()
    assert all(line.isprintable() for line in lines)
    shown = {line.split(" 00:00 ")[1] for line in lines}
    assert shown == {
        "/", "/caf\\xe9", "/new\\x0aline", "/back\\\\slash", "/\\x1b[31mred", "/snow ☃", "/link -> \\x80\\x0a", "/x",
        "/pipe",
    }  # fmt: skip
    document = {entry["path"]: entry for entry in shell.ok("tree", "odd", "--json").json}
    assert set(document) == {name.split(" -> ")[0] for name in shown}
    assert document["/link"]["target"] == "\\x80\\x0a"
    assert document["/x"]["xattrs"] == {"user.é": "00ff"}
    assert document["/pipe"]["device"] == [0, 0]
    latin, line = os.fsdecode(b"/caf\xe9"), "/new\nline"
    assert shell.ok("cat", "odd", latin).out == "latin"
    assert shell.ok("cat", "odd", line, "--json").json == {"path": "/new\\x0aline", "size": 1, "base64": "bg=="}
    assert "/caf\\xe8" in shell.fails(ExitCode.NOT_FOUND, "cat", "odd", os.fsdecode(b"/caf\xe8"))
    other = shell.site.tar(file(b"caf\xe9", b"other"))
    shell.ok("convert", other, "--role", "base", "--tag", "other")
    changes = {change["path"]: change for change in shell("diff", "odd", "other", "--json").json}
    assert changes["/caf\\xe9"]["what"] == ["content"]
    assert "~ /caf\\xe9  (content)" in shell("diff", "odd", "other").out.splitlines()
    for encoding in ("ascii", "latin-1"):
        ran = imgtool("tree", "odd", env={"PYTHONIOENCODING": encoding, "LC_ALL": "C"})
        assert ran.returncode == 0 and ran.stderr == b""


@pytest.mark.case("T39")
def test_messages_stay_one_line_whatever_they_quote(shell: Shell) -> None:
    bad = os.fsdecode(b"b\xe9\n\x1b[0m")
    site = shell.site
    for code, *arguments in (
        (ExitCode.NOT_FOUND, "convert", f"tree:{bad}", "--role", "base"),
        (ExitCode.NOT_FOUND, "convert", f"tar:{bad}", "--role", "base"),
        (ExitCode.NOT_FOUND, "convert", f"oci:{bad}:tag", "--role", "base"),
        (ExitCode.USAGE, "convert", bad, "--role", "base"),
        (ExitCode.USAGE, "convert", "tree:x", "--role", bad),
        (ExitCode.USAGE, "convert", "tree:x", "--role", "base", "--platform", bad),
        (ExitCode.USAGE, "convert", site.tar(), "--role", "base", "--tag", bad),
        (ExitCode.USAGE, "cat", bad, bad),
        (ExitCode.USAGE, bad),
        (ExitCode.USAGE, "ls", bad),
        (ExitCode.USAGE, "ls", f"--{bad}"),
        (ExitCode.NOT_FOUND, "ls", "--store", bad),
        (ExitCode.NOT_FOUND, "copy", "a", bad, bad),
        (
            ExitCode.MALFORMED,
            "convert",
            site.tar(file(bad.encode(errors="surrogateescape"), uid=2**40)),
            "--role",
            "base",
        ),
    ):
        shell.fails(code, *arguments)


def test_cat(shop: Shell) -> None:
    assert shop.ok("cat", "env", "/etc/os-release").out == "NAME=work\n"
    assert shop.ok("cat", "env", "os").out == "NAME=work\n", "links are followed inside the image"
    assert shop.ok("cat", "base", "/os").out == "NAME=base\n"
    document = shop.ok("cat", "base", "/bin/tool", "--json").json
    assert list(document) == ["path", "size", "base64"]
    assert base64.b64decode(document["base64"]) == noise(20_000, 1)
    assert imgtool("cat", "base", "/bin/tool").stdout == noise(20_000, 1)
    assert "/etc in 'env' is no regular file" in shop.fails(ExitCode.USAGE, "cat", "env", "/etc")
    shop.fails(ExitCode.NOT_FOUND, "cat", "env", "/gone")


def test_diff(shop: Shell) -> None:
    result = shop("diff", "base", "env")
    assert (result.code, result.err) == (ExitCode.FINDINGS, "")
    assert result.out.splitlines() == [
        "~ /bin/tool  (mode, size)",
        "~ /etc/os-release  (mtime, content)",
        "- /gone",
        "+ /opt",
        "+ /opt/tools",
        "+ /opt/tools/run",
        "+ /src",
        "+ /src/main.py",
    ]
    document = shop("diff", "base", "env", "--json")
    assert document.code == ExitCode.FINDINGS
    assert document.json[0] == {"path": "/bin/tool", "change": "changed", "what": ["mode", "size"]}
    assert document.json[2] == {"path": "/gone", "change": "removed", "what": []}
    assert shop.ok("diff", "env", "env").out == ""
    assert shop.ok("diff", "env", "env", "--json").json == []


def test_dump(shop: Shell) -> None:
    text = shop.ok("dump", "env", "--layer", "2").out
    assert text.startswith("superblock\n")
    assert "opt" in text
    document = shop.ok("dump", "env", "--layer", "2", "--json").json
    assert list(document) == ["layer", "lines"]
    assert document["lines"] == text.splitlines()
    assert document["layer"] == shop.ok("inspect", "env", "--json").json["layers"][2]["layer"]
    assert shop.fails(ExitCode.USAGE, "dump", "env", "--layer", "3") == "imgtool: 'env' has layers 0 to 2"


@pytest.mark.case("C05")
def test_verify(shop: Shell) -> None:
    assert shop.ok("verify").out == "everything is as it should be\n"
    assert shop.ok("verify", "--json").json == []
    target = shop.site.store.resolve("tools").digest
    shop.site.flip(target)
    result = shop("verify", "--json")
    assert result.code == ExitCode.FINDINGS
    assert list(result.json[0]) == ["fault", "message", "blob", "tag", "quarantined", "raw"]
    assert {finding["blob"] for finding in result.json if finding["blob"]} == {str(target)}
    text = shop("verify", "--quarantine")
    assert text.code == ExitCode.FINDINGS
    assert re.search(rf"^corrupt: .*{target}.* \[moved to /.*\]$", text.out, re.MULTILINE)
    assert text.out.endswith(" finding(s)\n")
    assert {finding["fault"] for finding in shop("verify", "--json").json} == {"reference"}


# -- sandboxes, as far as they need no root ---------------------------------------------------------------------------


def test_ps_of_nothing(shell: Shell) -> None:
    assert shell.ok("ps", "--json").json == []
    assert shell.ok("ps").out.split() == [
        "ID", "IMAGE", "MODE", "BACKEND", "STATE", "AGE", "LATE", "WAITED", "PREFETCH", "ROOTFS",
    ]  # fmt: skip


def test_sandboxes_need_root_and_say_so_in_one_line(shop: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for code, *arguments in (
        (ExitCode.PERMISSION, "up", "env"),
        (ExitCode.PERMISSION, "down", "abc"),
        (ExitCode.RUN_FAILED, "run", "env", "--", "true"),
    ):
        assert "needs root" in shop.fails(code, *arguments)


def test_down_wants_names_or_all(shell: Shell) -> None:
    assert "--all" in shell.fails(ExitCode.USAGE, "down")
    assert "--all" in shell.fails(ExitCode.USAGE, "down", "x", "--all")


def test_doctor(shell: Shell) -> None:
    result = shell("doctor", "--json")
    document = result.json
    assert list(document) == ["can_run_sandboxes", "findings"]
    assert result.code == (ExitCode.OK if document["can_run_sandboxes"] else ExitCode.FINDINGS)
    assert {tuple(finding) for finding in document["findings"]} == {("name", "status", "required", "detail", "advice")}
    assert {finding["status"] for finding in document["findings"]} <= {"ok", "degraded", "missing"}
    text = shell("doctor")
    assert text.code == result.code and text.err == ""
    assert text.out.splitlines()[0].split() == ["CHECK", "STATUS", "DETAIL"]


# -- exit codes -------------------------------------------------------------------------------------------------------


def test_each_kind_of_failure_has_its_exit_code(shop: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    site = shop.site
    convert = ("convert", site.tar(file("a")), "--role", "base")
    broken = site.tar(file("a", b"x" * 5000))[4:]
    Path(broken).write_bytes(Path(broken).read_bytes()[:2000])
    layout = site.layout()
    layer = layout.layer(BASE)
    layout.image([layer], tag="it")
    layout.image([layout.layer(BASE, media_type=f"{OCI_LAYER}+gzip+encrypted")], tag="encrypted")
    blob = layout.blob_path(layer.descriptor["digest"])
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    for code, *arguments in (
        (ExitCode.USAGE, "convert", "nonsense", "--role", "base"),
        (ExitCode.USAGE, "convert", "tree:x"),
        (ExitCode.USAGE, "nonsense"),
        (ExitCode.NOT_FOUND, "inspect", "nothing"),
        (ExitCode.MALFORMED, "convert", f"tar:{broken}", "--role", "base"),
        (ExitCode.CORRUPT, "convert", layout.name("it"), "--role", "base"),
        (ExitCode.UNSUPPORTED, "convert", layout.name("encrypted"), "--role", "base"),
        (ExitCode.UNAVAILABLE, "convert", "docker://127.0.0.1:1/a", "--role", "base"),
        (ExitCode.CONFLICT, "convert", site.image([TOOLS]), "--role", "workspace", "--base", "base"),
        (ExitCode.LIMIT, *convert[:1], site.tar(file("a"), file("b")), "--role", "base", "--max-entries", "1"),
    ):
        shop.fails(code, *arguments)
    with failing("fsync", errno.ENOSPC):
        assert "free space" in shop.fails(ExitCode.NO_SPACE, *convert)
    with failing("write", errno.EIO):
        shop.fails(ExitCode.UNAVAILABLE, *convert)
    with failing("write", errno.EACCES):
        shop.fails(ExitCode.PERMISSION, *convert)
    for error, code in (
        (MemoryError(), ExitCode.UNAVAILABLE),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
        (OSError(errno.ENOSPC, "full"), ExitCode.NO_SPACE),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(directory_store, "_is_store", _raising(error))
            shop.fails(code, "ls")


def _raising(error: BaseException) -> Any:
    def fail(*arguments: object, **fields: object) -> None:
        raise error

    return fail


def test_a_fault_of_ours_is_one_line_and_a_traceback_only_if_asked_for(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_module, "survey", _raising(ValueError("two\nlines")))
    arguments = ["convert", shell.site.tar(), "--role", "base"]
    line = shell.fails(ExitCode.INTERNAL, *arguments)
    assert line == r"imgtool: internal error: ValueError: two\x0alines; please report it"
    debug = shell("--debug", *arguments)
    assert debug.code == ExitCode.INTERNAL
    assert "Traceback" in debug.err and debug.err.splitlines()[-1] == line
    assert shell.site.leftovers() == []


# -- the process ------------------------------------------------------------------------------------------------------


def test_the_module_and_the_environment(shop: Shell) -> None:
    ran = imgtool("ls", "--json")
    assert ran.returncode == 0 and ran.stderr == b""
    assert [item["name"] for item in json.loads(ran.stdout)] == ["base", "env", "tools", "work"]
    elsewhere = imgtool("ls", env={"IMGTOOL_STORE": "", "IMGTOOL_ROOT": str(shop.site.path / "nowhere")})
    assert elsewhere.returncode == ExitCode.NOT_FOUND
    assert str(shop.site.path / "nowhere/store").encode() in elsewhere.stderr
    given = imgtool("ls", "--store", shop.site.store.root, env={"IMGTOOL_STORE": "/nowhere"})
    assert given.returncode == 0


def test_a_reader_that_goes_away_is_no_error(shell: Shell) -> None:
    many = shell.site.tar(*(file(f"directory/with/a/long/name/{number:05}") for number in range(5000)))
    shell.ok("convert", many, "--role", "base", "--tag", "many")
    for arguments in (["tree", "many"], ["tree", "many", "--json"], ["dump", "many"]):
        command = [sys.executable, "-m", "imgtool", *arguments]
        with subprocess.Popen(
            command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        ) as child:
            assert child.stdout is not None and child.stderr is not None
            assert child.stdout.read(10)
            child.stdout.close()
            assert child.stderr.read() == b""
        assert child.returncode == 0


@pytest.mark.parametrize("target", ["/dev/full", None])
def test_an_output_that_takes_nothing(shop: Shell, target: str | None) -> None:
    closed = "exec >&-; " if target is None else f"exec >{target}; "
    ran = subprocess.run(
        ["/bin/sh", "-c", closed + '"$@"', "sh", sys.executable, "-m", "imgtool", "ls"],
        cwd=CHECKOUT,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    assert ran.returncode == (ExitCode.OK if target is None else ExitCode.NO_SPACE)
    assert b"Traceback" not in ran.stderr and ran.stderr.count(b"\n") <= 1


@pytest.mark.case("C03")
@pytest.mark.parametrize(
    ("number", "code", "text"),
    [(signal.SIGTERM, 143, b"terminated"), (signal.SIGINT, 130, b"interrupted")],
)
@pytest.mark.parametrize("source", ["file", "pipe"])
def test_a_signal_during_a_conversion_leaves_nothing(
    shop: Shell, number: signal.Signals, code: int, text: bytes, source: str
) -> None:
    """The archive comes slowly, and stops in the middle: whoever waits for it is woken by the signal."""
    site = shop.site
    before = site.snapshot()
    half = tar(*(file(f"f{index}", noise(100_000, index)) for index in range(60)))[:5_000_000]
    path = site.path / "slow.tar"
    os.mkfifo(path)
    arguments = ["convert", f"tar:{path}" if source == "file" else "tar:-", "--role", "base", "--tag", "base"]
    command = [sys.executable, "-m", "imgtool", *arguments]
    with subprocess.Popen(
        command,
        cwd=CHECKOUT,
        stdin=subprocess.PIPE if source == "pipe" else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as child:
        assert child.stderr is not None
        if source == "pipe":
            assert child.stdin is not None
            child.stdin.write(half)  # more than a pipe holds: when this returns, the conversion reads
            child.stdin.flush()
            child.send_signal(number)
            error = child.stderr.read()
            child.stdin.close()
        else:
            with open(path, "wb", buffering=0) as out:
                out.write(half)
                child.send_signal(number)
                error = child.stderr.read()
        child.wait()
    assert child.returncode == code
    assert error == b"imgtool: " + text + b"; nothing was left behind\n"
    assert site.snapshot() == before
    collect(site.store, plan_collection(site.store, grace=0))
    assert site.snapshot() == before


def test_progress_is_drawn_on_a_terminal_alone(shell: Shell) -> None:
    source = shell.site.tar(file("a", noise(2_000_000, 3)))
    arguments = [sys.executable, "-m", "imgtool", "convert", source, "--role", "base", "--json"]
    master, slave = pty.openpty()
    try:
        with subprocess.Popen(
            arguments, cwd=CHECKOUT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=slave
        ) as child:
            os.close(slave)
            drawn = _read_all(master)
            assert child.stdout is not None
            document = json.loads(child.stdout.read())
    finally:
        os.close(master)
    assert child.returncode == 0
    assert document["bytes_data"] == -(-2_000_000 // 4096) * 4096
    assert re.search(rb"unpack|hash|compress|metadata", drawn)
    assert imgtool(*arguments[3:]).stderr == b""


def _read_all(terminal: int) -> bytes:
    parts: list[bytes] = []
    while True:
        try:
            part = os.read(terminal, 65_536)
        except OSError as error:
            assert error.errno == errno.EIO  # Linux: the other end has been closed
            return b"".join(parts)
        if not part:
            return b"".join(parts)
        parts.append(part)


def test_sizes_for_people() -> None:
    shown: Sequence[tuple[int, str]] = [
        (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (4096, "4.1 kB"), (999_499, "999 kB"), (999_500, "1 MB"),
        (12_345_678, "12.3 MB"), (10**15, "1 PB"), (10**19, "1e+04 PB"),
    ]  # fmt: skip
    assert [(count, render.size(count)) for count, _ in shown] == list(shown)


def test_an_image_with_marks_shows_what_a_sandbox_sees(shell: Shell) -> None:
    site = shell.site
    layers = [
        tar(directory("d"), file("d/old", b"o"), hardlink("d/two", "d/old"), file("gone")),
        tar(opaque("d"), file("d/new", b"n"), whiteout("gone")),
    ]
    shell.ok("convert", site.image(layers[:1]), "--role", "base", "--tag", "base")
    shell.ok("convert", site.image(layers), "--role", "workspace", "--base", "base", "--tag", "work")
    shell.ok("compose", "--base", "base", "--workspace", "work", "--tag", "env")
    alone = {entry["path"]: entry for entry in shell.ok("tree", "work", "--json").json}
    assert alone["/gone"]["deleted"] is True and alone["/d"]["opaque"] is True
    lines = shell.ok("tree", "work").out.splitlines()
    assert [line.split("00:00 ")[1] for line in lines if "(" in line] == [
        "/d  (hides what is below)",
        "/gone  (deleted)",
    ]
    assert [entry["path"] for entry in shell.ok("tree", "env", "/d", "--json").json] == ["/d", "/d/new"]
