"""Lazy layers: data come when the kernel asks for them, and a read is right or fails.

::

                     holds fanotify group, journal, descriptors of packs, the API's socket
                                    holder ──────────────┐
                         fork ┌────────┴───────┐ fork     │ fork
     kernel ─ event ─▶ keeper │                │ worker ◀─┤─ FUSE server ◀─ read ─ kernel
            ◀─ allow ─        └──── wants ────▶│          └─── wants ───▶
                    frame map (shared memory) ◀┘ fetch, verify, write, mark READY

* **holder**: the process that ``node run`` starts. Holds what must not close, restarts the others, does nothing else.
* **keeper**: reads the fanotify group. Answers at once what is there, asks the worker for what isn't, and denies (EIO)
  what doesn't come before its deadline. Unanswered events are in the **journal**, so that a successor can answer them.
* **worker**: cache, fetching, sandboxes, the API (:mod:`overlay.service`). Can crash: readers wait for its successor.
* **frame map**: which frames may be read (:mod:`layerstore.cache.framemap`). Nobody believes anything else.

Zeros can only be read if holder, keeper and worker end at the same moment and nobody else (systemd's file descriptor
store) holds the group: then what was read meanwhile is named as suspect when the service starts again.

Modules, by process:

=============  ======================================================================================
`link`         messages between processes, with descriptors
`rendezvous`   where processes meet: the holder's socket, and the locks of holders and keepers
`holdings`     the descriptors that outlive processes; how another holder takes them over
`member`       a process as its holder sees it: its end, messages that never wait
`asks`         what the worker has asked of front ends, in order
`holder`       the holder; what the others do when it ends
`fanotify`     events of the kernel: constants, structures, answers
`journal`      unanswered events, in memory that outlives a keeper
`keeper`       the keeper's loop: `readers` that wait, `descriptors` and their numbers, `spinning` (its poll)
`fuse`         the FUSE server: `packfiles` are its files
`wants`        what the FUSE server has asked the worker for
`outlet`       messages that don't block their sender
`quietlog`     a log that may fail, and repeats nothing
`demand`       the worker's side of wants
`custody`      the worker's side of the holder
`guards`       which packs are watched, by which backend, on whose behalf
`choice`       which backend works here
=============  ======================================================================================

**Messages** (:mod:`overlay.lazy.link`). Packs are named by the hex of their sha256; times are CLOCK_MONOTONIC seconds.

keeper, FUSE server → worker::

    {"want": 17, "pack": hex, "first": 3, "count": 2, "deadline": 1234.5, "pid": 4711}
worker → keeper, FUSE server, once for each::

    {"got": 17}   or   {"failed": 17, "why": "one line"}
any → holder, first of all; keeper and worker have a lock each before they say so::

    {"hello": role, "pid": 4711}
FUSE server → holder::

    {"mounted": true, "directory": path}     it serves; again to each successor of a holder, followed by
    {"has": hex} + [data, frame map]         for each pack that it guards
holder → keeper, FUSE server, one thing at a time for each pack::

    {"guard": hex} + [data, frame map]   answered {"guarded": hex} or {"unguarded": hex, "why": "…"}
    {"release": hex}                     answered {"released": hex}
    {"peer": "worker"} + [link]          a new link to the worker; the one before is dead
    {"end": true}                        to the FUSE server: unmount, and end
worker → holder, again to each successor until it is answered; each answered {"done": 5} or {"failed": 5, "why": "…"}::

    {"hold": 5, "pack": hex, "with": "keeper" or "fuse"} + [data, frame map]
    {"drop": 6, "pack": hex, "with": …}
    {"start": 7, "service": "fuse", "directory": path}   done with the "directory" that is served, perhaps another
    {"status": 8}                            done with "pids" and "restarts", by process
    {"stopped": 9}                           mounts are gone: end everything
holder → worker::

    {"peer": "keeper" or "fuse"} + [link]    a new front end, or one that was restarted
    {"lost": "fuse"}                         its server has ended, or seems to have; perhaps more than once
    {"stop": true}                           the holder was told to end; again to each successor of a worker
"""
