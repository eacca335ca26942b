"""The run directory: where it is, and whose it has to be."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from imgtool import environment
from layerstore.errors import NotFoundError, PermissionError_
from overlay.service import place
from overlay.service.place import SOCKET, connect, listen, make_run_directory, run_directory, socket_path


def mode(path: Path | str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_the_usual_root_has_the_usual_place(tmp_path: Path) -> None:
    assert place.DEFAULT_ROOT == environment.DEFAULT_ROOT
    assert run_directory(place.DEFAULT_ROOT) == "/run/imgtool"
    assert socket_path("/var/lib/../lib/imgtool/") == "/run/imgtool/node.sock"


def test_every_other_root_has_one_of_its_own_by_whatever_name_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to("root")
    digest = hashlib.sha256(os.fsencode(tmp_path / "root")).hexdigest()[:16]
    for name in ("root", "link", "./link/../link/"):
        assert run_directory(f"{tmp_path}/{name}") == f"/run/imgtool/{digest}"
    assert run_directory(f"{tmp_path}/\udcff") != run_directory(f"{tmp_path}/\udcfe")


def test_it_is_made_for_its_owner_alone_and_made_so_again(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    old = os.umask(0)
    try:
        directory = make_run_directory(str(tmp_path), run=run)
    finally:
        os.umask(old)
    assert directory.startswith(run + "/")
    assert mode(run) == mode(directory) == 0o700
    os.chmod(run, 0o777)
    os.chmod(directory, 0o755)
    assert make_run_directory(str(tmp_path), run=run) == directory
    assert mode(run) == mode(directory) == 0o700


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("kind", ["symlink", "dangling", "file", "fifo"])
def test_what_is_no_directory_is_refused(kind: str, inner: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    path = run
    if inner:
        run.mkdir()
        path = Path(run_directory(str(tmp_path), run=str(run)))
    (tmp_path / "target").mkdir(mode=0o755)
    match kind:
        case "symlink":
            path.symlink_to(tmp_path / "target")
        case "dangling":
            path.symlink_to(tmp_path / "nothing")
        case "file":
            path.write_text("x")
        case "fifo":
            os.mkfifo(path)
    with pytest.raises(PermissionError_, match="is no directory"):
        make_run_directory(str(tmp_path), run=str(run))
    assert mode(tmp_path / "target") == 0o755
    assert not os.listdir(tmp_path / "target")


def test_a_place_that_cant_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotFoundError, match="run directory"):
        make_run_directory(str(tmp_path), run=str(tmp_path / "file" / "run"))


def test_the_socket_is_for_its_owner_and_replaces_a_dead_one(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        listen(str(tmp_path)).close()
        with listen(str(tmp_path)) as listening:
            assert mode(tmp_path / SOCKET) == 0o600
            assert not os.get_inheritable(listening.fileno())
            with connect(str(tmp_path / SOCKET), 5) as client:
                other, _ = listening.accept()
                with other:
                    client.sendall(b"x")
                    assert other.recv(1) == b"x"
    finally:
        os.umask(old)


def test_paths_may_be_longer_than_an_address(tmp_path: Path) -> None:
    directory = tmp_path / ("x" * 200) / ("y" * 200)
    directory.mkdir(parents=True)
    before = len(os.listdir("/proc/self/fd"))
    with listen(str(directory)) as listening:
        assert stat.S_ISSOCK(os.lstat(directory / SOCKET).st_mode)
        with connect(str(directory / SOCKET), 5):
            listening.accept()[0].close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_nobody_there_is_told_from_nobody_listening(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        connect(str(tmp_path / SOCKET), 5)
    listen(str(tmp_path)).close()
    with pytest.raises(ConnectionRefusedError):
        connect(str(tmp_path / SOCKET), 5)


def test_a_full_backlog_is_waited_for(tmp_path: Path) -> None:
    path = str(tmp_path / SOCKET)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(0)
        with connect(path, 5):  # the one that waits
            with pytest.raises(TimeoutError):
                connect(path, 1)
            accepted: list[socket.socket] = []
            timer = threading.Timer(0.1, lambda: accepted.append(listening.accept()[0]))
            timer.start()
            connect(path, 20).close()
            timer.join()
            accepted[0].close()
