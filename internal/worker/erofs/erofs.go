// Package erofs writes EROFS metadata images: every directory, inode and xattr
// of a rootfs, with file data in other files (arenas) that are given to the
// kernel as extra devices.
//
// # What is written
//
// The image is a subset of the format that Linux documents in
// Documentation/filesystems/erofs.rst and fs/erofs/erofs_fs.h, readable since
// Linux 5.16 (device tables; file-backed mounts need 6.12). Numbers are
// little-endian, blocks are 4 KiB. The same TOC, devices and places give the
// same bytes. In order:
//
//	block 0     1024 zeros, superblock (128 bytes), device slots (128 each,
//	            going on in the next blocks when there are more than 23)
//	xattr area  shared xattr entries; absent when nothing is shared
//	inode area  inodes, in the order of the TOC
//	data area   blocks of directories and of long symlinks
//
// # Superblock
//
//	0  magic e0f5e1e2     4  checksum          8  compat: 1 checksum, 2 mtime
//	12 block bits: 12     13 extension slots 0 14 u16 number of the root inode
//	16 u64 inodes         24 u64 epoch 0       32 u32 epoch nanoseconds 0
//	36 u32 blocks         40 u32 inode area    44 u32 xattr area (blocks)
//	48 UUID               64 volume name       80 incompat: 4 chunks, 8 devices
//	84 u16 0              86 u16 devices       88 u16 first device slot / 128: 9
//	90 zeros up to 128
//
// The checksum is CRC-32C, without the final inversion, of the first block from
// the superblock on, with the checksum itself zero. The UUID is made from the
// chain ID, version 8 of RFC 9562. A device slot is a tag of 64 bytes, the
// device's blocks (u32), and zeros: no device is mapped into the address space
// of the image.
//
// # Inodes
//
// The number of an inode is its place: bytes from the start of the inode area,
// divided by 32. The root is the first, number 0. Every inode is of the
// extended form, 64 bytes, since only that has times and 32-bit owners:
//
//	0  u16 format: 1 | layout<<1   2  u16 xattr units     4  u16 mode
//	6  u16 0                       8  u64 size            16 u32 by layout
//	20 u32 serial number           24 u32 uid             28 u32 gid
//	32 u64 mtime                   40 u32 nanoseconds     44 u32 links
//	48 16 zeros
//
// Then the xattr area of the inode, if any, and what its layout needs. The
// field at 16 is the device number (minor&0xff | major<<8 | (minor&^0xff)<<12)
// of character and block devices, and otherwise as follows.
//
//   - Layout 0, plain: the field is the first block of the data, 0 when there
//     is none. Empty files, devices, FIFOs and sockets; directories and symlinks
//     whose last piece is too long to be inline.
//   - Layout 2, inline: as plain, but the last piece of the data, less than a
//     block, follows the xattrs. Used for directories and symlinks when inode,
//     xattrs and piece together fit in one block; they are never spread over two.
//   - Layout 4, chunks: regular files with data. The field is 0x20 | bits, where
//     a chunk has 2^bits blocks. After the xattrs, aligned to 8 bytes, comes one
//     index for each chunk: u16 0, u16 device (1 is the first), u32 block. A
//     content is contiguous in its arena, so the least chunk size that holds the
//     whole is taken and there is one index; only beyond 8 TiB (31 bits) there
//     are two. The block ffffffff is a hole.
//
// An inode that fits in what is left of a block, or in any block, together with
// its xattrs and indexes, does not cross into the next: stat and open cost one
// block.
//
// # Directories
//
// The data of a directory are blocks that each start with dirents of 12 bytes
// (u64 inode number, u16 offset of the name in the block, u8 type, u8 0),
// followed by the names. The first name's offset tells how many dirents there
// are. Names, "." and ".." among them, are sorted bytewise throughout the
// directory. A block that is not the last is filled with zeros; the size of the
// directory ends with the last name.
//
// # Xattrs
//
// The xattr area of an inode is a header of 12 bytes (u32 0, u8 count of shared
// entries, 7 zeros), the u32 places of shared entries (bytes from the start of
// the shared area, divided by 4), and the other entries. An entry is u8 length
// of the name, u8 namespace, u16 length of the value, name, value, zeros up to
// a multiple of 4. "xattr units" is the area's size less 8, divided by 4.
// Namespaces: 1 user., 2 system.posix_acl_access, 3 system.posix_acl_default
// (both with an empty name), 4 trusted., 6 security. An xattr outside of these
// cannot exist on Linux and is left out, as unpacking it would. An entry is
// shared when that saves bytes.
//
// # Limits
//
// 65,535 devices; 2^32-1 blocks (16 TiB) a device and the image; names of 255
// bytes; symlinks of 4,095; an xattr name of 255 bytes after its namespace, a
// value of 65,535, 256 KiB of xattrs an inode. What is beyond is an error. The
// 48-bit block addresses of Linux 6.15 are not needed for any of it.
//
// The fingerprint xattr by which Linux 7.0 shares page cache between mounts is
// not written: kernels that do not know it show it as an ordinary xattr, and
// the rootfs would not be exact.
package erofs

import (
	"fmt"
	"io"

	"hydrofoil.dev/foil/internal/format/toc"
)

// BlockSize is the size of a block of images and arenas, in bytes.
const BlockSize = 1 << blockBits

// Hole, as Extent.Device, is the place of a content that is all zeros and
// rests nowhere.
const Hole = -1

// Options say where the data is.
type Options struct {
	// Devices are the extra devices in the order in which they are given to
	// the mount. At most 65,535.
	Devices []Device
	// Place returns where a content, an index into TOC.Contents, starts. It is
	// asked twice, by Plan and by Write, for each inode that has the content and must answer the same,
	// but not for a content that has only holes. Contents are contiguous.
	Place func(content int) Extent
}

// Device is one extra device: an arena.
type Device struct {
	Blocks uint32 // its size
	Tag    string // free text for people, at most 63 bytes kept
}

// Extent is a place on a device.
type Extent struct {
	Device int    // index into Options.Devices, or Hole
	Block  uint32 // of BlockSize bytes, from the start of the device
}

// Plan plans the image of t. It returns an error that names the path of what cannot be expressed in EROFS, or
// that says what is inconsistent in t or o.
func Plan(t *toc.TOC, o Options) (*Image, error) {
	img := &Image{t: t, o: o}
	if err := img.plan(); err != nil {
		return nil, fmt.Errorf("plan EROFS image of %s: %w", t.ChainID, err)
	}
	return img, nil
}

// Size is how many bytes it takes.
func (img *Image) Size() int64 { return int64(img.blocks) * BlockSize }

// Write writes it to w, front to back, once.
func (img *Image) Write(w io.Writer) error {
	out := &writer{w: w, buf: make([]byte, 0, bufferSize)}
	img.emit(out)
	if err := out.flush(); err != nil {
		return fmt.Errorf("write EROFS image of %s: %w", img.t.ChainID, err)
	}
	if out.pos != img.Size() {
		return fmt.Errorf("write EROFS image of %s: %d bytes written, %d planned", img.t.ChainID, out.pos, img.Size())
	}
	return nil
}

// Write plans the image of t and writes it to w.
func Write(w io.Writer, t *toc.TOC, o Options) error {
	img, err := Plan(t, o)
	if err != nil {
		return err
	}
	return img.Write(w)
}
