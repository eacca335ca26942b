"""The node's local copy of layers: metadata images, and sparse files of raw packs.

::

    cache/meta/sha256/<hex>            a raw metadata image, checked before it got its name
    cache/packs/sha256/<hex>/data      the raw pack; what has not been fetched is a hole
    cache/packs/sha256/<hex>/frames    its frame index, and which frames are there (format.py)

* A frame is present only once its data is durable; presence is recorded after that, never before.
* Files are named by the digest of what they hold, so all images of the node share them.
* Whoever fills a pack holds the lock (flock) of its ``frames``; readers need none.
"""
