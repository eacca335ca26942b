"""Stores: where layers are published, as blobs that references name.

::

    copying ──▶ Store ◀── verification          protocol.py   the contract; all else is written against it
                  ▲                             reading.py    whole blobs, checked as they are read
              WriteStore ◀── lease, upload      reach.py      what a manifest or index reaches
                  ▲                             names.py      the grammar of reference names
              PruneStore ◀── collect
               ▲      ▲         ▲
         directory  memory   objects            opening.py   any of them, by path or URL
             ▲                  │
   http: the same files,     bucket ◀── s3, anywhere (fsspec)       registry: a WriteStore in an OCI repository
   read only, by way of a
   web server

   copying, sync ──▶ transfer ──▶ composition ──▶ retrying, caching, singleflight     small wrappers: each is a Store
                                            └───▶ failover, verified, late            over another one

Uploads are alike in what they count (``counting``). ``directory`` is made of ``blobfile`` (blobs and uploads),
``lease``, ``layerstore/staging`` (files on their way to a name), ``locks``, ``clock`` and ``failures`` (what errors
of the disk mean); ``http`` of ``httpget`` (which answers are believed) and ``httpsocket`` (answers end, whatever the
server does); ``objects`` of ``collector`` (what publishers and collectors tell each other where there are no locks),
``objectlease``, ``objectblob``, ``remembered`` and ``ahead``; ``s3`` of ``s3client`` and ``s3parts``. ``transfer``
moves blobs, under leases on both sides. On disk, with documents as in ``format.py``::

    store.json              magic, version, features: what makes a directory a store
    blobs/<algorithm>/<hex> immutable bytes
    refs/<encoded name>     reference: name → descriptor of a manifest
    leases/<id>             pinned digests, and when they stop being pinned
    quarantine/…            corrupt blobs that ``verify`` took out of their names
    tmp/.tmp-…              scratch directories
    lock  refs.lock  clock  empty; flock(2) is held on the first two, the third's mtime is the store's time
    …/.tmp-<pid>-<random>   a file on its way to a name beside it; its writer holds flock on it (``staging.py``)

Nouns: a *blob* is bytes named by their digest; a *reference* is a name for a manifest; a *lease* pins digests that no
reference reaches yet; to *reach* is to follow descriptors, through manifests and indexes, at any depth. A *raw form* is
a blob that a descriptor names besides the compressed one it is of; it may be there or not (``reach.py``).

Publishing::

    with store.lease() as lease:
        lease.pin(digests)                      # from here on they are not collected
        for what is not there: upload, commit   # or is there: then it stays
        store.set_reference(name, target, expected=…, lease=lease, reaches=digests)

Collecting (``collect.py``) marks from references and leases without a lock, which yields a plan; then, in turns of a
few seconds under ``collecting``, it marks again and deletes what is unreachable both times and older than the grace
period. Any error while marking ends it before anything is deleted.

Locks. ``lock`` is taken shared by commit, pin, renew, set and delete of references, exclusively by collectors,
quarantine and the expiry of leases. ``refs.lock`` is taken exclusively around the compare-and-swap of a reference,
always after ``lock``. Both belong to open file descriptions, so the kernel releases them when their holder dies and no
stale lock can exist; no process id or host name ever decides who owns something. Waits are bounded. Readers take no
lock: they see files whole or not at all.
"""
