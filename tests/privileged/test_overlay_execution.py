"""Commands run in sandboxes by runc, by crun and in a chroot: the same outcome from each."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import sandboxes
from support.sandboxes import directory, file, shell_layer, symlink
from support.tools import need_tool

from layerstore.errors import ConflictError, NotFoundError, UnavailableError, UsageError
from layerstore.oci.config import RunConfig
from overlay import mountinfo
from overlay.bundle import write_bundle
from overlay.execution import CHROOT, find_runtime, run
from overlay.layers import MountableLayer
from overlay.mountapi import MNT_DETACH, umount
from overlay.sandbox import Sandbox, Sandboxes

pytestmark = [pytest.mark.privileged, pytest.mark.usefixtures("mounts_unchanged")]
mounts_unchanged = sandboxes.mounts_unchanged

RUNTIMES = ("runc", "crun", CHROOT)


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> MountableLayer:
    """The shell and a few programs; its /etc/passwd is an absolute link, as on NixOS."""
    return shell_layer(
        tmp_path_factory.mktemp("images"),
        {
            b"etc/passwd": symlink(b"/nix/passwd"),
            b"nix/passwd": b"root:x:0:0::/root:/bin/sh\napp:x:1000:1001::/home/app:/bin/sh\n",
            b"home/app": directory(0o755, uid=1000),
            b"not-executable": file(b"#!/bin/sh\n", 0o644),
        },
    )


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Sandboxes]:
    made = sandboxes.node_root(tmp_path)
    yield Sandboxes(made)
    left = list(mountinfo.below(made, mountinfo.read()))
    for mounted in left:
        umount(mounted.target, MNT_DETACH)
    assert left == []


@pytest.fixture
def sandbox(node: Sandboxes, layer: MountableLayer) -> Iterator[Sandbox]:
    made = node.create([layer], image={}, mode="eager", id="box")
    yield made
    assert node.remove("box").holders == ()
    assert os.listdir(f"{node.root}/sandboxes") == []


@pytest.fixture(scope="session")
def crun(tmp_path_factory: pytest.TempPathFactory) -> str:
    """crun, which refuses to work where cgroup v1 and v2 share controllers: there it is shown the v1 part alone."""
    program = need_tool("crun")
    controllers = Path("/sys/fs/cgroup/unified/cgroup.controllers")
    if not controllers.exists() or not controllers.read_text().strip():
        return program
    wrapper = tmp_path_factory.mktemp("bin") / "crun"
    hide = f'umount /sys/fs/cgroup/unified && exec {program} "$@"'
    wrapper.write_text(f"#!/bin/sh\nexec unshare -m sh -c '{hide}' crun \"$@\"\n")
    wrapper.chmod(0o755)
    return str(wrapper)


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest, crun: str) -> str:
    return {"runc": need_tool("runc"), "crun": crun, CHROOT: CHROOT}[request.param]


@pytest.fixture(params=["runc", "crun"])
def oci_runtime(request: pytest.FixtureRequest, crun: str) -> str:
    return need_tool("runc") if request.param == "runc" else crun


def shell(sandbox: Sandbox, runtime: str, script: str, config: RunConfig | None = None) -> tuple[int, str]:
    """Run a script with its output caught; the exit code, and what it printed."""
    output = Path(sandbox.directory).parents[1] / "output"
    saved = os.dup(1)
    with output.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        try:
            outcome = run(sandbox, ["sh", "-c", script], config or RunConfig(), runtime=runtime)
        finally:
            os.dup2(saved, 1)
            os.close(saved)
    assert outcome.runtime == runtime
    return outcome.exit_code, output.read_text()


@pytest.mark.parametrize("code", [0, 1, 77, 255])
def test_exit_codes(sandbox: Sandbox, runtime: str, code: int) -> None:
    assert shell(sandbox, runtime, f"exit {code}")[0] == code


def test_a_command_that_a_signal_ends(sandbox: Sandbox, runtime: str) -> None:
    # one level down, because runtimes make the command the first process of its pid namespace, which signals spare
    assert shell(sandbox, runtime, "sh -c 'kill -TERM $$'; echo $?") == (0, "143\n")


def test_user_groups_home_and_directory(sandbox: Sandbox, runtime: str) -> None:
    config = RunConfig(user="app", working_dir="/home/app", env=("A=b c", "PATH=/usr/bin:/bin"))
    script = 'id -u; id -g; id -G; pwd; echo "$HOME $A"'
    assert shell(sandbox, runtime, script, config) == (0, "1000\n1001\n1001 50\n/home/app\n/home/app b c\n")


@pytest.mark.case("O13")
def test_names_of_users_are_those_of_the_image(sandbox: Sandbox, runtime: str) -> None:
    with pytest.raises(NotFoundError, match="daemon"):
        shell(sandbox, runtime, "true", RunConfig(user="daemon"))  # the host has one


def test_a_missing_working_directory_is_made(sandbox: Sandbox, runtime: str) -> None:
    assert shell(sandbox, runtime, "pwd", RunConfig(working_dir="/made/for/it")) == (0, "/made/for/it\n")
    assert Path(sandbox.rootfs, "made/for/it").is_dir()


def test_what_is_written_is_in_the_upper(sandbox: Sandbox, runtime: str) -> None:
    assert shell(sandbox, runtime, "echo x > /written; rm /etc/group") == (0, "")
    assert sandbox.upper is not None
    assert Path(sandbox.upper, "written").read_text() == "x\n"
    assert not Path(sandbox.rootfs, "etc/group").exists()


def test_devices_and_kernel_filesystems(sandbox: Sandbox, runtime: str) -> None:
    script = """
        echo x > /dev/null && dd if=/dev/zero bs=1 count=3 2> /dev/null | cat | ls /proc/self/fd > /dev/null &&
        [ -c /dev/urandom ] && [ -d /dev/pts ] && [ -d /dev/shm ] && [ -d /dev/mqueue ] && [ -d /sys/kernel ] &&
        [ -L /dev/stdin ] && [ -L /dev/fd ] && touch /dev/shm/x && echo fine
    """
    assert shell(sandbox, runtime, script) == (0, "fine\n")


def test_the_hosts_kernel_is_out_of_reach(sandbox: Sandbox, runtime: str) -> None:
    script = """
        (echo h > /proc/sysrq-trigger) 2> /dev/null && echo sysrq
        (echo x > /proc/sys/kernel/core_pattern) 2> /dev/null && echo core_pattern
        [ -s /proc/kcore ] && echo kcore
        mount -t tmpfs none /tmp 2> /dev/null && echo mount
        touch /sys/kernel/x 2> /dev/null && echo sys
        echo done
    """
    assert shell(sandbox, runtime, script) == (0, "done\n")


def test_processes_and_mounts_of_the_host_are_not_seen(sandbox: Sandbox, runtime: str, node: Sandboxes) -> None:
    code, output = shell(sandbox, runtime, "cat /proc/self/mountinfo; echo pids; ls -d /proc/[0-9]*")
    mounts, _, pids = output.partition("pids\n")
    assert code == 0
    assert node.root not in "".join(line.split(" - ")[0] for line in mounts.splitlines())
    assert len(pids.splitlines()) <= 4


def test_a_file_system_that_can_not_be_written(node: Sandboxes, layer: MountableLayer, runtime: str) -> None:
    sandbox = node.create([layer], image={}, mode="eager", read_only=True, id="ro")
    script = "touch /x 2> /dev/null && echo writable; touch /dev/shm/x && echo fine"
    assert shell(sandbox, runtime, script) == (0, "fine\n")
    node.remove("ro")


def test_the_images_own_command(sandbox: Sandbox, runtime: str) -> None:
    config = RunConfig(entrypoint=("sh", "-c"), cmd=("exit 9",))
    assert run(sandbox, None, config, runtime=runtime).exit_code == 9


def test_nothing_to_run(sandbox: Sandbox, runtime: str) -> None:
    with pytest.raises(UsageError, match="command"):
        run(sandbox, [], RunConfig(), runtime=runtime)


@pytest.mark.parametrize(("command", "code"), [("no-such-command", 127), ("/not-executable", 126)])
def test_commands_that_can_not_start_in_a_chroot(sandbox: Sandbox, command: str, code: int) -> None:
    assert run(sandbox, [command], RunConfig(), runtime=CHROOT).exit_code == code


def test_commands_that_can_not_start_in_a_container(sandbox: Sandbox, oci_runtime: str) -> None:
    assert run(sandbox, ["no-such-command"], RunConfig(), runtime=oci_runtime).exit_code != 0


def test_what_a_command_leaves_running_ends_with_it(sandbox: Sandbox, runtime: str) -> None:
    assert shell(sandbox, runtime, "sleep 987654 & echo started") == (0, "started\n")
    assert subprocess.run(["pgrep", "-f", "^sleep 987654$"]).returncode == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_passed_on(sandbox: Sandbox, runtime: str, number: signal.Signals) -> None:
    """Sent when the command has said that it is ready; its trap answers with an exit code of its own."""
    reader, writer = os.pipe()
    name = number.name.removeprefix("SIG")
    script = f"trap 'exit 33' {name}; echo ready; while :; do sleep 0.02; done"

    def answer() -> None:
        assert os.read(reader, 5) == b"ready"
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=answer)
    saved = os.dup(1)
    before = signal.signal(number, signal.default_int_handler)
    try:
        os.dup2(writer, 1)
        # blocked in the thread as well, so that the process's signal comes to the one that waits for it
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
        thread.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        outcome = run(sandbox, ["sh", "-c", script], RunConfig(), runtime=runtime)
    finally:
        os.dup2(saved, 1)
        for fd in (saved, writer):
            os.close(fd)
        thread.join()
        os.close(reader)
        signal.signal(number, before)
    assert outcome.exit_code == 33


def test_what_the_terminal_sends_arrives_once(sandbox: Sandbox, runtime: str) -> None:
    """Ctrl-C goes to the whole foreground process group; it must not be passed on a second time."""
    child, terminal = pty.fork()
    if child == 0:
        code = 99
        try:
            script = (
                "n=0; trap 'n=$((n+1))' INT; echo ready; while [ $n = 0 ]; do sleep 0.02; done; sleep 0.2\nexit 4$n"
            )
            code = run(sandbox, ["sh", "-c", script], RunConfig(), runtime=runtime).exit_code
        finally:
            os._exit(code)
    try:
        while b"ready" not in os.read(terminal, 100):
            pass
        os.write(terminal, b"\x03")
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(terminal)
    assert code == 41


def test_removing_a_sandbox_stops_what_runs_in_it(node: Sandboxes, layer: MountableLayer, runtime: str) -> None:
    sandbox = node.create([layer], image={}, mode="eager", id="stop")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 1)
        code = 99
        try:
            code = run(sandbox, ["sh", "-c", "echo ready; sleep 600"], RunConfig(), runtime=runtime).exit_code
        finally:
            os._exit(code)
    os.close(writer)
    assert os.read(reader, 6) == b"ready\n"
    removal = node.remove("stop")
    assert len(removal.stopped) == 1
    assert removal.holders == ()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 137
    os.close(reader)


def test_a_run_whose_caller_was_killed_is_stopped(node: Sandboxes, layer: MountableLayer, runtime: str) -> None:
    sandbox = node.create([layer], image={}, mode="eager", id="orphan")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 1)
        try:
            run(sandbox, ["sh", "-c", "echo ready; sleep 600"], RunConfig(), runtime=runtime)
        finally:
            os._exit(0)
    os.close(writer)
    assert os.read(reader, 6) == b"ready\n"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(node.remove("orphan").stopped) == 1
    assert os.read(reader, 1) == b""  # nobody is left to write
    os.close(reader)


def test_called_from_a_thread(sandbox: Sandbox, runtime: str) -> None:
    codes: list[int] = []

    def work() -> None:
        codes.append(run(sandbox, ["sh", "-c", "exit 5"], RunConfig(), runtime=runtime).exit_code)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert codes == [5]


def test_a_bundle_starts_with_the_runtime_itself(sandbox: Sandbox, oci_runtime: str, tmp_path: Path) -> None:
    config = RunConfig(
        cmd=("sh", "-c", "id -u; pwd; hostname; echo $A"), user="1000:50", working_dir="/tmp", env=("A=b",)
    )
    write_bundle(str(tmp_path / "bundle"), sandbox, config)
    ran = subprocess.run(
        [oci_runtime, "--root", tmp_path / "state", "run", "--bundle", tmp_path / "bundle", f"test-{os.getpid()}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "1000\n/tmp\nbox\nb\n", "")


def test_a_sandbox_that_is_not_mounted_runs_nothing(sandbox: Sandbox, runtime: str) -> None:
    umount(sandbox.rootfs)
    with pytest.raises(ConflictError, match="not mounted"):
        run(sandbox, ["sh", "-c", "true"], RunConfig(), runtime=runtime)


def test_a_chroot_that_can_not_be_set_up_says_why(node: Sandboxes, layer: MountableLayer) -> None:
    sandbox = node.create([layer], image={}, mode="eager", id="odd")
    os.rmdir(sandbox.rootfs + "/proc")
    os.symlink("tmp", sandbox.rootfs + "/proc")
    with pytest.raises(UnavailableError, match=r"/proc of the image is not a directory"):
        run(sandbox, ["sh", "-c", "true"], RunConfig(), runtime=CHROOT)
    node.remove("odd")


def test_runtimes_are_found(tmp_path: Path) -> None:
    assert find_runtime(CHROOT) == CHROOT
    assert find_runtime(sys.executable) == os.path.abspath(sys.executable)
    with pytest.raises(NotFoundError, match="no-such-runtime"):
        find_runtime("no-such-runtime")
