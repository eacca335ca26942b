"""Packs: immutable, content-addressed files of 4 KiB-aligned file data, and how files are cut into them.

::

    File ──chunks.py──▶ chunk keys ──reuse.py──▶ addresses in packs the store has
                              │ the rest
                              └────writer.py──▶ one new pack: zstd frames ‖ chunk list ‖ frame index ‖ seek table
                                                     reader.py ◀── ranges of the stored blob

* **pack**: named by the sha256 of its raw bytes, whatever the compressed blob's digest is.
* **frame**: 256 KiB of raw pack, compressed alone, with its own sha256: the unit of fetch and verification.
* **chunk**: a piece of a file, padded to whole blocks, named by the BLAKE3 of the padded bytes: the unit of
  deduplication. Chunks lie in the pack one behind the other.

``zstd -d`` of the blob gives the raw pack. Packs never change, so readers need no locks; a writer belongs to one
thread.
"""
