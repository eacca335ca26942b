"""``imgtool trace``: what its commands print, keep, draw and refuse."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.conversions import Site, noise
from support.faults import fsync_for_free
from support.manual import options_of
from support.tars import directory, file, symlink, tar
from support.tools import CHECKOUT

from imgtool.cli import run
from imgtool.commands import trace as trace_command
from imgtool.exitcodes import ExitCode
from layerstore.image import find_target, load_image
from prefetch.plans.format import Plan, PlannedRange, PlanPart, encode_plan, order
from prefetch.trace.exchange.formats import FORMATS, READABLE, WRITABLE
from prefetch.trace.format import Access, Trace, TraceHeader, Wait
from prefetch.trace.places import open_places, traced_layers
from prefetch.trace.traces import Traces

FILES = {"usr/bin/tool": noise(300_000, 1), "usr/lib/a.so": noise(50_000, 2), b"usr/caf\xe9": noise(5000, 3)}
LAYER = tar(
    directory("etc"),
    *(file(name, data) for name, data in FILES.items()),
    symlink("bin", "usr/bin"),
    file("etc/small", b"s"),
)


class Shell:
    """Runs commands in this process."""

    def __init__(self, site: Site, capture: pytest.CaptureFixture[str]) -> None:
        self.site = site
        self.traces = Traces(str(site.path / "root"))
        self._capture = capture

    def __call__(self, *arguments: str, code: int = 0) -> SimpleNamespace:
        self._capture.readouterr()
        assert run(["trace", *arguments]) == code, self._capture.readouterr().err
        out, err = self._capture.readouterr()
        return SimpleNamespace(out=out, err=err)

    def json(self, *arguments: str) -> Any:
        done = self(*arguments, "--json")
        assert done.err == ""
        return json.loads(done.out)

    def fails(self, code: ExitCode, *arguments: str) -> str:
        done = self(*arguments, code=code)
        assert done.out == "" and done.err.startswith("imgtool: ") and done.err.count("\n") == 1
        return str(done.err)

    def file(self, name: str, data: bytes) -> str:
        path = self.site.path / name
        path.write_bytes(data)
        return str(path)


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.setenv("IMGTOOL_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("IMGTOOL_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    with fsync_for_free():
        site = Site(tmp_path)
        site.convert(site.image([LAYER]), tag="it")
        yield Shell(site, capsys)


def recorded(shell: Shell, name: str = "run", *, paths: bool = True) -> Trace:
    """A trace of ``it`` that was recorded."""
    store = shell.site.store
    image = load_image(store, "it")
    header = TraceHeader(
        traced_layers(image),
        "it",
        str(find_target(store, "it").digest),
        "lazy",
        "fanotify",
        ("tool", "-x"),
        "2026-11-30T12:00:00Z",
    )
    accesses = []
    with open_places(store, image) as places:
        for number, path in enumerate((b"usr/bin/tool", b"usr/lib/a.so", b"usr/caf\xe9")):
            found = places.find(path)
            assert found is not None
            for place in places.ranges(found, 0, 20_000):
                shown = (
                    {"path": path.decode("ascii", "backslashreplace"), "file_offset": place.file_offset}
                    if paths
                    else {}
                )
                accesses.append(
                    Access(
                        number * 1500,
                        *place.range,
                        waited=500 * number,
                        times=1 + number,
                        comm="tool",
                        **shown,  # type: ignore[arg-type]
                    )
                )
    trace = Trace(header, tuple(accesses), (Wait(1500, 2000), Wait(3000, 4000)), 1_234_000)
    shell.traces.save(name, trace)
    return trace


# -- ls and rm


def test_ls(shell: Shell) -> None:
    assert shell("ls").out.split() == ["NAME", "STATE", "IMAGE", "MODE", "ORIGIN", "STARTED", "ACCESSES"]
    assert shell.json("ls") == []
    recorded(shell, "b")
    recorded(shell, "a")
    os.rename(f"{shell.traces.directory}/a.jsonl", f"{shell.traces.directory}/a.jsonl.part")
    Path(shell.traces.directory, "z.jsonl").write_text("x\n")
    lines = shell("ls").out.splitlines()
    assert lines[1].split() == ["a", "cut", "off", "it", "lazy", "recorded", "2026-11-30T12:00:00Z", "3"]
    assert lines[2].split()[:3] == ["b", "complete", "it"]
    assert "trace 'z' is not JSON" in lines[3]
    listed = shell.json("ls")
    assert list(listed[0]) == [
        "name", "path", "complete", "recording", "image", "manifest", "mode", "origin", "started", "accesses",
        "bytes_file", "error",
    ]  # fmt: skip
    assert [(item["name"], item["complete"], item["accesses"]) for item in listed] == [
        ("a", False, 3), ("b", True, 3), ("z", True, 0),
    ]  # fmt: skip
    assert listed[2]["error"] and listed[2]["image"] is None


def test_rm(shell: Shell) -> None:
    for name in ("a", "b", "c"):
        recorded(shell, name)
    assert "no trace 'x'" in shell.fails(ExitCode.NOT_FOUND, "rm", "a", "x")
    assert shell.traces.names() == ["a", "b", "c"]
    assert shell("rm", "a").out == "removed a\n"
    assert shell.json("rm", "b", "c", "b") == [{"name": "b"}, {"name": "c"}]
    assert shell.traces.names() == []
    shell.fails(ExitCode.USAGE, "rm", "../x")


# -- show


def test_show(shell: Shell) -> None:
    recorded(shell)
    lines = shell("show", "run").out.splitlines()
    assert lines[0].split() == ["MS", "LAYER", "PATH", "RANGE", "BYTES", "WAITED", "MS", "TIMES", "PROGRAM"]
    assert lines[1].split() == ["0.0", "0", "usr/bin/tool", "0+", "20480", "1", "tool"]
    assert lines[3].split() == ["3.0", "0", "usr/caf\\xe9", "0+", "8192", "1.0", "3", "tool"]
    text = [line.strip() for line in lines[4:]]
    assert text[0].startswith("image  it  sha256:")
    assert text[1:] == [
        "command  tool -x",
        "recorded  lazy fanotify, 2026-11-30T12:00:00Z",
        "accesses  3 of 3 files",
        "bytes  49.2 kB, 13.5% of the image's 365 kB",
        "waited  2 accesses, 0.0015 s all together; somebody waited during 0.0015 s",
        "run  1.23 s, complete",
    ]


def test_show_json(shell: Shell) -> None:
    trace = recorded(shell)
    shown = shell.json("show", "run")
    assert list(shown) == [
        "image", "manifest", "mode", "backend", "command", "started", "origin", "layers", "complete", "seconds",
        "count", "files", "nameless", "bytes", "bytes_image", "share", "waits", "waited", "blocked", "left_out",
        "accesses",
    ]  # fmt: skip
    assert (shown["complete"], shown["seconds"], shown["count"], shown["bytes"]) == (True, 1.234, 3, 49_152)
    assert shown["share"] == pytest.approx(49_152 / shown["bytes_image"], abs=1e-6)
    assert shown["accesses"][2] == {
        "at": 3000, "layer": 0, "device": 1, "offset": trace.accesses[2].offset, "length": 8192, "path": "usr/caf\\xe9",
        "file_offset": 0, "waited": 1000, "times": 3, "comm": "tool",
    }  # fmt: skip
    assert len(shell.json("show", "run", "--limit", "1")["accesses"]) == 1
    assert len(shell.json("show", "run", "--limit", "0")["accesses"]) == 3


def test_show_limits_rows(shell: Shell) -> None:
    trace = recorded(shell, "short")
    many = tuple(trace.accesses[0]._replace(at=n) for n in range(100))
    shell.traces.save("long", dataclasses.replace(trace, accesses=many))
    assert shell("show", "long").out.count("usr/bin/tool") == 40
    assert "100 of 1 files; 60 more with --limit 0" in shell("show", "long").out
    assert shell("show", "long", "--limit", "2").out.count("usr/bin/tool") == 2
    assert shell("show", "long", "--limit", "0").out.count("usr/bin/tool") == 100


def test_show_fills_in_the_paths_that_a_cut_trace_lacks(shell: Shell) -> None:
    trace = dataclasses.replace(recorded(shell, paths=False), ended=None)
    part = shell.file("x.jsonl.part", b"".join(trace.lines()) + b'{"at"')
    text = shell("show", part).out
    assert "? pack 1" in text and "3 without a path (--image fills them in)" in text
    assert "cut off: when it ended isn't known" in text and "1 cut lines" in text
    text = shell("show", part, "--image", "it").out
    assert "usr/bin/tool" in text and "usr/caf\\xe9" in text and "3 of 3 files\n" in text
    assert shell.json("show", "x.jsonl.part", "--image", "it")["nameless"] == 0


def test_show_without_the_image(shell: Shell) -> None:
    recorded(shell)
    shown = shell.json("show", "run", "--store", str(shell.site.path / "nowhere"))
    assert shown["share"] is shown["bytes_image"] is None
    assert "'none'" in shell.fails(ExitCode.NOT_FOUND, "show", "run", "--image", "none")
    shell.site.convert(shell.site.tar(file("other", b"o" * 9999)), tag="other")
    assert "other layers" in shell.fails(ExitCode.CONFLICT, "show", "run", "--image", "other")


def test_what_cannot_be_shown(shell: Shell) -> None:
    assert "no trace 'none'" in shell.fails(ExitCode.NOT_FOUND, "show", "none")
    shell.fails(ExitCode.NOT_FOUND, "show", "./none")
    shell.fails(ExitCode.MALFORMED, "show", shell.file("bad.jsonl", b"x\n"))
    assert "--picture" in shell.fails(ExitCode.USAGE, "show", "run", "--plan", "p")


# -- pictures


def plan_file(shell: Shell, trace: Trace) -> str:
    layer = trace.header.layers[0]
    ranges = (PlannedRange(1, 0, 262_144, 1000, path="usr/bin/tool"), PlannedRange(1, 262_144, 16_384, 9000, 500))
    plan = Plan((PlanPart(layer.metadata, layer.packs, order(ranges)),), name="p")
    return shell.file("plan.json", encode_plan(plan, "plan"))


@pytest.mark.parametrize(
    ("suffix", "magic"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF"), ("SVG", b"<?xml")]
)
def test_show_draws(shell: Shell, suffix: str, magic: bytes) -> None:
    trace = recorded(shell)
    shell("show", "run", "--picture", f"p.{suffix}", "--plan", plan_file(shell, trace))
    data = (shell.site.path / f"p.{suffix}").read_bytes()
    assert data.startswith(magic) and len(data) > 5000
    assert not [name for name in os.listdir(shell.site.path) if name.startswith(".tmp")]
    shell("show", "run", "--picture", f"q.{suffix}", "--plan", plan_file(shell, trace))
    assert (shell.site.path / f"q.{suffix}").read_bytes() == data


def test_a_picture_that_cannot_be_drawn(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(shell)
    assert ".svg, .png, .pdf" in shell.fails(ExitCode.USAGE, "show", "run", "--picture", "p.gif")
    shell.fails(ExitCode.NOT_FOUND, "show", "run", "--picture", "nowhere/p.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'imgtool[plot]'" in shell.fails(ExitCode.USAGE, "show", "run", "--picture", "p.svg")
    assert not (shell.site.path / "p.svg").exists()


# -- import and export


def test_import(shell: Shell) -> None:
    listed = b"/bin/tool\n/usr/lib/\n/etc/small\n/usr\n/nothing\n"
    lines = shell("import", shell.file("list.txt", listed), "--image", "it").out.splitlines()
    assert lines == [
        "list: 2 accesses, 356 kB of 3 files, from paths",
        "  in the image: 4 of 5 entries (80.0%), 100.0% of the bytes; not there: nothing",
        "  1 files lie in the metadata image: nothing to fetch",
        "  1 entries are directories, of which this format asks nothing",
    ]
    trace = shell.traces.load("list")
    assert [access.path for access in trace.accesses] == ["usr/bin/tool", "usr/lib/a.so"]
    assert (trace.header.image, trace.header.origin) == ("it", "paths")
    assert trace.header.manifest == str(find_target(shell.site.store, "it").digest)
    text = shell("show", "list").out
    assert text.splitlines()[0].split()[0] == "NO" and "its times aren't known" in text


def test_import_json_and_names(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"rel\n/usr/lib\n/usr/lib/a.so\n")))
    done = shell.json("import", "-", "--format", "nydus-list", "--image", "it", "--name", "n")
    assert list(done) == [
        "name", "path", "format", "skipped", "entries", "matched", "missing", "missing_sample", "path_rate",
        "byte_rate", "directories", "files", "inline", "excluded", "repeated", "accesses", "bytes", "bytes_wanted",
        "bytes_matched", "unsized",
    ]  # fmt: skip
    assert (done["name"], done["format"], done["path"]) == ("n", "nydus-list", f"{shell.traces.directory}/n.jsonl")
    assert done["skipped"] == {"not an absolute path": 1, "covered by an earlier line": 1}
    assert (done["entries"], done["path_rate"], done["bytes_wanted"]) == (1, 1.0, 50_000)
    assert "--name" in shell.fails(ExitCode.USAGE, "import", "-", "--image", "it")
    bad = shell.file("sp ace", b"/a\n")
    shell.fails(ExitCode.USAGE, "import", bad, "--image", "it")
    assert "none of its 1 entries" in shell.fails(ExitCode.CONFLICT, "import", bad, "--image", "it", "--name", "m")


def test_import_takes_a_prefix_off(shell: Shell) -> None:
    log = b'1 1.5 openat(AT_FDCWD</>, "bin/tool", O_RDONLY) = 3</mnt/x/usr/bin/tool>\n'
    log += b'1 2.5 read(3</mnt/x/usr/bin/tool>, "", 9) = 9\n'
    path = shell.file("run.log", log)
    assert "none of its 1 entries" in shell.fails(ExitCode.CONFLICT, "import", path, "--image", "it")
    assert shell.traces.names() == []
    assert "from strace" in shell("import", path, "--image", "it", "--strip", "/mnt/x").out
    assert shell.traces.load("run").accesses[0].path == "usr/bin/tool"


def test_a_trace_of_another_build_is_imported_by_path(shell: Shell) -> None:
    trace = recorded(shell)
    shell.site.convert(
        shell.site.image([tar(file("aaa", noise(9999, 8)), file("usr/bin/tool", noise(310_000, 9)))]), tag="next"
    )
    done = shell.json("import", f"{shell.traces.directory}/run.jsonl", "--image", "next", "--name", "run-next")
    assert (done["format"], done["entries"], done["matched"]) == ("imgtool", 3, 1)
    [access] = shell.traces.load("run-next").accesses
    assert (access.path, access.file_offset, access.length) == ("usr/bin/tool", 0, 20_480)
    assert access.offset != trace.accesses[0].offset


def test_what_cannot_be_imported(shell: Shell) -> None:
    listed = shell.file("list", b"/usr/lib/a.so\n")
    shell.fails(ExitCode.NOT_FOUND, "import", "./nothing", "--image", "it")
    shell.fails(ExitCode.NOT_FOUND, "import", listed, "--image", "nothing")
    assert "choose of" in shell.fails(ExitCode.USAGE, "import", listed, "--image", "it", "--format", "overlaybd2")
    assert "say which it is" in shell.fails(ExitCode.MALFORMED, "import", shell.file("odd", b"?"), "--image", "it")
    shell.fails(ExitCode.USAGE, "import", listed)
    assert shell.traces.names() == []
    shell("import", listed, "--image", "it")
    assert "already" in shell.fails(ExitCode.CONFLICT, "import", listed, "--image", "it")


@pytest.mark.parametrize("name", WRITABLE)
def test_export_there_and_back(shell: Shell, name: str) -> None:
    recorded(shell)
    out = str(shell.site.path / "out")
    done = shell("export", "run", "--format", name, "-o", out, "--json")
    document = json.loads(done.out)
    assert list(document) == ["path", "format", "entries", "bytes_file", "skipped", "skipped_sample"]
    assert (document["path"], document["bytes_file"]) == (out, os.path.getsize(out))
    raw = name in ("ranges", "cvmfs-spec", "paths")
    assert document["entries"] == 2 + raw
    assert bool(done.err) is not raw
    if not raw:
        assert document["skipped_sample"] == ["usr/caf\\xe9"] and "left out" in done.err
    back = shell.json("import", out, "--format", name, "--image", "it")
    assert (back["path_rate"], back["byte_rate"], back["matched"]) == (1.0, 1.0, 2 + raw)
    whole = 303_104 + 53_248
    assert back["bytes"] == {"nydus-optimize": 40_960, "ranges": 49_152}.get(name, whole + (8192 if raw else 0))


def test_export_to_standard_output(shell: Shell) -> None:
    recorded(shell)
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    ran = subprocess.run(
        [sys.executable, "-m", "imgtool", "trace", "export", "run", "--format", "paths"],
        env=environment,
        capture_output=True,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"/usr/bin/tool\n/usr/lib/a.so\n/usr/caf\xe9\n", b"")
    assert "--output" in shell.fails(ExitCode.USAGE, "export", "run", "--format", "paths", "--json")
    assert "choose of" in shell.fails(ExitCode.USAGE, "export", "run", "--format", "strace")


def test_export_of_a_plan(shell: Shell) -> None:
    path = plan_file(shell, recorded(shell))
    for given in (path, "plan.json"):
        done = json.loads(shell("export", given, "--format", "ranges", "-o", "r.csv", "--json").out)
        assert done["skipped"] == {"without a path": 1}
        assert (shell.site.path / "r.csv").read_text() == "path,offset,length\n/usr/bin/tool,0,262144\n"


def test_export_of_a_cut_trace_needs_the_image(shell: Shell) -> None:
    part = shell.file("x.jsonl.part", b"".join(recorded(shell, paths=False).lines()))
    done = shell("export", part, "--format", "nydus-list", "-o", "a")
    assert "3 without a path" in done.err and (shell.site.path / "a").read_bytes() == b""
    shell("export", part, "--format", "nydus-list", "-o", "a", "--image", "it")
    assert (shell.site.path / "a").read_bytes() == b"/usr/bin/tool\n/usr/lib/a.so\n"


def test_the_help_lists_the_formats() -> None:
    commands = trace_command.command.commands
    for command, names in ((commands["import"], READABLE), (commands["export"], WRITABLE)):
        assert all(name in (command.help or "") for name in names), command.name
        assert not [name for name in FORMATS if name not in names and f" {name}," in (command.help or "")]


def test_every_command_has_help_and_examples_that_parse() -> None:
    commands = trace_command.command.commands
    assert set(commands) == {"start", "stop", "ls", "show", "import", "export", "rm"}
    for name, command in commands.items():
        assert command.short_help and command.help
        assert "--json" in options_of(command), name
        assert "--root" in options_of(command), name
