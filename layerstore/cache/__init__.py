"""The node's local copy of layers: metadata images, and sparse files of raw packs.

::

    cache/lock                         flock of the one process that owns the cache
    cache/clean                        its last owner closed it; gone while somebody owns it
    cache/pins.json                    what is kept whether it is used or not
    cache/meta/sha256/<hex>            a raw metadata image, checked before it got its name
    cache/meta/sha256/<hex>.uses       which blocks of which packs it needs
    cache/packs/sha256/<hex>/data      the raw pack; what has not been fetched is a hole
    cache/packs/sha256/<hex>/frames    its frame index, and which frames are recorded as present
    cache/packs/sha256/<hex>/origins   where it can be had

A frame goes from state to state::

                        write                  sync (a group at a time)
    MISSING ──────────────────────────▶ READY ──────────────────────────▶ READY, and recorded on disk
       ▲                                 ▲ │        fails                    │
       │             verify: right       │ └──────────────────▶ MISSING      │ crash
       └──────────── UNVERIFIED ─────────┘                                   │
        verify: wrong    ▲ └─────────────────────────────────────────────────┘

* ``cache`` owns everything: uses, pins, the limit. ``packs`` has one object for each open pack; ``frames`` is its file
  of that name, ``framemap`` the states of its frames, in memory that other processes share. Besides: ``directories``
  (of packs, which appear and go as a whole), ``metadata``, ``pins``, ``status``, ``format`` (of the small files),
  ``holes`` and ``openers`` (the kernel's part).
* A frame may be read once its verified bytes are in the data file, by those who can see the frame map. It is recorded
  only once they are durable. What was recorded before a crash is hashed before it is read.
* Bytes of a frame that may be read are never taken out of the file of a pack in use.
* Files are named by the digest of what they hold, so all images of the node share them.
* Locks, in the order in which they are taken: the cache's ``_evicting``, the cache's ``_changed``, a pack's
  ``_syncing``, a pack's ``_changed``. No store and no fsync is waited for under the ``_changed`` ones, so whoever asks
  for the state of things gets an answer.
"""
