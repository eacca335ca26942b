"""Recordings: what a sandbox reads, seen by a process of its own, which may die without a reader noticing.

::

    Recordings (worker) ─ starts, tells, stops ─▶ recorder ─▶ <root>/traces/NAME.jsonl.part ─ completion ─▶ NAME.jsonl
         │ devices, by which paths to mount                        ▲
         ▼                                                         │ layer, device, offset, length, when, who
    EROFS ── tells ─▶ tracepoints: pages of files, in rings ───────┤ ◀─ pages: inode → blocks, by the metadata image
      │                                                            │
      └──── read ──▶ events: copy of the pack's mount, marked ─────┤
                     passthrough: file of the recorder's FUSE mount┘

There are three ways to see reads; the first that works is taken, and all of them see the same blocks:

* **tracepoints**: EROFS says which pages it is about to read, and perf writes that into rings. No reader waits for us.
  Whatever the packs are (files, FUSE, NFS) makes no difference, nor does our death.
* **events**, for kernels without tracefs: each pack is opened through a copy of its mount that is attached nowhere, and
  the copy has a mark for pre-content events. Whoever reads the same file by its usual path raises none. When the
  recorder dies, the kernel lets its readers go on; whoever guards a pack that is not complete (:mod:`overlay.lazy`)
  does so all the same. Each read waits for an answer, 30 to 100 µs.
* **passthrough**, where there are no such events either (kernels before 6.14, packs on FUSE, NFS, tmpfs): packs are
  served through a FUSE mount of the recorder. It goes on serving when the recording has been stopped. When it dies,
  readers of that sandbox get EIO.

A sandbox is recorded over mounts that no other one uses. Such a mount is fresh, and its page cache empty: so all that
is read is seen, once, and again if it was evicted meanwhile.

**A recorder's life.** It ends when it is stopped, or when nothing is left that it could see: the last of its mounts is
gone. Then, and at SIGTERM, the trace is completed as if it had been stopped. It outlives the worker; the next one finds
it by its directory. If it is killed, what it had written stays, and ``stop`` completes that.

A recording's directory is ``<run directory>/recordings/<12 hex digits of sha256(id)>``, root's alone:

===============  ========================================================================================
``spec.json``    what is recorded, for the recorder and for the worker after next
``socket``       the recorder's, messages as :mod:`overlay.lazy.link` has them
``files``        where the FUSE mount is
``log``          what the recorder, or libfuse, had to say
===============  ========================================================================================

Modules:

=============  ==========================================================================================
`recordings`   `Recordings`: the worker's side; `recording` is one of them, `contact` talks to recorders
`spec`         what a recorder is told; the directory of a recording
`recorder`     the process: its messages, its end
`way`          what the ways have in common
`tracepoints`  reads seen by tracepoints: `perf` is the kernel's interface, `pages` knows inodes
`events`       reads seen by fanotify
`passthrough`  reads seen by FUSE
`programs`     who reads
`partial`      the trace while it grows; `accesses` keeps each block once
`completion`   the trace at its end: paths, waits, published
=============  ==========================================================================================

**Threads.** A recorder has one. With passthrough, libfuse's threads read, and note what they have read in a queue; the
main thread writes. Any thread may call `Recordings`.
"""
