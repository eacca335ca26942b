"""Patterns of paths, looked up in a tree.

``*`` is any part of a component, ``?`` one character, ``[a-z]`` one of some, ``[!a]`` and ``[^a]`` one of the others;
a backslash takes the meaning of the next character. ``**`` as a component stands for any number of components.
Characters are those of UTF-8, or single bytes where a name isn't UTF-8.
"""

from __future__ import annotations

from collections.abc import Iterator

from layerstore.tree.inode import Directory, Inode
from layerstore.tree.path import steps

_ANY_DEPTH = b"**"


class Glob:
    """One pattern; ``steps`` counts the names that it has been compared with, and long comparisons as several."""

    def __init__(self, pattern: bytes) -> None:
        self._parts: list[list[_Test] | None] = [
            None if part == _ANY_DEPTH else _tests(part.decode("utf-8", "surrogateescape")) for part in steps(pattern)
        ]
        self.steps = 0

    def matches(self, root: Directory) -> Iterator[tuple[bytes, Inode | None]]:
        """Every entry that the pattern matches, with its path, in path order.

        Links are not followed. None stands for a directory that was looked through, so that the caller hears of steps.
        """
        stack: list[tuple[bytes, Inode, frozenset[int]]] = [(b"", root, self._closed({0}))]
        end = len(self._parts)
        while stack:
            path, inode, states = stack.pop()
            if end in states and path:
                yield path, inode
            if not isinstance(inode, Directory) or states == {end}:
                continue
            prefix = path + b"/" if path else b""
            below = []
            for name in sorted(inode.entries, reverse=True):
                after = self._after(states, name.decode("utf-8", "surrogateescape"))
                if after:
                    below.append((prefix + name, inode.entries[name], after))
            stack.extend(below)
            yield path, None

    def _after(self, states: frozenset[int], name: str) -> frozenset[int]:
        """Where the pattern stands behind a component with this name."""
        reached = set()
        for state in states:
            if state == len(self._parts):
                continue
            tests = self._parts[state]
            self.steps += 1
            if tests is not None and len(tests) > 16:
                self.steps += len(tests) * len(name) // 64
            if tests is None:
                reached.add(state)
            elif _fit(tests, name):
                reached.add(state + 1)
        return self._closed(reached)

    def _closed(self, states: set[int]) -> frozenset[int]:
        """With what an empty ``**`` leads to."""
        for state in sorted(states):
            while state < len(self._parts) and self._parts[state] is None:
                state += 1
                states.add(state)
        return frozenset(states)


class _Test:
    """One character of a component, or a star."""

    __slots__ = ("but", "ranges")

    def __init__(self, ranges: list[tuple[str, str]] | None, *, but: bool = False) -> None:
        """``ranges`` of characters, first and last; None is a star. ``but``: all others."""
        self.ranges = ranges
        self.but = but

    def fits(self, char: str) -> bool:
        assert self.ranges is not None
        return any(first <= char <= last for first, last in self.ranges) != self.but


def _tests(part: str) -> list[_Test]:
    tests: list[_Test] = []
    at = 0
    while at < len(part):
        char = part[at]
        at += 1
        if char == "*":
            if not tests or tests[-1].ranges is not None:
                tests.append(_Test(None))
        elif char == "?":
            tests.append(_Test([], but=True))
        elif char == "[" and (found := _class(part, at)) is not None:
            test, at = found
            tests.append(test)
        else:
            if char == "\\" and at < len(part):
                char = part[at]
                at += 1
            tests.append(_Test([(char, char)]))
    return tests


def _class(part: str, at: int) -> tuple[_Test, int] | None:
    """The class that begins behind a bracket, and where it ends; None if it has no end: ``[`` is a character then."""
    but = part[at : at + 1] in ("!", "^")
    at += but
    ranges: list[tuple[str, str]] = []
    while at < len(part):
        char = part[at]
        if char == "]" and ranges:
            return _Test(ranges, but=but), at + 1
        if char == "\\" and at + 1 < len(part):
            at += 1
            char = part[at]
        at += 1
        last = char
        if part[at : at + 1] == "-" and part[at + 1 : at + 2] not in ("", "]"):
            last = part[at + 1]
            at += 2
        ranges.append((char, last))
    return None


def _fit(tests: list[_Test], name: str) -> bool:
    """Whether a name fits: only the last star is ever tried again, so that no pattern takes long."""
    at = position = 0
    star, resume = -1, 0
    while position < len(name):
        if at < len(tests) and tests[at].ranges is None:
            star, resume = at, position
            at += 1
        elif at < len(tests) and tests[at].fits(name[position]):
            at += 1
            position += 1
        elif star >= 0:
            resume += 1
            at, position = star + 1, resume
        else:
            return False
    return all(test.ranges is None for test in tests[at:])
