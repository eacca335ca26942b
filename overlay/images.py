"""Images as a node finds them in stores: looked up each time, read once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from layerstore.compose import plan_stack
from layerstore.digest import Digest
from layerstore.errors import about
from layerstore.image import Layer, find_target, parse_image, read_document
from layerstore.oci.config import ImageConfig
from layerstore.oci.descriptor import Descriptor
from layerstore.store.opening import Stores
from layerstore.store.protocol import Store
from overlay.format import chain_of

_KNOWN = 256
"""Parsed images that are remembered, by digest of their manifests."""


@dataclass(frozen=True, slots=True)
class NodeImage:
    """An image, or a stack of several, as a sandbox is made from it.

    Attributes:
        names: role, name as asked for, and manifest of each part, bottom first. The role of a single image is stack.
        layers: bottom first.
        config: how its programs are run.
        store: where it was found.
    """

    names: tuple[tuple[str, str, Digest], ...]
    layers: tuple[Layer, ...]
    config: ImageConfig
    store: Store

    @property
    def chain(self) -> str:
        """What an upper over it belongs to."""
        return chain_of(layer.metadata.hex for layer in self.layers)

    @property
    def identity(self) -> Mapping[str, object]:
        """Of the image, for ``state.json`` and people: its name, and the manifest if it is one."""
        return {
            "name": " + ".join(name for _, name, _ in self.names),
            "manifest": str(self.names[0][2]) if len(self.names) == 1 else None,
            "store": self.store.location,
        }


@dataclass(frozen=True, slots=True)
class Asked:
    """What is looked for: a single image, or a base with what is put on top of it, in the store at ``location``."""

    location: str
    base: str
    workspace: str | None = None
    toolkits: tuple[str, ...] = ()
    force: bool = False

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Role and name of each, bottom first."""
        above = [("workspace", self.workspace)] if self.workspace else []
        found = [("base", self.base), *above, *(("toolkit", name) for name in self.toolkits)]
        return [("stack", self.base)] if len(found) == 1 else found


class Images:
    """Finds images; any thread may call. Those who look for the same at the same moment ask the store once."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._lock = threading.Lock()
        self._under_way: dict[Asked, Future[NodeImage]] = {}
        self._known: OrderedDict[object, NodeImage] = OrderedDict()

    def find(self, asked: Asked) -> NodeImage:
        """Look it up, by name or manifest digest; fetches no data.

        Raises:
            NotFoundError: no such image.
            ConflictError: they don't fit on top of each other, unless ``force``.
            CorruptError, MalformedError, UnsupportedError: a manifest or config can't be used.
        """
        with self._lock:
            other = self._under_way.get(asked)
            own: Future[NodeImage] = Future()
            if other is None:
                self._under_way[asked] = own
        if other is not None:
            return other.result()
        try:
            found = self._find(asked)
        except BaseException as error:
            own.set_exception(error)
            raise
        else:
            own.set_result(found)
            return found
        finally:
            with self._lock:
                del self._under_way[asked]

    def _find(self, asked: Asked) -> NodeImage:
        store = self._stores.open(asked.location)
        targets = [find_target(store, name) for _, name in asked.parts]
        names = tuple((role, name, target.digest) for (role, name), target in zip(asked.parts, targets, strict=True))
        key = (asked.location, names, asked.force)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
        found = _single(store, names, targets[0]) if len(names) == 1 else _stacked(store, names, asked)
        with self._lock:
            self._known[key] = found
            while len(self._known) > _KNOWN:
                self._known.popitem(last=False)
        return found


def _single(store: Store, names: tuple[tuple[str, str, Digest], ...], target: Descriptor) -> NodeImage:
    name = names[0][1]
    data = read_document(store, target, f"manifest of {name!r}")
    with about(repr(name)):
        image = parse_image(data)
    what = f"config of {name!r}"
    return NodeImage(names, image.layers, ImageConfig.parse(read_document(store, image.config, what), what), store)


def _stacked(store: Store, names: Sequence[tuple[str, str, Digest]], asked: Asked) -> NodeImage:
    """Names may move meanwhile: the parts are what they stood for when they were looked up."""
    by_role = [(role, str(digest)) for role, _, digest in names]
    stack = plan_stack(
        store,
        base=by_role[0][1],
        workspace=next((digest for role, digest in by_role if role == "workspace"), None),
        toolkits=[digest for role, digest in by_role if role == "toolkit"],
        force=asked.force,
    )
    return NodeImage(tuple(names), stack.image.layers, stack.config, store)
