"""The service is root's alone, whoever else gets hold of its socket or comes before it."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

import pytest
from support.service import FakeService, running
from support.tools import need_root

from layerstore.errors import PermissionError_
from overlay.service import place
from overlay.service.place import make_run_directory, run_directory

pytestmark = pytest.mark.privileged

NOBODY = 65534


def answer_to(user: int, address: str) -> str:
    """What a process of ``user`` gets that asks for the status at ``address``."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(address)
                connection.sendall(b"GET /v1/status HTTP/1.1\r\n\r\n")
                os.write(writing, connection.recv(4096))
        except OSError as error:
            os.write(writing, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        os.waitpid(child, 0)
        return os.read(reading, 4096).decode()
    finally:
        os.close(reading)


@pytest.fixture(autouse=True)
def as_root() -> None:
    need_root()


def test_another_user_gets_nothing_but_a_refusal() -> None:
    name = f"imgtool-test-{secrets.token_hex(8)}"
    service = FakeService()
    with socket.socket(socket.AF_UNIX) as listening:  # abstract: no file mode keeps anybody out
        listening.bind("\0" + name)
        listening.listen()
        with running(service, listening):
            refused = answer_to(NOBODY, "\0" + name)
            assert refused.startswith("HTTP/1.1 403 Forbidden\r\n")
            assert '"permission"' in refused
            assert service.calls == []
            assert answer_to(0, "\0" + name).startswith("HTTP/1.1 200 OK\r\n")


def test_another_user_cant_connect(tmp_path: Path) -> None:
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    with place.listen(str(tmp_path)) as listening, running(FakeService(), listening):
        assert answer_to(0, str(tmp_path / place.SOCKET)).startswith("HTTP/1.1 200")
        assert answer_to(NOBODY, str(tmp_path / place.SOCKET)) == "PermissionError"


@pytest.mark.parametrize("inner", [False, True])
def test_a_run_directory_of_another_user_is_refused(inner: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    directory = Path(run_directory(str(tmp_path), run=str(run)))
    directory.mkdir(mode=0o700)
    os.chown(directory if inner else run, NOBODY, NOBODY)
    with pytest.raises(PermissionError_, match="belongs to user 65534"):
        make_run_directory(str(tmp_path), run=str(run))
