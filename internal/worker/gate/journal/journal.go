// Package journal is shared memory in which a gate notes every event that it has read and not answered.
//
// It outlives the daemon, because the keeper holds it, and tells the next daemon what the kernel cannot: which
// range stands behind the number of an event that is already read. It never leaves the machine and ends with it.
//
// Layout, version 1. Integers are in the byte order of the machine.
//
//	header, 64 bytes
//	   0  8 bytes  magic "FOILGATE"
//	   8  uint32   version, 1
//	  12  uint32   slots that follow
//	  16  uint64   limit: every number that any holder of this gate ever read is below it
//	  24  zeros
//	slot, 40 bytes each
//	   0  uint64   device number of the arena (st_dev of the event's descriptor)
//	   8  uint64   inode number of the arena
//	  16  uint64   offset in the arena, bytes
//	  24  uint64   count, bytes; offset + count is below 2^63
//	  32  int32    number of the event, 0 or above
//	  36  uint32   state: 0 free, 1 read and not answered, 2 the same, but other events,
//	               noted or not, may wait under the same number
//
// A slot's state is written last when it is taken and first when it is freed,
// so a slot that says 1 or 2 is whole whenever its writer dies. A slot with any
// other state, or with values out of range, stands for nothing: its event is
// treated like one that was never noted.
package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	magic      = "FOILGATE"
	version    = 1
	headerSize = 64
	slotSize   = 40
	// newSlots is the length of a new journal: 640 KiB of address space, of which only what is used takes memory.
	newSlots = 16384

	slotFree   = 0
	slotTaken  = 1
	slotShared = 2
)

// Record is what a slot says of one event.
type Record struct {
	Inode  Inode
	Off, N int64 // bytes of the arena
	Number int32 // by which the event is answered
}

// Inode names an arena as the kernel does.
type Inode struct{ Dev, Ino uint64 }

// Slot is a taken slot of a journal.
type Slot struct {
	Index int
	Record
	Shared bool // other events may wait under the same number
}

// parse reads a journal's memory.
func parse(mem []byte) (limit uint64, taken []Slot, err error) {
	ne := binary.NativeEndian
	if len(mem) < headerSize || string(mem[:8]) != magic {
		return 0, nil, errors.New("parse gate journal: not a journal")
	}
	if v := ne.Uint32(mem[8:]); v != version {
		return 0, nil, fmt.Errorf("parse gate journal: version %d, want %d", v, version)
	}
	slots := uint64(ne.Uint32(mem[12:]))
	if want := headerSize + slots*slotSize; want != uint64(len(mem)) {
		return 0, nil, fmt.Errorf("parse gate journal: %d slots take %d bytes, have %d", slots, want, len(mem))
	}
	limit = ne.Uint64(mem[16:])
	if limit > math.MaxInt32 {
		return 0, nil, fmt.Errorf("parse gate journal: limit %d", limit)
	}
	for i := range int(slots) {
		s := mem[headerSize+i*slotSize:][:slotSize]
		state := ne.Uint32(s[36:])
		if state != slotTaken && state != slotShared {
			continue
		}
		off, n, number := ne.Uint64(s[16:]), ne.Uint64(s[24:]), int32(ne.Uint32(s[32:]))
		if off > math.MaxInt64 || n > math.MaxInt64-off || number < 0 {
			continue
		}
		taken = append(taken, Slot{i, Record{
			Inode:  Inode{ne.Uint64(s), ne.Uint64(s[8:])},
			Off:    int64(off),
			N:      int64(n),
			Number: number,
		}, state == slotShared})
	}
	return limit, taken, nil
}

// format makes mem an empty journal of as many slots as fit.
func format(mem []byte, limit uint64) {
	ne := binary.NativeEndian
	clear(mem)
	ne.PutUint32(mem[8:], version)
	ne.PutUint32(mem[12:], uint32((len(mem)-headerSize)/slotSize))
	ne.PutUint64(mem[16:], limit)
	copy(mem, magic)
}

// Journal is a mapped journal. Its methods need no lock as long as each slot
// has one owner.
type Journal struct {
	file *os.File // a sealed memfd: it cannot shrink under the mapping
	mem  []byte
}

const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// New makes an empty journal in shared memory.
func New(limit uint64) (*Journal, error) {
	fd, err := unix.MemfdCreate("foil-gate-journal", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("make gate journal: %w", err)
	}
	f := os.NewFile(uintptr(fd), "gate-journal")
	size := headerSize + newSlots*slotSize
	if err := f.Truncate(int64(size)); err != nil {
		f.Close()
		return nil, fmt.Errorf("make gate journal: %w", err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		f.Close()
		return nil, fmt.Errorf("make gate journal: %w", err)
	}
	j, err := mapFile(f)
	if err != nil {
		f.Close()
		return nil, err
	}
	format(j.mem, limit)
	return j, nil
}

// Open maps a journal that another daemon made and reads what it left. One with fewer than least slots is of no use.
func Open(f *os.File, least int) (j *Journal, limit uint64, taken []Slot, err error) {
	j, err = mapFile(f)
	if err != nil {
		return nil, 0, nil, err
	}
	limit, taken, err = parse(j.mem)
	if err == nil && len(j.mem) < headerSize+least*slotSize {
		err = fmt.Errorf("open gate journal: %d bytes, too short", len(j.mem))
	}
	if err != nil {
		unix.Munmap(j.mem)
		return nil, 0, nil, err
	}
	return j, limit, taken, nil
}

func mapFile(f *os.File) (*Journal, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("map gate journal: %w", err)
	}
	rc, err := f.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("map gate journal: %w", err)
	}
	var mem []byte
	cerr := rc.Control(func(fd uintptr) {
		var seals int
		if seals, err = unix.FcntlInt(fd, unix.F_GET_SEALS, 0); err != nil {
			return
		}
		if seals&unix.F_SEAL_SHRINK == 0 {
			err = errors.New("it is not sealed")
			return
		}
		mem, err = unix.Mmap(int(fd), 0, int(st.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	})
	if err = errors.Join(cerr, err); err != nil {
		return nil, fmt.Errorf("map gate journal: %w", err)
	}
	return &Journal{file: f, mem: mem}, nil
}

// Slots is the number of slots.
func (j *Journal) Slots() int { return (len(j.mem) - headerSize) / slotSize }

// File is the journal's, for whoever keeps it.
func (j *Journal) File() *os.File { return j.file }

// SetLimit raises the limit; it never falls while the journal lives.
func (j *Journal) SetLimit(limit uint64) { binary.NativeEndian.PutUint64(j.mem[16:], limit) }

// Take notes an event in a free slot.
func (j *Journal) Take(slot int, r Record, shared bool) {
	ne := binary.NativeEndian
	s := j.mem[headerSize+slot*slotSize:][:slotSize]
	ne.PutUint64(s, r.Inode.Dev)
	ne.PutUint64(s[8:], r.Inode.Ino)
	ne.PutUint64(s[16:], uint64(r.Off))
	ne.PutUint64(s[24:], uint64(r.N))
	ne.PutUint32(s[32:], uint32(r.Number))
	if shared {
		j.Share(slot)
	} else {
		j.setState(slot, slotTaken)
	}
}

// Share says of a taken slot that its number may stand for other events too.
func (j *Journal) Share(slot int) { j.setState(slot, slotShared) }

// Free forgets an event that has its answer.
func (j *Journal) Free(slot int) { j.setState(slot, slotFree) }

func (j *Journal) setState(slot int, state uint32) {
	at := headerSize + slot*slotSize + 36
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&j.mem[at])), state)
}

// Close unmaps and closes; the memory lives on while the keeper holds it.
func (j *Journal) Close() error {
	err := unix.Munmap(j.mem)
	j.mem = nil
	return errors.Join(err, j.file.Close())
}
