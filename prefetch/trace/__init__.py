"""Traces: what one run read, in order.

::

    recorder ─▶ format.py: lines as they happen ─▶ Trace ─▶ places.py: paths for pack ranges, ranges for paths
    other tools' lists ─▶ exchange/ ────────────────▲                    └▶ another build of the image

* **access**: a range of one pack that the run read, when first, how often, by which program, how long it waited.
* **place**: the part of a file that a range of a pack holds.

A trace names layers and packs by their digests, so it means the same everywhere. A path in it is as
:func:`layerstore.errors.printable` shows it, without a leading slash.
"""
