"""The tree is the design: imports point one way, and facts that stand in two places agree."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.manual import options_of

from imgtool.cli import VERBS
from imgtool.exitcodes import MEANING, ExitCode
from layerstore import errors

TOP = Path(__file__).parents[2]
RANK = {"layerstore": 0, "prefetch": 1, "overlay": 2, "imgtool": 3}
MODULES = sorted(path for package in RANK for path in (TOP / package).rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(TOP)))
def test_imports_point_one_way(path: Path) -> None:
    own = RANK[path.relative_to(TOP).parts[0]]
    upward = {name for name in imports(path) if RANK.get(name.partition(".")[0], -1) > own}
    assert not upward


def test_no_module_of_the_library_imports_the_command_line_library() -> None:
    users = {path.relative_to(TOP).parts[0] for path in MODULES if {"click", "rich"} & imports(path)}
    assert users == {"imgtool"}


def test_every_verb_has_its_help_and_examples() -> None:
    files = {path.stem for path in (TOP / "imgtool/commands").glob("*.py")}
    assert {name for name in files if "_" not in name} == set(VERBS)
    assert {name.partition("_")[0] for name in files - {"__init__"}} == set(VERBS)  # verbs below a verb: plan_train
    for verb, text in VERBS.items():
        command = importlib.import_module(f"imgtool.commands.{verb}").command
        assert command.name == verb
        assert command.short_help == text
        assert "Examples:" in command.epilog
        assert "--json" in options_of(command), f"{verb} has no --json"


def test_every_exit_code_has_one_meaning_and_every_error_a_code() -> None:
    assert set(MEANING) == set(ExitCode)
    assert len({code.value for code in ExitCode}) == len(ExitCode)
    assert len(set(MEANING.values())) == len(MEANING)
    from imgtool.exitcodes import of_error

    direct = errors.ImgtoolError.__subclasses__()
    codes = [of_error(cls("x")) for cls in direct]
    assert len(set(codes)) == len(direct)
    assert ExitCode.INTERNAL not in codes


def test_exit_codes_are_in_the_manual() -> None:
    manual = (TOP / "docs/exit-codes.md").read_text()
    rows = dict(re.findall(r"^\| (\d+) \| (.+) \|$", manual, re.MULTILINE))
    assert rows == {str(int(code)): text for code, text in MEANING.items()}


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from imgtool.cli import run; run(['--help']); "
        "print([m for m in ('rich', 'jsonschema', 'zstandard', 'overlay', 'layerstore.convert') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=TOP).stdout
    assert output.splitlines()[-1] == "[]"


def test_packages_are_all_listed_for_the_build() -> None:
    listed = set(tomllib.loads((TOP / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {".".join(path.parent.relative_to(TOP).parts) for path in MODULES if path.name == "__init__.py"}
    assert listed == found


def test_every_field_case_has_its_test() -> None:
    listed = {line.split()[0] for line in (TOP / "tests/cases.txt").read_text().splitlines() if line[0] != "#"}
    marked = set()
    for path in (TOP / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "case":
                marked |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    assert listed <= marked
