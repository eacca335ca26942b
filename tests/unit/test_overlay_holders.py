from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from overlay import runs
from overlay.holders import holders_of


def test_a_process_with_its_directory_there_is_found(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"], cwd=tmp_path) as process:
        try:
            found = [holder for holder in holders_of(os.stat(tmp_path).st_dev) if holder.pid == process.pid]
        finally:
            process.kill()
    assert [holder.how for holder in found] == ["cwd"]
    assert str(found[0]).endswith(f"(pid {process.pid}, cwd)")


def test_nobody_holds_what_does_not_exist() -> None:
    assert holders_of(0xFFFF_FFFF) == []


def test_a_run_whose_pid_belongs_to_another_is_not_killed(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            start = runs.start_time(process.pid)
            assert start > 0
            runs.register(str(tmp_path), runs.Run("old", pid=process.pid, start=start - 1))
            assert runs.stop_all(str(tmp_path)) == ["old"]
            assert process.poll() is None
            runs.register(str(tmp_path), runs.Run("this", pid=process.pid, start=start))
            assert runs.stop_all(str(tmp_path)) == ["this"]
            assert process.wait() == -9
        finally:
            process.kill()
    assert os.listdir(tmp_path / runs.DIRECTORY) == []


def test_runs_that_have_ended_or_are_damaged_are_passed_over(tmp_path: Path) -> None:
    assert runs.stop_all(str(tmp_path)) == []
    ended = subprocess.Popen(["true"])
    ended.wait()
    runs.register(str(tmp_path), runs.Run("ended", pid=ended.pid, start=1))
    (tmp_path / runs.DIRECTORY / "damaged").write_text("{")
    assert runs.stop_all(str(tmp_path)) == ["ended"]


def test_start_time_of_no_process() -> None:
    assert runs.start_time(2**22 + 1) == 0


@pytest.mark.parametrize("name", ["sleep", "a) b (c"])
def test_start_time_ignores_what_a_command_is_called(tmp_path: Path, name: str) -> None:
    program = tmp_path / name
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "600"]) as process:
        try:
            assert runs.start_time(process.pid) >= runs.start_time(os.getpid()) > 0
        finally:
            process.kill()
