"""Metadata images of the cache: what gets in, and what is known of what they need."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.conversions import Site, noise
from support.faults import fsync_for_free
from support.tars import file

from layerstore.cache.metadata import MetadataCache
from layerstore.errors import CorruptError
from layerstore.image import Layer, Role
from layerstore.staging import StagedFile

MIB = 1 << 20


class Node:
    """Metadata images beside the store that they come from."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.metadata = MetadataCache(str(site.path / "cache" / "meta"))

    def leftovers(self) -> list[str]:
        return [name for _, _, files in os.walk(self.site.path / "cache") for name in files if name.startswith(".tmp-")]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with fsync_for_free():
        yield Node(Site(tmp_path))


def some_layer(site: Site) -> Layer:
    return site.convert(site.tar(file("a", noise(3 * MIB, 1)), file("b", b"small")), tag="it").image.layers[0]


@pytest.mark.case("C05", "C11")
@pytest.mark.parametrize("damage", ["flip", "cut", "html"])
def test_a_bad_metadata_image_never_enters_the_cache(node: Node, damage: str) -> None:
    layer = some_layer(node.site)
    path = node.site.blob_path(layer.blob)
    intact = path.read_bytes()
    changed = {"cut": intact[:-9], "html": b"<html>".ljust(len(intact))}.get(damage)
    if changed is None:
        node.site.flip(layer.blob, 40)
    else:
        path.write_bytes(changed)
    with pytest.raises(CorruptError):
        node.metadata.ensure(layer, node.site.store)
    assert not os.path.exists(node.metadata.path(layer))
    assert node.leftovers() == []
    path.write_bytes(intact)
    assert os.path.exists(node.metadata.ensure(layer, node.site.store))


@pytest.mark.case("C08")
@pytest.mark.parametrize("damage", ["gone", "not JSON", "version", "magic", "beyond", "shape"])
def test_what_a_layer_uses_is_found_out_anew_if_it_is_not_known(node: Node, damage: str) -> None:
    layer = some_layer(node.site)
    assert not node.metadata.has(layer)
    node.metadata.ensure(layer, node.site.store)
    assert node.metadata.has(layer)
    expected = node.metadata.uses(layer)
    path = Path(node.metadata.path(layer) + ".uses")
    document = json.loads(path.read_bytes())
    changes: dict[str, Any] = {
        "version": {**document, "version": 2},
        "magic": {**document, "magic": "other"},
        "beyond": {**document, "packs": [[document["packs"][0][0], [[0, 10**9]]]]},
        "shape": {**document, "packs": [[1]]},
    }
    path.unlink()
    if damage == "not JSON":
        path.write_bytes(b"{")
    elif damage != "gone":
        path.write_bytes(json.dumps(changes[damage]).encode())
    with pytest.raises(CorruptError, match="fetch the layer again"):
        node.metadata.uses(layer)
    assert not node.metadata.has(layer)
    node.metadata.ensure(layer, node.site.store)
    assert node.metadata.uses(layer) == expected


def test_a_cached_metadata_image_is_not_taken_with_other_packs(node: Node) -> None:
    """A manifest that lists another pack in a device's place would make its bytes another file's."""
    site = node.site
    layer = some_layer(site)
    node.metadata.ensure(layer, site.store)
    stranger = site.convert(site.tar(file("other", noise(3 * MIB, 9))), Role.BASE, dedup=False).layer.packs[0]
    forged = Layer(layer.role, layer.metadata, layer.metadata_size, layer.blob, layer.blob_size, (stranger,))
    for _ in range(2):
        with pytest.raises(CorruptError, match="manifest"):
            node.metadata.ensure(forged, site.store)
        fresh = MetadataCache(str(site.path / "cache" / "fresh"))
        with pytest.raises(CorruptError, match="device table"):
            fresh.ensure(forged, site.store)


def test_what_dead_writers_left_is_reclaimed_and_nothing_else(node: Node) -> None:
    path = node.metadata.ensure(some_layer(node.site), node.site.store)
    cached = sorted(Path(path).parent.iterdir())
    assert [entry.name for entry in cached] == [os.path.basename(path), os.path.basename(path) + ".uses"]
    Path(path).with_name(".tmp-1-dead").write_bytes(b"half" * 2000)
    living = StagedFile(os.path.dirname(path))
    living.write(b"on its way")
    assert node.metadata.reclaim() >= 8000
    assert len(node.leftovers()) == 1
    living.discard()
    assert sorted(Path(path).parent.iterdir()) == cached
