"""A tree that layers change while what it started from stays as it was.

Directories are copied when the current layer first changes something in them, and every copy remembers the one it
was made from. That answers the two questions that layers pose: has this layer added that name (then its own
whiteouts, which apply to lower layers only, spare it wherever in the archive they stand), and does this directory
still merge with the one that the overlay's lower has at the same path, or does it replace it?
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from enum import IntEnum

from layerstore.tree.inode import Attrs, Directory, Inode
from layerstore.tree.path import check_component
from layerstore.tree.resolve import Trail

IMPLIED = Attrs(stat.S_IFDIR | 0o755, 0, 0, 0, 0)
"""A directory that has no member of its own, only members inside."""


class Claim(IntEnum):
    """What the current layer says about a directory."""

    NONE = 0
    IMPLIED = 1
    DECLARED = 2


class LayerKey:
    """Stands for one layer of one view; only its identity counts."""

    __slots__ = ("view",)

    def __init__(self, view: object) -> None:
        self.view = view


class Node(Directory):
    """A directory that some layer has made or changed.

    ``below`` is the directory, as the layers below the current one left it, whose content this one includes. Where it
    is None, nothing here or deeper comes from them. ``base`` is the directory of the lower with which this one
    merges. ``again`` are the names that the current layer has linked anew to the inode they already had.
    """

    __slots__ = ("again", "base", "below", "claim", "layer")

    def __init__(self, attrs: Attrs, layer: LayerKey, *, below: Directory | None = None) -> None:
        super().__init__(attrs)
        self.layer = layer
        self.below = below
        self.claim = Claim.NONE
        self.base: Directory | None = None
        self.again: set[bytes] | None = None
        if below is not None:
            self.entries = below.entries.copy()
            self.base = below
            if isinstance(below, Node) and below.layer.view is layer.view:
                self.base = below.base


class View:
    """The tree as the layers so far have left it.

    Attributes:
        root: the whole tree. It belongs to the view until the next ``begin``.
        created: directories made because something was put inside.
    """

    def __init__(self, root: Directory, replaced: Callable[[bytes, Trail], None]) -> None:
        self.root = root
        self.created = 0
        self._replaced = replaced
        self._key = object()  # not the view itself, which trees must not keep alive
        self._layer = LayerKey(self._key)
        self._copies: list[Node] = []

    def begin(self) -> None:
        """Start a layer: all there is now comes from below."""
        self._layer = LayerKey(self._key)
        root = Node(self.root.attrs, self._layer, below=self.root)
        root.claim = Claim.IMPLIED
        self.root = root
        self._copies = [root]

    def end(self) -> None:
        """Let go of what only the current layer needed."""
        for node in self._copies:
            node.below = node.again = None
        self._copies = []

    def directory(self, trail: Trail, member: bytes) -> Node:
        """The directory at ``trail``, made where it is missing, as parent of the layer's ``member``.

        What stands in its way is removed after a call of ``replaced``: it can't have an entry inside.
        """
        node = self._own_root()
        for depth, (name, _) in enumerate(trail, 1):
            found = node.entries.get(name)
            if isinstance(found, Directory):
                node = self._own(node, name, found)
            else:
                if found is not None:
                    self._replaced(member, trail[:depth])
                check_component(name, member)
                self.created += 1
                node = self._make(node, name)
            node.claim = max(node.claim, Claim.IMPLIED)
        return node

    def declare(self, parent: Node, name: bytes, attrs: Attrs) -> None:
        """Put a directory: one that is there keeps its content and gets new attributes."""
        found = parent.entries.get(name)
        node = self._own(parent, name, found) if isinstance(found, Directory) else self._make(parent, name)
        node.attrs = attrs
        node.claim = Claim.DECLARED

    def declare_root(self, attrs: Attrs) -> None:
        root = self._own_root()
        root.attrs = attrs
        root.claim = Claim.DECLARED

    def put(self, parent: Node, name: bytes, inode: Inode) -> None:
        """Put anything but a directory in place of whatever has the name."""
        if parent.below is not None and parent.below.entries.get(name) is inode:
            if parent.again is None:
                parent.again = set()
            parent.again.add(name)
        parent.entries[name] = inode

    def added(self, parent: Node, name: bytes) -> Claim:
        """What the current layer has put under this name: Claim.NONE if all there is comes from below."""
        found = parent.entries.get(name)
        if found is None:
            return Claim.NONE
        if isinstance(found, Directory):
            return found.claim if isinstance(found, Node) and found.layer is self._layer else Claim.NONE
        if parent.below is None or parent.below.entries.get(name) is not found:
            return Claim.DECLARED
        return Claim.DECLARED if parent.again is not None and name in parent.again else Claim.NONE

    def hide(self, trail: Trail, name: bytes) -> None:
        """Remove what layers below have under this name."""
        here = trail[-1][1] if trail else self.root
        if not isinstance(here, Directory) or name not in here.entries:
            return
        parent = self._existing(trail)
        assert parent is not None
        if not self.added(parent, name):
            del parent.entries[name]
            return
        found = parent.entries[name]
        if isinstance(found, Node):
            self._strip(found)

    def clear(self, trail: Trail) -> None:
        """Remove all that layers below have in this directory, but not the directory."""
        node = self._existing(trail)
        if node is not None:
            attrs = node.attrs
            self._strip(node)
            node.attrs = attrs

    def _existing(self, trail: Trail) -> Node | None:
        """The directory at ``trail``, ready for removals: they claim nothing, and make nothing."""
        node = self._own_root()
        if any(not isinstance(found, Directory) for _, found in trail):
            return None
        for name, found in trail:
            assert isinstance(found, Directory)
            node = self._own(node, name, found)
        return node

    def _own_root(self) -> Node:
        assert isinstance(self.root, Node) and self.root.layer is self._layer, "outside of a layer"
        return self.root

    def _own(self, parent: Node, name: bytes, found: Directory) -> Node:
        if isinstance(found, Node) and found.layer is self._layer:
            return found
        node = Node(found.attrs, self._layer, below=found)
        self._copies.append(node)
        parent.entries[name] = node
        return node

    def _make(self, parent: Node, name: bytes) -> Node:
        node = Node(IMPLIED, self._layer)
        parent.entries[name] = node
        return node

    def _strip(self, top: Node) -> None:
        """Leave what the current layer has added. Directories that it only implies lose the attributes from below.

        Where ``below`` is None nothing deeper is left to do, so each directory's entries are visited once a layer.
        """
        stack = [top]
        while stack:
            node = stack.pop()
            if node.claim is not Claim.DECLARED:
                node.attrs = IMPLIED
            if node.below is None:
                continue
            for name in [name for name in node.entries if not self.added(node, name)]:
                del node.entries[name]
            stack.extend(child for child in node.entries.values() if isinstance(child, Node))
            node.below = node.base = node.again = None
