"""Exports: what we publish, as others read it. A store is only read; where it goes is a target.

::

    store ─▶ OpenLayer ─┬─▶ flat ─────▶ containerd ───────▶ image of EROFS layers ─┐
       (each layer)     │     └───────▶ contentcache ─────▶ DIR/sha256/xx/….erofs  │
                        └─▶ tarlayer ─▶ ociimage ────────▶ image of tar layers ────┴─▶ target ─▶ oci:, …
    packs ─▶ gather (frames verified, read ahead) ─▶ file data of all of them, in the order of the tree

Nouns:

* *flat form*: one layer as one file: a metadata image, and behind it the data that the layer refers to. No device
  table, no ``device=``: whatever mounts EROFS mounts it. It is not the concatenation of metadata image and packs: of a
  pack shared with other images only what this layer uses is there, each chunk once, in the order of the tree. So it
  depends on the tree alone, and not on which packs the store happened to have.
* *form*: which of containerd's releases takes it: ``2.1`` (to 2.2) or ``2.3`` (and later). The layers are the same
  files; media types and required OS features differ.
* *content cache*: a directory of flat forms by the diff ID of the layer that each stands for, which containerd's
  EROFS snapshotter (2.4) looks into before it downloads anything.
* *tar layer*: a layer as an ordinary image has it, whiteouts as ``.wh.`` members.
* *target*: takes blobs, and at last the manifest under its tag, all at once or not at all.

Modules: ``gather`` (file data, in order), ``flat``, ``containerd``, ``contentcache``, ``tarheader`` and ``tarlayer``,
``ociimage``, ``compress`` (gzip and zstd, by several threads, the same bytes whatever their number), ``document``
(config and manifest), ``exported`` (the last step), ``target`` and ``targetname``, ``layouttarget``, ``archivetarget``,
``registrytarget``.

Threads: one builds the result and writes it; a pool of the caller's reads, verifies and compresses. Memory is that of
the tree (see :mod:`layerstore.tree.inode`) and of some tens of megabytes of data under way, whatever the sizes.
"""
