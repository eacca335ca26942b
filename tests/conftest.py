"""Puts ``tests/`` on the path, so that test modules can share ``support``, and adds the suite's own options."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--crash-rounds", type=int, default=200, help="rounds of the store's kill -9 test")
    parser.addoption("--node-rounds", type=int, default=36, help="rounds of each test in which the node's parts fail")
