"""Logs of strace: which parts of which files a run read."""

from __future__ import annotations

import pytest

from prefetch.trace.exchange.listing import Listing, Wanted
from prefetch.trace.exchange.strace import LINE_BYTES, is_log, read_log

Read = tuple[bytes, tuple[int, int] | None]


def log(text: str) -> Listing:
    return read_log(text.encode("utf-8", "surrogateescape"), "s")


def read(found: Listing) -> list[Read]:
    return [(wanted.path, wanted.ranges[0] if wanted.ranges else None) for wanted in found.wanted]


ANNOTATED = r"""
3928  1796050766.527184 execve("/usr/bin/python3", ["python3", "-c", "x = 1)  = 2"], 0x7ffcef769d58 /* 35 vars */) = 0
3928  1796050766.528123 mmap(NULL, 8192, PROT_READ|PROT_WRITE, MAP_PRIVATE|MAP_ANONYMOUS, -1, 0) = 0x7f43fde22000
3928  1796050766.528369 openat(AT_FDCWD</work>, "/lib/libc.so.6", O_RDONLY|O_CLOEXEC) = 3</usr/lib/libc.so.6>
3928  1796050766.529071 read(3</usr/lib/libc.so.6>, "\177ELF\2) = 5\1"..., 832) = 832
3928  1796050766.529186 pread64(3</usr/lib/libc.so.6>, "\6\0"..., 784, 64) = 784
3928  1796050766.529521 mmap(NULL, 1974096, PROT_READ, MAP_PRIVATE, 3</usr/lib/libc.so.6>, 0) = 0x7f43f000
3928  1796050766.529642 mmap(0x7f43d000, 4096, PROT_READ, MAP_FIXED, 3</usr/lib/libc.so.6>, 0x26000) = 0x7f43d000
3928  1796050766.531770 openat(AT_FDCWD</work>, "/nothing", O_RDONLY|O_CLOEXEC) = -1 ENOENT (No such file or directory)
3928  1796050766.532254 read(3</usr/lib/libc.so.6>, "", 4096) = 0
3928  1796050766.532300 read(0</dev/pts/0<char 136:0>>, "x\n", 4096) = 2
3928  1796050766.532301 read(5<pipe:[123]>, "x\n", 4096) = 2
3928  1796050766.532302 read(6<TCP:[127.0.0.1:80->127.0.0.1:50]>, "x\n", 4096) = 2
3928  1796050766.532303 openat(AT_FDCWD</work>, "d", O_RDONLY|O_DIRECTORY) = 4</work/d>
3928  1796050766.532304 openat(AT_FDCWD</work>, "out", O_WRONLY|O_CREAT|O_TRUNC, 0666) = 7</work/out>
3928  1796050766.532305 write(7</work/out>, "x", 1) = 1
3928  1796050766.540000 +++ exited with 0 +++
"""


def test_a_log_with_paths_of_descriptors() -> None:
    found = log(ANNOTATED)
    libc = b"usr/lib/libc.so.6"
    assert found.wanted == [
        Wanted(b"usr/bin/python3", at=0, comm="python3"),
        Wanted(libc, ranges=((0, 832),), at=1887, comm="python3"),
        Wanted(libc, ranges=((64, 784),), at=2002, comm="python3"),
        Wanted(libc, ranges=((0, 1974096),), at=2337, comm="python3"),
        Wanted(libc, ranges=((0x26000, 4096),), at=2458, comm="python3"),
    ]
    assert found.skipped == {
        "a call that failed": 1,
        "a read of what is no file": 3,
        "a directory": 1,
        "a file that is written": 1,
    }
    assert is_log(ANNOTATED.encode())


def test_descriptors_are_followed_without_their_paths() -> None:
    found = log(
        r"""
openat(AT_FDCWD, "/a", O_RDONLY) = 3
read(3, "..", 100) = 100
dup(3) = 5
lseek(3, 1000, SEEK_SET) = 1000
read(5, "..", 10) = 10
fcntl(5, F_DUPFD_CLOEXEC, 10) = 10
close(3) = 0
openat(AT_FDCWD, "/b", O_RDONLY) = 3
readv(3, [{iov_base="x, 5", iov_len=3}, {iov_base="y", iov_len=1}], 2) = 4
read(10, "..", 10) = 10
dup2(10, 3) = 3
read(3, "..", 10) = 10
preadv(3, [{iov_base="..", iov_len=7}], 1, 5000) = 7
close(3) = 0
read(3, "..", 10) = 10
"""
    )
    assert read(found) == [
        (b"a", (0, 100)), (b"a", (1000, 10)), (b"b", (0, 4)), (b"a", (1010, 10)), (b"a", (1020, 10)), (b"a", (5000, 7)),
    ]  # fmt: skip
    assert found.skipped == {"a read of a descriptor that isn't known; trace with -y": 1}


def test_processes_have_their_own_descriptors_and_threads_share_them() -> None:
    found = log(
        r"""
1 openat(AT_FDCWD, "/a", O_RDONLY) = 3
1 openat(AT_FDCWD, "/c", O_RDONLY|O_CLOEXEC) = 4
1 clone(child_stack=NULL, flags=CLONE_CHILD_SETTID|SIGCHLD, child_tidptr=0x7f) = 2
1 clone3({flags=CLONE_VM|CLONE_FS|CLONE_FILES|CLONE_THREAD, child_tid=0x7f}, 88) = 9
2 read(3, "", 10) = 10
2 close(3) = 0
1 read(3, "", 10) = 10
9 openat(AT_FDCWD, "/t", O_RDONLY) = 5
1 read(5, "", 1) = 1
2 execve("/bin/cat", ["cat"], 0x7) = 0
2 read(4, "", 10) = 10
1 read(4, "", 10) = 10
1 vfork() = 3
3 chdir("/dir") = 0
3 open("rel", O_RDONLY) = 8
3 read(8, "", 2) = 2
"""
    )
    assert read(found) == [
        (b"a", (0, 10)), (b"a", (10, 10)), (b"t", (0, 1)), (b"bin/cat", None), (b"c", (0, 10)), (b"dir/rel", (0, 2)),
    ]  # fmt: skip
    assert [wanted.comm for wanted in found.wanted] == ["", "", "", "cat", "", ""]


def test_calls_that_end_on_a_later_line() -> None:
    found = log(
        r"""
[pid  7] 12:00:00.000001 openat(AT_FDCWD, "/a", O_RDONLY <unfinished ...>
[pid  8] 12:00:00.000002 openat(AT_FDCWD, "/b", O_RDONLY) = 3
[pid  7] 12:00:00.000009 <... openat resumed>) = 3
[pid  7] 12:00:00.000010 read(3,  <unfinished ...>
[pid  8] 12:00:00.000011 read(3, "abc", 3) = 3
[pid  7] 12:00:00.000020 <... read resumed>"abcd", 4) = 4
[pid  8] 12:00:00.000021 <... read resumed>"abcd", 4) = 4
strace: Process 9 attached
[pid  8] 12:00:00.000031 --- SIGCHLD {si_signo=SIGCHLD} ---
"""
    )
    assert [(wanted.path, wanted.at) for wanted in found.wanted] == [(b"b", 1), (b"a", 0)]  # as they end
    assert found.skipped == {"the end of a call without its beginning": 1}


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (("1796050766.500000", "1796050766.500007", "1796050768.5"), [0, 7, 2_000_000]),
        (("23:59:59.5", "23:59:59.500001", "00:00:00.5"), [0, 1, 1_000_000]),
        (("10:00:00", "10:00:00", "10:00:05"), [0, 0, 5_000_000]),
        (("     0.000000", "     0.000100", "     1.000000"), [0, 100, 1_000_100]),
        (("", "", ""), [None, None, None]),
    ],
)  # fmt: skip
def test_times_of_every_kind(times: tuple[str, ...], expected: list[int | None]) -> None:
    found = log("".join(f'5 {time} openat(AT_FDCWD, "/{n}", O_RDONLY) = 3\n' for n, time in enumerate(times)))
    assert [wanted.at for wanted in found.wanted] == expected


def test_a_log_of_opens_alone_counts_whole_files() -> None:
    found = log(
        'execve("/bin/sh", ["sh"], 0x7) = 0\nopenat(AT_FDCWD, "/a", O_RDONLY) = 3\nopen("/b", O_RDWR) = 3\n'
        'openat2(AT_FDCWD, "/c", {flags=O_RDONLY|O_CLOEXEC, resolve=0}, 24) = 4\nopen("/w", O_WRONLY) = 5\n'
        'open("/t", O_RDWR|O_TRUNC) = 5\n'
    )
    assert read(found) == [(b"bin/sh", None), (b"a", None), (b"b", None), (b"c", None)]
    assert found.skipped == {"a file that is written": 2}


def test_what_is_opened_and_not_read_is_not_wanted_where_reads_are_traced() -> None:
    found = log('open("/a", O_RDONLY) = 3\nopen("/b", O_RDONLY) = 4\nread(4, "", 9) = 9\n')
    assert read(found) == [(b"b", (0, 9))]


def test_relative_paths_need_a_directory() -> None:
    found = log(
        'open("a", O_RDONLY) = 3\nopenat(AT_FDCWD</w>, "b", O_RDONLY) = 3\n'
        'openat(AT_FDCWD, "/d", O_RDONLY|O_DIRECTORY) = 9\n'
        'openat(9, "c", O_RDONLY) = 3\nopenat(8, "x", O_RDONLY) = 3\nopenat(8</e>, "../d", O_RDONLY) = 3\n'
        'fchdir(9) = 0\nopen("f", O_RDONLY) = 3\nexecve("./g", ["g"], 0x7) = 0\n'
        'chdir("..") = 0\nopen("h", O_RDONLY) = 3\n'
    )
    assert [wanted.path for wanted in found.wanted] == [b"w/b", b"d/c", b"e/../d", b"d/f", b"d/./g", b"d/../h"]
    assert found.skipped == {"no path that is known": 2, "a directory": 1}


def test_escapes_of_paths() -> None:
    found = log(
        r'open("/caf\303\251/\"q\"/\\\n\t\x41\1", O_RDONLY) = 3' + "\n" + r'open("/cut"..., O_RDONLY) = 3' + "\n"
    )
    assert [wanted.path for wanted in found.wanted] == ['café/"q"/\\\n\tA\x01'.encode()]
    assert found.skipped == {"no path that is known": 1}
    noted = log(
        'openat(AT_FDCWD</>, "x", O_RDONLY) = 3</a\\74b\\76\\303\\251>\nread(3</a\\74b\\76\\303\\251>, "", 1) = 1\n'
    )
    assert read(noted) == [("a<b>é".encode(), (0, 1))]


def test_a_descriptor_that_was_opened_before_is_read_from_its_start() -> None:
    found = log(
        'read(7</a>, "", 5) = 5\nread(7</a>, "", 5) = 5\n'
        'read(7</b (deleted)>, "", 5) = 5\nread(7</c>(deleted), "", 5) = 5\n'
    )
    assert read(found) == [(b"a", (0, 5)), (b"a", (5, 5)), (b"b (deleted)", (0, 5)), (b"c", (0, 5))]


@pytest.mark.parametrize(
    "line",
    [
        "garbage", "read(", "read(3", 'read(3, "', "open() = 3", "openat(", 'open("/a") = 99999999999999999999999999',
        'open("/a", O_RDONLY) = 007', "mmap() = 0x1", "mmap(1, 2, 3, 4, 5, 6) = 0x1", 'execve("x") = 0', "clone() = 5",
        "lseek(-1) = 5", "dup() = 4", "close() = 0", "read(AT_FDCWD, 1) = 1", "<... x resumed>) = 0", "\x00\xff",
        'mmap(NULL, 99999999999999999999, PROT_READ, MAP_PRIVATE, 3</a>, 0) = 0x7',
        'pread64(3</a>, "", 1, 9223372036854775807) = 1',
    ],
)  # fmt: skip
def test_lines_that_are_damaged_do_no_harm(line: str) -> None:
    found = log(f'open("/z", O_RDONLY) = 3\n{line}\nread(3</z>, "", 1) = 1\n')
    assert (b"z", (0, 1)) in read(found)


def test_lines_without_end_are_passed_over() -> None:
    found = log('open("/z", O_RDONLY) = 3\nread(3, "' + "x" * LINE_BYTES + '") = 5\n')
    assert read(found) == [(b"z", None)]
    assert found.skipped == {"a line that is too long": 1}


@pytest.mark.parametrize("text", ["", "/usr/bin/sh\n/etc/hosts\n", "hello\n", "a = b\n", "path,size,elapsed\n"])
def test_what_is_no_log(text: str) -> None:
    assert not is_log(text.encode())
