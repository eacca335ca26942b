"""What others make of our service: systemd of its unit, curl of its API."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support.service import FakeService, running
from support.tools import CHECKOUT, need_tool

from overlay.service import place

UNIT = CHECKOUT / "packaging" / "imgtool-node.service"

pytestmark = pytest.mark.compat


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    analyze = need_tool("systemd-analyze")
    text = UNIT.read_text()
    copy = tmp_path / UNIT.name
    copy.write_text(re.sub(r"^(Exec\w+=-?)imgtool ", r"\1/bin/true ", text, flags=re.MULTILINE))
    assert copy.read_text().count("/bin/true") == 2
    ran = subprocess.run([analyze, "verify", "--man=no", copy], capture_output=True, text=True)
    # Its one complaint is about what systemd before 254 doesn't know, as the unit says.
    complaints = [
        line for line in ran.stderr.splitlines() if UNIT.name in line and "FileDescriptorStorePreserve" not in line
    ]
    assert (ran.returncode, complaints) == (0, [])
    copy.write_text(copy.read_text().replace("KillMode=process", "KillMode=children"))
    again = subprocess.run([analyze, "verify", "--man=no", copy], capture_output=True, text=True)
    assert "kill mode" in again.stderr, "it complains of what is wrong"


def test_curl_understands_the_service(tmp_path: Path) -> None:
    need_tool("curl", "7.82")
    manual = (CHECKOUT / "docs" / "api.md").read_text()
    [block] = re.findall(r"^```console\n(.*?)^```$", manual, re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line) for line in block.splitlines()]
    with place.listen(str(tmp_path)) as listening, running(FakeService(), listening):
        for command in commands:
            here = [word.replace("/run/imgtool/", f"{tmp_path}/") for word in command]
            assert here != command
            ran = subprocess.run([*here, "-sSf"], capture_output=True, text=True)
            assert ran.returncode == 0, ran.stderr
            assert {"sandboxes"} <= set(json.loads(ran.stdout))
    assert len(commands) == 2
