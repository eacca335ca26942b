"""Puts ``tests/`` on the path, where the modules share ``support``; adds options, and servers for the session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.servers import S3Server

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--crash-rounds", type=int, default=200, help="rounds of the store's kill -9 test")
    parser.addoption("--node-rounds", type=int, default=36, help="rounds of each test in which the node's parts fail")


@pytest.fixture(scope="session", autouse=True)
def nobody_is_logged_in() -> Iterator[None]:
    """Whoever runs the tests may have credentials for registries; no test is to use them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_CONFIG", "/nonexistent")
        yield


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    from support.servers import moto_server

    with moto_server(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    from support.servers import seaweedfs_server

    with seaweedfs_server(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server
