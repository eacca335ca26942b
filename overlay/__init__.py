"""Place: layers of the node's cache become root filesystems that programs run in.

::

    cache (metadata images, packs)
        │ one file-backed EROFS mount per layer and node          erofs, layers
        ▼
    <root>/layers/<hex>/mnt  ──┐
    <root>/layers/<hex>/mnt  ──┼─ lowerdir+ ─▶ overlayfs ─▶ <root>/sandboxes/<id>/rootfs
    <root>/layers/<hex>/mnt  ──┘                 ▲                      │
    <root>/sandboxes/<id>/{upper,work} ──────────┘                      ├─▶ bundle: config.json for an OCI runtime
      (or inside an ext4 image of --scratch bytes)                      └─▶ execution: runc, crun, or a chroot

Modules, from the kernel upwards:

=============  ======================================================================================
`mountapi`     the mount system calls and openat2: constants, prototypes, errors with the kernel's own words
`fspath`       paths of any bytes and length as fsconfig values
`mountinfo`    /proc/<pid>/mountinfo
`erofs`        a metadata image and its packs → a mount
`overlayfs`    lower directories, upper and work → a mount; what an upper's filesystem has to offer
`layerkey`     names of layer mounts: digest, and in which way the packs are reached
`layers`       `LayerMounts`: layers mounted once in each way, shared, released with the last user
`direct`       raw packs of a store as a layer's devices
`ready`        `ReadyLayers`: metadata and packs of layers, there or guarded, for as long as somebody needs them
`format`       `state.json` of a sandbox
`scratch`      an ext4 image that bounds upper and work
`detached`     uppers taken where nothing is mounted, so that the number of sandboxes doesn't slow the next one
`deletion`     whole trees, whatever a sandbox left in them
`holders`      who keeps a mount busy
`runs`         what runs in a sandbox, so that it can be stopped
`sandbox`      `Sandboxes`: create, list, get, suspend, resume, remove, recover
`inroot`       files of an image, resolved inside its root
`process`      image config → what to run, as whom, where
`bundle`       the OCI runtime bundle
`chroot`       running without a runtime
`signals`      waiting for a child and passing signals on
`execution`    `run`: picks runc, crun or chroot
`privilege`    the one line for those who aren't root
`probe`        what this kernel and machine can do, for `doctor`
`images`       images and stacks as a node finds them in stores
`recording`    recorders: processes that see what one sandbox reads
`recorded`     sandboxes on mounts of their own, whose reads are recorded
`planned`      what is fetched ahead for sandboxes, by plans; `errands` are the threads that look for those
`node`         a root directory: a cache and sandboxes
`lazy`         data that come when they are read: the processes of a node
`service`      the node service: who asks for sandboxes, and how
=============  ======================================================================================

**Locks.** A root's cache has one owner at a time, the worker of its node service or a program that has a `Node`. For
sandboxes and layers there is no global lock: several processes and threads may look at them, make and remove them.

- A sandbox is guarded by flock on its directory: exclusive to create, resume, remove or clear it. A directory whose
  lock is free and that has no ``state.json`` is a leftover. ``state.json`` is the commit: written last, removed first.
- A layer's users are names in ``<hex>/users``. To add a name needs no lock; ``rmdir users`` succeeds only for the
  last one out and makes later arrivals wait: mounting and unmounting happen under flock on ``<hex>/lock``.
- Whether something is mounted is asked of the kernel (``st_dev``), never of a file.

**Durability.** Nothing here is fsynced and overlays are mounted ``volatile``: a sandbox lives until the machine stops.
Its mounts don't survive that, so neither need its bytes; what must is a checkpoint's business.
"""
