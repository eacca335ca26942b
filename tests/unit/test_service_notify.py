"""The service manager: a real datagram socket in its place, and descriptors that it hands back."""

from __future__ import annotations

import array
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tools import CHECKOUT

from layerstore.errors import UsageError
from overlay.service.notify import MAX_OF_NAME, ServiceManager, stored


class Manager:
    """The receiving end, as systemd: messages, and the store that they amount to."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.socket.bind(address)
        self.socket.settimeout(10)
        self.held: list[tuple[str, int]] = []

    def receive(self) -> dict[str, str]:
        data, ancillary, _, _ = self.socket.recvmsg(4096, 4096)
        fields = dict(line.split("=", 1) for line in data.decode().split("\n"))
        fds = array.array("i")
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content)
            else:
                assert kind == socket.SCM_CREDENTIALS
        if "FDSTORE" in fields:
            self.held[:0] = [(fields["FDNAME"], fd) for fd in fds]  # systemd's list grows at its head
        elif "FDSTOREREMOVE" in fields:
            for name, fd in self.held[:]:
                if name == fields["FDNAME"]:
                    os.close(fd)
                    self.held.remove((name, fd))
        else:
            assert not fds
        return fields

    def close(self) -> None:
        self.socket.close()
        for _, fd in self.held:
            os.close(fd)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(str(tmp_path / "notify"))
    yield made
    made.close()


@pytest.fixture
def service(manager: Manager, tmp_path: Path) -> ServiceManager:
    return ServiceManager(str(tmp_path / "notify"))


def test_states_are_told(manager: Manager, service: ServiceManager) -> None:
    assert service.tell(READY="1", STATUS="50 sandboxes\nREADY=0", MAINPID=str(os.getpid()))
    assert manager.receive() == {"READY": "1", "STATUS": "50 sandboxes READY=0", "MAINPID": str(os.getpid())}
    assert service.tell(STOPPING="1")
    assert manager.receive() == {"STOPPING": "1"}


def test_an_abstract_socket_will_do() -> None:
    name = f"imgtool-test-{secrets.token_hex(8)}"
    manager = Manager("\0" + name)
    try:
        assert ServiceManager("@" + name).tell(READY="1")
        assert manager.receive() == {"READY": "1"}
    finally:
        manager.close()


def test_descriptors_are_stored_one_by_one_and_removed_by_name(manager: Manager, service: ServiceManager) -> None:
    fds = [os.memfd_create(name) for name in ("group", "journal")]
    try:
        assert service.store("group", fds)
        assert manager.receive() == {"FDSTORE": "1", "FDNAME": "group.0", "FDPOLL": "0"}
        assert manager.receive() == {"FDSTORE": "1", "FDNAME": "group.1", "FDPOLL": "0"}
        assert service.store("a" * 64, fds[:1])
        manager.receive()
        assert len(manager.held) == 3
        for name, fd in manager.held:
            assert os.path.sameopenfile(fd, fds[1 if name == "group.1" else 0])
        assert service.remove("group")
        for number in range(MAX_OF_NAME):
            assert manager.receive() == {"FDSTOREREMOVE": "1", "FDNAME": f"group.{number}"}
        assert [name for name, _ in manager.held] == ["a" * 64 + ".0"]
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize("name", ["", "a:b", "a\nb", "a.b", "é", "x" * 201])
def test_names_that_would_come_back_as_others_are_a_fault_of_ours(name: str, service: ServiceManager) -> None:
    with pytest.raises(ValueError, match="can't be stored"):
        service.store(name, [0])


def test_a_manager_that_has_gone_is_no_reason_to_fail(tmp_path: Path) -> None:
    nobody = ServiceManager(str(tmp_path / "nobody"))
    before = len(os.listdir("/proc/self/fd"))
    assert not nobody.tell(READY="1")
    assert not nobody.store("group", [0])
    assert not nobody.remove("group")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("address", ["", "@", "/", "relative", "vsock:2:1234"])
def test_an_address_of_another_kind_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="NOTIFY_SOCKET"):
        ServiceManager(address)


SCRIPT = """
import fcntl, json, os, sys
from layerstore.errors import UsageError
from overlay.service.notify import stored
pid, count, names = sys.argv[1:4]
try:
    found = stored(str(os.getpid()) if pid == "own" else pid or None, count or None, names or None)
except UsageError as error:
    print(json.dumps(str(error)))
else:
    print(json.dumps([[name, os.pread(fd, 10, 0).decode(), fcntl.fcntl(fd, fcntl.F_GETFD)] for name, fd in found]))
"""


def handed_over(contents: list[str], pid: str, count: str, names: str) -> Any:
    """What a process finds that is started with so many descriptors from 3 on."""
    files = [os.memfd_create(content, 0) for content in contents]
    try:
        for file, content in zip(files, contents, strict=True):
            os.write(file, content.encode())

        def place() -> None:
            high = [os.dup2(file, 200 + number) for number, file in enumerate(files)]
            for number, file in enumerate(high):
                os.dup2(file, 3 + number)

        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT, pid, count, names],
            capture_output=True,
            text=True,
            check=True,
            cwd=CHECKOUT,
            preexec_fn=place,
            pass_fds=tuple(range(3, 3 + len(files))),
        )
        return json.loads(ran.stdout)
    finally:
        for file in files:
            os.close(file)


def test_what_was_stored_comes_back_by_name_in_the_order_of_storing() -> None:
    pack = "b" * 64
    names = f"{pack}.1:group.1:{pack}.0:group.0:other:with.dots.5"
    contents = ["frames", "journal", "data", "group", "socket", "x"]
    assert handed_over(contents, "own", "6", names) == [
        [pack, "data", 1],
        [pack, "frames", 1],
        ["group", "group", 1],
        ["group", "journal", 1],
        ["other", "socket", 1],
        ["with.dots.5", "x", 1],
    ]
    assert handed_over(["a", "b"], "own", "2", "") == [["unknown", "a", 1], ["unknown", "b", 1]]


@pytest.mark.parametrize(("pid", "count"), [("", "2"), ("1", "2"), ("own", ""), ("own", "0")])
def test_what_is_meant_for_another_process_is_not_ours(pid: str, count: str) -> None:
    assert handed_over(["a", "b"], pid, count, "a:b" if count == "2" else "") == []


@pytest.mark.parametrize(
    ("count", "names", "message"),
    [
        ("two", "a:b", "LISTEN_FDS is 'two'"),
        ("-1", "a", "LISTEN_FDS is '-1'"),
        ("9" * 50, "", "LISTEN_FDS"),
        ("1048576", "", "LISTEN_FDS"),
        ("2", "a", "1 names for 2 descriptors"),
        ("3", "a:b:c", "descriptor 5 (c), which isn't open"),
    ],
)
def test_what_contradicts_itself_is_refused(count: str, names: str, message: str) -> None:
    assert message in handed_over(["a", "b"], "own", count, names)


def test_nothing_was_stored() -> None:
    assert stored(None, None, None) == ()
