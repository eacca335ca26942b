"""Layers are never unpacked to the host by somebody else's extractor."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
PACKAGES = ("layerstore", "prefetch", "overlay", "imgtool")
EXTRACTORS = frozenset({"extract", "extractall", "unpack_archive", "tar_filter", "data_filter"})


def extractions(source: str) -> list[str]:
    """Names of extracting functions that a module uses or imports."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in EXTRACTORS:
            found.append(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found += [alias.name for alias in node.names if alias.name in EXTRACTORS]
    return found


@pytest.mark.case("T60")
def test_no_module_extracts_archives_with_tarfile_or_shutil() -> None:
    modules = [path for package in PACKAGES for path in (TOP / package).rglob("*.py")]
    assert len(modules) > 20
    offenders = {str(path.relative_to(TOP)): found for path in modules if (found := extractions(path.read_text()))}
    assert offenders == {}


def test_extractions_are_found() -> None:
    assert extractions("import tarfile\ntarfile.open('x').extractall('/')") == ["extractall"]
    assert extractions("from shutil import unpack_archive") == ["unpack_archive"]
