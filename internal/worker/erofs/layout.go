package erofs

const (
	blockBits = 12

	superOffset = 1024
	superSize   = 128
	slotSize    = 128 // of the device table
	inodeSize   = 64
	nidUnit     = 32 // bytes
	direntSize  = 12
	indexSize   = 8 // of a chunk

	magic          = 0xe0f5e1e2
	compatChecksum = 1
	compatMtime    = 2
	incompatChunks = 4
	incompatDevs   = 8
	volumeName     = "hydrofoil"

	layoutPlain  = 0
	layoutInline = 2
	layoutChunks = 4
	extended     = 1

	chunkIndexes = 0x20
	maxChunkBits = 31 // in blocks
	nullBlock    = 0xffffffff

	maxDevices    = 1<<16 - 1
	maxName       = 255
	maxTarget     = 4095
	maxXattrUnits = 1<<16 - 1
)

// File types as in dirents, by the type bits of the mode shifted right by 12.
// Zero: no such type.
var fileTypes = [16]byte{
	0o010: 1, // regular
	0o004: 2, // directory
	0o002: 3, // character device
	0o006: 4, // block device
	0o001: 5, // FIFO
	0o014: 6, // socket
	0o012: 7, // symlink
}

const (
	typeRegular = 1
	typeDir     = 2
	typeChar    = 3
	typeBlock   = 4
	typeSymlink = 7
)

func fileType(mode uint32) byte { return fileTypes[mode>>12&15] }

func roundUp[T int | int64 | uint64](n, unit T) T { return (n + unit - 1) / unit * unit }

// chunkBits returns the binary logarithm of the chunk size in blocks for a
// content of size bytes, and how many chunks the content has.
func chunkBits(size int64) (bits int, chunks int64) {
	for bits < maxChunkBits && int64(BlockSize)<<bits < size {
		bits++
	}
	chunk := int64(BlockSize) << bits
	return bits, (size-1)/chunk + 1
}
