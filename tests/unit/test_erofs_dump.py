from __future__ import annotations

import stat

import pytest
from support.erofs_images import Forgery, Packs, attrs, directory, image_of, inline, symlink, zoo

from layerstore.erofs.dump import dump
from layerstore.errors import MalformedError
from layerstore.tree.inode import Special, Whiteout

GOLDEN = """\
superblock
  checksum 0x3aff4e1b
  feature_compat 0x7 SB_CHKSUM MTIME XATTR_FILTER
  feature_incompat 0xc CHUNKED_FILE DEVICE_TABLE
  uuid b8a4ac91-467c-82f2-a4a4-9185c5cafb07
  block size 4096
  blocks 1
  inos 7
  root nid 44
  epoch 0 fixed_nsec 0 build_time 0
  meta_blkaddr 0 xattr_blkaddr 0
  extra_devices 2 devt_slotoff 9
device 1
  tag ccd521371b29352a7b02a04c2408c4e0ceacba97fc3ce449edd8897cb2397410
  blocks 2
  uniaddr 1
device 2
  tag b8a9f56c4de5261c5ec85b42a4977c94712d8d2ce16cc4cafd14e511cfd6f52b
  blocks 1
  uniaddr 3
inode /
  nid 44 at 1408 extended
  mode 0040755 uid 0 gid 0 nlink 3 ino 1
  mtime 1600000000 nsec 0
  size 143 layout FLAT_INLINE
  data 0+143 at 1472 inline
  block 0
    . directory 44
    .. directory 44
    chunks file 51
    gone char 54
    h1 file 56
    h2 file 56
    line\\x0afeed symlink 59
    opaque directory 64
    sda block 62
inode /chunks
  nid 51 at 1632 extended
  mode 0100644 uid 0 gid 0 nlink 1 ino 2
  mtime 1600000000 nsec 5
  size 24676 layout CHUNK_BASED
  chunks of 8192: 4 entries of 8 bytes at 1696
    0 device 1 block 0
    1 hole
    2 hole
    3 device 2 block 0
inode /gone
  nid 54 at 1728 extended
  mode 0020000 uid 0 gid 0 nlink 1 ino 3
  mtime 1600000000 nsec 0
  size 0 layout FLAT_PLAIN
  whiteout
inode /h1
  nid 56 at 1792 extended
  mode 0100644 uid 0 gid 0 nlink 2 ino 4
  mtime 1600000000 nsec 0
  size 6 layout FLAT_INLINE
  data 0+6 at 1856 inline
link /h2
  nid 56
inode /line\\x0afeed
  nid 59 at 1888 extended
  mode 0120777 uid 0 gid 0 nlink 1 ino 5
  mtime 1600000000 nsec 0
  size 2 layout FLAT_INLINE
  target t\\xff
  data 0+2 at 1952 inline
inode /opaque
  nid 64 at 2048 extended
  mode 0040700 uid 0 gid 0 nlink 2 ino 7
  mtime 1600000000 nsec 0
  size 27 layout FLAT_INLINE
  name filter 0xffefffff
  xattr trusted.overlay.opaque = 79
  data 0+27 at 2144 inline
  block 0
    . directory 64
    .. directory 44
inode /sda
  nid 62 at 1984 extended
  mode 0060660 uid 1 gid 2 nlink 1 ino 6
  mtime -3 nsec 0
  size 0 layout FLAT_PLAIN
  rdev 8:1
"""


def sample() -> list[str]:
    packs = Packs(2)
    one = inline(b"linked")
    opaque = directory(mode=0o700)
    opaque.opaque = True
    root = directory(
        {
            b"chunks": packs.file(
                attrs(stat.S_IFREG, nsec=5), [b"1" * 8192, None, None, b"2" * 100], bits=1, spread=True
            ),
            b"gone": Whiteout(attrs(stat.S_IFCHR, 0)),
            b"h1": one,
            b"h2": one,
            b"line\nfeed": symlink(b"t\xff"),
            b"opaque": opaque,
            b"sda": Special(attrs(stat.S_IFBLK, 0o660, 1, 2, -3), 8, 1),
        }
    )
    return list(dump(image_of(root, packs.devices)))


def test_golden() -> None:
    assert "\n".join(sample()) + "\n" == GOLDEN


def test_stable_and_one_line_each() -> None:
    assert sample() == sample()
    root, packs = zoo()
    lines = list(dump(image_of(root, packs.devices)))
    assert all(line.isprintable() for line in lines)
    assert sum(line.startswith("inode ") for line in lines) == image_of(root, packs.devices).superblock.inos


def test_what_can_be_read_comes_before_the_error() -> None:
    forgery = Forgery(directory({b"d": directory({b"e": directory()})}))
    lines = []
    with pytest.raises(MalformedError, match="two names"):
        for line in dump(forgery.dirent(b"/d", b"e", nid=forgery.original.root.nid).image()):
            lines.append(line)
    assert "inode /d" in lines
