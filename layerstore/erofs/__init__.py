"""EROFS, the file system a layer is: written, read, checked and dumped in Python.

What is written is the *metadata image*: superblock, device table, inodes, directories, xattrs, symbolic links and
small files. The data of larger files lies in packs, which are the image's extra devices::

    Directory ─▶ placement ─▶ writer ─▶ metadata image ─▶ reader ─▶ tree ─▶ Directory
     (tree)      (where each          (layout.py says        │
                  inode goes)          where data lies)      ├─▶ checker   (before a kernel sees a foreign image)
                                                             └─▶ dump      (text, for people and golden files)

    block 0            superblock at 1024, device table from 1152 (over as many blocks as it needs)
    then               inodes in 32-byte slots: 64 bytes each, then xattrs, then chunk indexes or the inline tail
    from a full block  directory blocks, and the few symbolic links that are too long to be inline

Nouns:

* *nid*: the number of an inode: its byte offset in units of 32 bytes.
* *tail*: the last, partial block of a file, directory or link, stored behind the inode; it never crosses a block.
* *index*: 8 bytes that say on which device and block a chunk of a file begins.
* *slot*: 128 bytes of the device table; the first device is number 1, and 0 is the image itself.
* *unified address*: a block number in the concatenation image ‖ device 1 ‖ device 2 …, the *flat form*, which is the
  same file system without extra devices. A slot's ``uniaddr`` is where its device begins there.
* *trail*: the way from the root to an entry, kept as a chain, so that a path is built only for a message.

Modules: ``format`` (records and numbers of the on-disk format), ``layout`` (chunk addresses and devices as values),
``crc32c``, ``xattrs`` and ``directory`` (those two structures, both ways), ``placement`` and ``writer``, ``volume``
(superblock and devices), ``node`` and ``reader``, ``tree``, ``checker``, ``dump``, ``trail``.

An :class:`~layerstore.erofs.reader.Image` doesn't change after it was opened, apart from a cache whose every step is
atomic under the interpreter lock, and may be used by several threads if its source may. Writing has no shared state.
"""
