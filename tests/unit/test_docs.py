"""The manual: its examples run in order against a small store, and everything that exists is in it."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from support.conversions import noise
from support.layouts import Layout, Saved, compress, docker_archive
from support.manual import MANUAL, Example, examples, fits, options_of
from support.tars import directory, file, hardlink, symlink, tar, whiteout
from support.tools import CHECKOUT

from imgtool.cli import VERBS, run
from layerstore.store.verification import Fault

TEXT = MANUAL.read_text()


def make_sources(top: Path) -> None:
    """What the examples of the manual convert."""
    base = tar(
        directory("etc"),
        file("etc/os-release", b'NAME="Debian GNU/Linux"\n'),
        file("etc/motd", b"welcome\n"),
        directory("usr/lib"),
        file("usr/lib/libc.so.6", noise(204_800, 1), mode=0o755),
        file("usr/lib/libm.so.6", noise(102_400, 2), mode=0o755),
        symlink("lib", "usr/lib"),
    )
    config = {"config": {"Env": ["PATH=/usr/bin:/bin"], "Cmd": ["/bin/sh"]}}
    debian = Layout(top / "debian")
    debian.image([base], tag="full", config=config)
    work = tar(
        directory("src"),
        file("src/a.py", b"print('hello')\n"),
        hardlink("src/libc", "usr/lib/libc.so.6"),
        whiteout("etc/motd"),
    )
    run = {"config": {"Env": ["PATH=/src/bin:/usr/bin:/bin"], "Cmd": ["pytest", "-q"], "WorkingDir": "/src"}}
    for name, layers in (
        ("repo", [base, work]),
        ("repo2", [base, work, tar(file("src/a.py", b"print('bye')\n"), file("src/b.py", b""))]),
        ("stranger", [tar(file("etc/os-release", b'NAME="Alpine Linux"\n'), file("src/a.py", b"print('hello')\n"))]),
    ):
        layout = Layout(top / f"{name}-layout")
        layout.image(layers, tag="latest", config=run)
        layout.archive(top / f"{name}.tar")
    docker_archive(top / "saved.tar", [Saved([base], tags=["debian:12"])])
    (top / "layer.tar.gz").write_bytes(compress(base, "gzip"))
    tools = top / "tools" / "opt" / "evaluator"
    tools.mkdir(parents=True)
    (tools / "evaluate").write_text("#!/bin/sh\nexec pytest\n")
    (tools / "evaluate").chmod(0o755)
    for path in [tools / "evaluate", tools, tools.parent, tools.parent.parent]:
        os.utime(path, (1_700_000_000, 1_700_000_000))
    os.truncate(_made(top / "odd.tar", tar(file("a", b"x" * 5000))), 2000)


def _made(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def shell(example: Example, top: Path) -> subprocess.CompletedProcess[str]:
    programs = top / "bin"
    if not programs.exists():
        programs.mkdir()
        (programs / "imgtool").write_text(
            f'#!/bin/sh\nPYTHONPATH="{CHECKOUT}" exec "{sys.executable}" -m imgtool "$@"\n'
        )
        (programs / "imgtool").chmod(0o755)
    return subprocess.run(
        ["/bin/sh", "-c", example.command],
        cwd=top,
        env={
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "IMGTOOL_STORE": str(top / "store"),
            "IMGTOOL_ROOT": str(top / "root"),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_examples_do_what_the_manual_says(tmp_path: Path) -> None:
    make_sources(tmp_path)
    count = 0
    for example in examples(root=False):
        ran = shell(example, tmp_path)
        where = f"{MANUAL.name}:{example.line}: $ {example.command}\n{ran.stdout}"
        assert ran.returncode == example.code, where
        assert fits(example.output, ran.stdout), f"{where}--- but the manual shows:\n{example.output}"
        count += 1
    assert count > 25


def test_the_examples_that_need_root_use_options_that_exist() -> None:
    found = list(examples(root=True))
    assert len(found) >= 5
    for example in found:
        for verb, rest in re.findall(r"imgtool ([a-z]+)([^|;&]*)", example.command):
            known = set(options_of(_command(verb)))
            own = rest.split(" -- ")[0]
            assert set(re.findall(r"(?<!\S)--[a-z-]+", own)) <= known, f"{MANUAL.name}:{example.line}"


def _command(verb: str) -> click.Command:
    command: click.Command = importlib.import_module(f"imgtool.commands.{verb}").command
    return command


def _section(verb: str) -> str:
    found = re.search(rf"^### imgtool {verb}\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, f"the manual has no section for {verb}"
    return found[1]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_and_option_is_in_the_manual(verb: str) -> None:
    section = _section(verb)
    common = {"--json", "--store", "--root", "--jobs"}
    own = [option for option in options_of(_command(verb)) if option.startswith("--") and option not in common]
    assert [option for option in own if not re.search(rf"(?<![\w-]){option}(?![\w-])", section)] == []
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"```.*?```", "", section, flags=re.DOTALL)))
    elsewhere = {option for other in VERBS for option in options_of(_command(other))}
    assert mentioned <= elsewhere, "options that no verb has"


def test_the_manual_has_the_verbs_in_the_order_of_the_help() -> None:
    assert re.findall(r"^### imgtool (\w+)$", TEXT, re.MULTILINE) == list(VERBS)


def test_links_between_documents_lead_somewhere() -> None:
    for document in [*sorted((CHECKOUT / "docs").glob("*.md")), CHECKOUT / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def keys_of(section: str) -> list[str]:
    """The first column of the section's tables of JSON keys."""
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    return [key for row in rows for key in re.findall(r"`([a-z0-9_.\[\]]+)`", row)]


def test_json_keys_are_those_that_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_sources(tmp_path)
    store = str(tmp_path / "store")

    def printed(*arguments: str) -> Any:
        capsys.readouterr()
        assert run([*arguments, "--json"]) in (0, 12)
        return json.loads(capsys.readouterr().out)

    there = ("--store", store)
    converted = printed("convert", f"oci:{tmp_path}/debian:full", "--role", "base", "--tag", "b", *there)
    printed("convert", f"tree:{tmp_path}/tools", "--role", "toolkit", "--tag", "t", *there)
    composed = printed("compose", "--base", "b", "--toolkit", "t", "--tag", "s", *there)
    os.truncate(tmp_path / "store/blobs/sha256" / printed("inspect", "t", *there)["manifest"][7:], 5)
    documents: dict[str, Any] = {
        "convert": converted,
        "compose": composed,
        "ls": printed("ls", *there)[0],
        "inspect": printed("inspect", "s", *there),
        "tree": printed("tree", "s", "/etc/motd", *there)[0],
        "cat": printed("cat", "s", "/etc/motd", *there),
        "diff": printed("diff", "b", "s", *there)[0],
        "dump": printed("dump", "s", *there),
        "tag": printed("tag", "b", "x", *there),
        "copy": printed("copy", "b", store, str(tmp_path / "other")),
        "raw": printed("raw", "b", *there)[0],
        "rm": printed("rm", "x", *there)[0],
        "verify": printed("verify", *there)[0],
        "gc": printed("gc", "--dry-run", "--store", str(tmp_path / "other")),
        "doctor": printed("doctor"),
    }
    documents["gc"]["spared_blobs"] = 0  # only where something is deleted
    documents["tree"] |= dict.fromkeys(("target", "device", "xattrs", "deleted", "opaque"))  # of inodes that have them
    for verb, document in documents.items():
        keys = [key for key in keys_of(_section(verb)) if "." not in key and "[" not in key]
        assert set(keys) == set(document), verb


def test_every_finding_of_doctor_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) in (0, 12)
    findings = json.loads(capsys.readouterr().out)["findings"]
    text = (MANUAL.parent / "operations.md").read_text().partition("\n## doctor\n")[2]
    explained = dict(re.findall(r"^\| ([^|]+) \| (yes|no) \|", text, re.MULTILINE))
    assert explained == {finding["name"]: "yes" if finding["required"] else "no" for finding in findings}


def test_every_fault_of_verify_is_explained() -> None:
    text = (MANUAL.parent / "operations.md").read_text()
    explained = re.findall(r"^\| (\w+) \|", text.partition("| fault |")[2].partition("\n\n")[0], re.MULTILINE)
    assert set(explained) == {str(fault) for fault in Fault}
