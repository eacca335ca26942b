"""Real OCI images, built on the spot from Debian's packages and the Python package index.

::

    recipes.py ──▶ trees.py (mmdebstrap, pip, edits) ──▶ layers.py (differences, GNU tar, gzip) ──▶ layout.py (OCI)

``python -m benchmarks.images DIR [IMAGE ...]`` builds what is missing in DIR and prints times and sizes::

    DIR/debian/     OCI layout: minbase, full, changed, workspace, tools, workloads
    DIR/django/     OCI layout: base and one tag for each of ten Django releases
    DIR/toolkit/    a tree of evaluator tools
    DIR/demo/       OCI layout: base and workspace of scripts/demo
    DIR/small/      OCI layout: the image that tests share
    DIR/trees/      root file systems that layers are differences of; DIR/log/ what the programs printed

- **recipe**: a function that makes one or more tags of a layout, or a tree.
- **member**: a name that a layer's tar holds. **whiteout**: the mark in a layer for a name that it removes.

Trees are never edited in place: an edit is made on a copy whose files are hardlinks, and replaces the files it changes.
The mirror and the package index are those that the machine has configured. Given the same packages, a layer is the
same on every run: names are sorted, and no time is later than :data:`layers.EPOCH`. The exception are a few .pyc files
of base trees, which packages compile as they are configured, in bytes that depend on the compiling process.
One build at a time works in DIR (a lock on DIR/lock). Everything here runs as root.
"""
