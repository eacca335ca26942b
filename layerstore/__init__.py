"""Content: images in, EROFS layers and packs out, stores, and a node's cache.

::

    oci/ tar/ ─▶ tree/ ─▶ pack/ erofs/ ─▶ store/ ─▶ cache/
       material.py   convert.py  image.py publish.py   opened.py

* **layer**: one EROFS filesystem for one role: a metadata image, and the packs that are its devices (``image.py``).
* **pack**: an immutable file of 4 KiB-aligned file data, named by the sha256 of its raw bytes (``pack/``).
* **store**: where layers are published (``store/protocol.py`` is the contract).

Nothing here prints, reads the environment or ends the process. Values are immutable and may be shared by threads;
what holds a file or a lock says so, and is a context manager.
"""
