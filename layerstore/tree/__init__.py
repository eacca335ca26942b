"""Trees in memory: OCI layers applied to them, local directories read into them, trees compared and stacked.

::

    tar members ─▶ merge.Merge ──┐                        ┌─▶ the EROFS writer
    local directory ─▶ local.scan ┼─▶ Directory (inode) ──┼─▶ difference.difference   what changed
    EROFS image ─▶ its reader ───┘                        ├─▶ difference.delta        lower + delta == upper
                                                          └─▶ union.merge_overlay     what a stack shows

=============  ======================================================================================
``inode``      what a tree is made of: Directory, File, Symlink, Special, Whiteout, and their Attrs
``path``       the names of members and the targets of symlinks, as components that can't leave the root
``resolve``    follows symlinks inside a tree, never outside
``attributes`` overlayfs's own xattrs escaped
``view``       a tree that layers change copy-on-write, and that knows what the current layer has added
``merge``      the meaning of a layer: whiteouts, opaque directories, hard links, duplicates
``links``      which names share an inode
``difference`` two trees compared, and the overlay layer that turns one into the other
``union``      what overlayfs shows for a stack of trees, and where they conflict
``local``      a directory of this machine as a tree
=============  ======================================================================================

Two forms. A *whole* tree has no Whiteout and no opaque directory: a base, a scanned directory, a union. A *delta* is
an overlay layer over one particular whole tree, its lower.

Trees are shared, not copied: a delta holds inodes of its lower, a union those of its layers, and hard links are one
object under several names. So whoever holds a finished tree treats it as immutable, and adds to Files only what
does not change their meaning (``chunks``). Nothing here takes locks: one thread builds a tree, any may read it.

Depth is bounded by nothing but memory, therefore no function recurses.
"""
