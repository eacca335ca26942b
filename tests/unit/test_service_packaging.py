"""The systemd unit: what protects readers in it stays in it."""

from __future__ import annotations

import re
from collections import defaultdict

from support.tools import CHECKOUT

from overlay.service import place

TEXT = (CHECKOUT / "packaging" / "imgtool-node.service").read_text()


def settings() -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for line in TEXT.splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            section = found[match[1]] = defaultdict(list)
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            section[key].append(value)
    return found


def test_nothing_ends_all_holders_of_the_group_at_once() -> None:
    service = settings()["Service"]
    assert service["KillMode"] == ["process"]
    assert service["SendSIGKILL"] == ["no"]
    assert service["OOMPolicy"] == ["continue"]
    assert service["ManagedOOMPreference"] == ["omit"]
    assert service["FileDescriptorStorePreserve"] == ["yes"]
    assert int(service["FileDescriptorStoreMax"][0]) > 1000
    assert int(service["OOMScoreAdjust"][0]) == -900
    assert not {key for key in service if key.startswith("Watchdog")}


def test_what_it_mounts_is_seen_by_the_host() -> None:
    own_namespace = re.compile(
        "Private(Mounts|Tmp|Devices|Users)|Protect.*|.*Paths|BindPaths|.*Directories|TemporaryFileSystem|MountFlags|"
        "RootDirectory|RootImage|DynamicUser|MountAPIVFS"
    )
    assert [key for key in settings()["Service"] if own_namespace.fullmatch(key)] == []


def test_it_notifies_and_is_stopped_orderly() -> None:
    service = settings()["Service"]
    assert service["Type"] == ["notify"]
    assert service["NotifyAccess"] == ["all"]
    assert service["ExecStart"] == ["imgtool node run"]
    assert service["ExecStop"] == ["-imgtool node stop"]
    assert (service["Restart"], service["RestartPreventExitStatus"]) == (["always"], ["0"])
    assert f"/run/{service['RuntimeDirectory'][0]}" == place.RUN
    assert service["RuntimeDirectoryMode"] == ["0700"]
    assert service["RuntimeDirectoryPreserve"] == ["yes"]


def test_every_key_is_said_once() -> None:
    for section in settings().values():
        assert [key for key, values in section.items() if len(values) != 1] == []
