"""A receipt of a sandbox that stands."""

from __future__ import annotations

from overlay.format import chain_of
from overlay.service.receipt import Host, LayerRecord, Named, Receipt, Verification

LAYER = LayerRecord("base", "sha256:" + "a" * 64, ("sha256:" + "b" * 64,))
RECEIPT = Receipt(
    id="box",
    started="2026-11-30T10:00:00.000Z",
    images=(Named("base", "debian", "sha256:" + "c" * 64),),
    layers=(LAYER,),
    chain=chain_of(["a" * 64]),
    store="/store",
    mode="lazy",
    backend="fanotify",
    why="the kernel has pre-content events",
    verification=Verification.VERIFIED,
    host=Host("6.18", "boot", erofs=("chunked_file",), overlay={"index": "N"}),
    ttl=60.0,
    carried={"resources": {"cpu": 4}, "network": {"mode": "none"}, "labels": {"a": "b"}},
)
