package erofs

import (
	"crypto/sha256"
	"encoding/binary"
	"hash/crc32"
	"io"
)

// bufferSize is how much is written at once.
const bufferSize = 1 << 18

// writer appends to a buffer that goes to w when it is full. The first error
// sticks; flush returns it.
type writer struct {
	w   io.Writer
	buf []byte
	pos int64 // bytes written, those in buf included
	err error
}

func (w *writer) flush() error {
	if w.err == nil && len(w.buf) > 0 {
		_, w.err = w.w.Write(w.buf)
	}
	w.buf = w.buf[:0]
	return w.err
}

// room makes sure that n <= bufferSize bytes can be appended.
func (w *writer) room(n int) {
	if len(w.buf)+n > cap(w.buf) {
		w.flush() // sticks until the last flush
	}
	w.pos += int64(n)
}

// next appends n <= bufferSize zeros and returns them, to be written to before anything else
// is appended.
func (w *writer) next(n int) []byte {
	w.room(n)
	at := len(w.buf)
	w.buf = w.buf[:at+n]
	b := w.buf[at:]
	clear(b)
	return b
}

func (w *writer) u8(v byte) {
	w.room(1)
	w.buf = append(w.buf, v)
}

func (w *writer) u16(v uint16) {
	w.room(2)
	w.buf = binary.LittleEndian.AppendUint16(w.buf, v)
}

func (w *writer) u32(v uint32) {
	w.room(4)
	w.buf = binary.LittleEndian.AppendUint32(w.buf, v)
}

func (w *writer) str(s string) {
	w.room(len(s))
	w.buf = append(w.buf, s...)
}

func (w *writer) bytes(b []byte) {
	w.room(len(b))
	w.buf = append(w.buf, b...)
}

func (w *writer) zero(n int) {
	for n > 0 {
		k := min(n, len(zeros))
		w.bytes(zeros[:k])
		n -= k
	}
}

// zeros is never written to.
var zeros [BlockSize]byte

// align writes zeros up to a multiple of unit.
func (w *writer) align(unit int64) { w.zero(int(roundUp(w.pos, unit) - w.pos)) }

func (img *Image) emit(out *writer) {
	img.emitSuper(out)
	out.align(BlockSize)
	for _, x := range img.xattrs.order {
		emitEntry(out, x)
	}
	out.align(BlockSize)
	img.emitInodes(out)
	out.align(BlockSize)
	img.emitData(out)
}

// emitSuper writes the superblock and the device table.
func (img *Image) emitSuper(out *writer) {
	table := make([]byte, superOffset+superSize+slotSize*len(img.o.Devices))
	incompat := uint32(0)
	if img.chunked {
		incompat |= incompatChunks
	}
	if len(img.o.Devices) > 0 {
		incompat |= incompatDevs
	}
	le := binary.LittleEndian
	sb := table[superOffset:]
	le.PutUint32(sb[0:], magic)
	le.PutUint32(sb[8:], compatChecksum|compatMtime)
	sb[12] = blockBits
	le.PutUint16(sb[14:], uint16(img.nids[0]))
	le.PutUint64(sb[16:], uint64(len(img.t.Inodes)))
	le.PutUint32(sb[36:], img.blocks)
	le.PutUint32(sb[40:], img.inodeStart)
	le.PutUint32(sb[44:], img.xattrStart)
	uuid := img.uuid()
	copy(sb[48:], uuid[:])
	copy(sb[64:], volumeName)
	le.PutUint32(sb[80:], incompat)
	le.PutUint16(sb[86:], uint16(len(img.o.Devices)))
	if len(img.o.Devices) > 0 {
		le.PutUint16(sb[88:], (superOffset+superSize)/slotSize)
	}
	for i, d := range img.o.Devices {
		slot := sb[superSize+slotSize*i:]
		copy(slot[:63], d.Tag)
		le.PutUint32(slot[64:], d.Blocks)
	}

	var first [BlockSize]byte
	copy(first[:], table)
	sum := crc32.Checksum(first[superOffset:], crc32.MakeTable(crc32.Castagnoli))
	le.PutUint32(sb[4:], ^sum)
	for len(table) > 0 {
		n := min(len(table), bufferSize)
		out.bytes(table[:n])
		table = table[n:]
	}
}

// uuid names the rootfs, not the image: images of one rootfs that differ in
// their devices share it.
func (img *Image) uuid() [16]byte {
	sum := sha256.Sum256([]byte("hydrofoil erofs " + string(img.t.ChainID)))
	var u [16]byte
	copy(u[:], sum[:])
	u[6] = u[6]&0x0f | 0x80
	u[8] = u[8]&0x3f | 0x80
	return u
}

func (img *Image) emitInodes(out *writer) {
	base := out.pos
	block := img.dataStart
	nextDir := 0
	for i := range img.t.Inodes {
		n := &img.t.Inodes[i]
		out.zero(int(base + int64(img.nids[i])*nidUnit - out.pos))

		var d *dir
		size := n.Size
		if fileType(n.Mode) == typeDir {
			d = &img.dirs[nextDir]
			nextDir++
			size = d.size
		}
		s := img.shape(n, size)
		bits := 0
		var chunks int64
		field := uint32(0)
		switch {
		case s.layout == layoutChunks:
			bits, chunks = chunkBits(size)
			field = chunkIndexes | uint32(bits)
		case s.blocks > 0:
			field = block
			block += uint32(s.blocks)
		case fileType(n.Mode) == typeChar || fileType(n.Mode) == typeBlock:
			field = n.Minor&0xff | n.Major<<8 | n.Minor&^0xff<<12
		}
		units := uint16(0)
		if x := img.xattrs.sizes[n.Xattrs]; x > 0 {
			units = uint16((x-xattrHeader)/4 + 1)
		}
		b := (*[inodeSize]byte)(out.next(inodeSize))
		le := binary.LittleEndian
		le.PutUint16(b[0:], uint16(extended|s.layout<<1))
		le.PutUint16(b[2:], units)
		le.PutUint16(b[4:], uint16(n.Mode))
		le.PutUint64(b[8:], uint64(size))
		le.PutUint32(b[16:], field)
		le.PutUint32(b[20:], uint32(i)+1)
		le.PutUint32(b[24:], n.UID)
		le.PutUint32(b[28:], n.GID)
		le.PutUint64(b[32:], uint64(n.Mtime))
		le.PutUint32(b[40:], n.MtimeNsec)
		le.PutUint32(b[44:], n.Nlink)
		img.emitXattrs(out, n.Xattrs)

		switch {
		case s.layout == layoutChunks:
			out.align(indexSize)
			img.emitIndexes(out, n.Content, bits, chunks)
		case s.layout == layoutInline && d != nil:
			img.emitDir(out, d, func(b int64) bool { return b == size/BlockSize })
		case s.layout == layoutInline:
			out.str(n.Target)
		}
	}
}

func (img *Image) emitIndexes(out *writer, content int32, bits int, chunks int64) {
	e := Extent{Device: Hole}
	if !img.isHole(content) {
		e = img.o.Place(int(content))
	}
	for c := range chunks {
		out.u16(0)
		if e.Device == Hole {
			out.u16(0)
			out.u32(nullBlock)
			continue
		}
		out.u16(uint16(e.Device + 1))
		out.u32(e.Block + uint32(c<<bits))
	}
}

// emitData writes the blocks that emitInodes gave away, in the same order.
func (img *Image) emitData(out *writer) {
	nextDir := 0
	for i := range img.t.Inodes {
		n := &img.t.Inodes[i]
		switch fileType(n.Mode) {
		case typeDir:
			d := &img.dirs[nextDir]
			nextDir++
			s := img.shape(n, d.size)
			if s.blocks == 0 {
				continue
			}
			img.emitDir(out, d, func(b int64) bool {
				out.align(BlockSize)
				return b < s.blocks
			})
		case typeSymlink:
			if s := img.shape(n, n.Size); s.blocks > 0 {
				out.str(n.Target)
			}
		}
		out.align(BlockSize)
	}
}
