package gate

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

// The journal is shared memory in which the daemon notes every event it has
// read and not answered. It outlives the daemon, because the keeper holds it,
// and tells the next daemon what the kernel cannot: which range stands behind
// the number of an event that is already read. It never leaves the machine
// and ends with it.
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
const (
	journalMagic      = "FOILGATE"
	journalVersion    = 1
	journalHeaderSize = 64
	journalSlotSize   = 40
	// journalSlots is the length of a new journal, room for MaxPending and the
	// batch in hand: 640 KiB of address space, of which only what is used takes memory.
	journalSlots = 16384

	slotFree   = 0
	slotTaken  = 1
	slotShared = 2
)

// record is what a slot says of one event.
type record struct {
	inode  inode
	off    int64
	n      int64
	number int32
}

// inode names an arena as the kernel does.
type inode struct{ dev, ino uint64 }

// journalSlot is a taken slot of a journal.
type journalSlot struct {
	slot int
	record
	shared bool
}

// parseJournal reads a journal's memory.
func parseJournal(mem []byte) (limit uint64, taken []journalSlot, err error) {
	ne := binary.NativeEndian
	if len(mem) < journalHeaderSize || string(mem[:8]) != journalMagic {
		return 0, nil, errors.New("parse gate journal: not a journal")
	}
	if v := ne.Uint32(mem[8:]); v != journalVersion {
		return 0, nil, fmt.Errorf("parse gate journal: version %d, want %d", v, journalVersion)
	}
	slots := uint64(ne.Uint32(mem[12:]))
	if want := journalHeaderSize + slots*journalSlotSize; want != uint64(len(mem)) {
		return 0, nil, fmt.Errorf("parse gate journal: %d slots take %d bytes, have %d", slots, want, len(mem))
	}
	limit = ne.Uint64(mem[16:])
	if limit > math.MaxInt32 {
		return 0, nil, fmt.Errorf("parse gate journal: limit %d", limit)
	}
	for i := range int(slots) {
		s := mem[journalHeaderSize+i*journalSlotSize:][:journalSlotSize]
		state := ne.Uint32(s[36:])
		if state != slotTaken && state != slotShared {
			continue
		}
		off, n, number := ne.Uint64(s[16:]), ne.Uint64(s[24:]), int32(ne.Uint32(s[32:]))
		if off > math.MaxInt64 || n > math.MaxInt64-off || number < 0 {
			continue
		}
		taken = append(taken, journalSlot{i, record{
			inode:  inode{ne.Uint64(s), ne.Uint64(s[8:])},
			off:    int64(off),
			n:      int64(n),
			number: number,
		}, state == slotShared})
	}
	return limit, taken, nil
}

// formatJournal makes mem an empty journal of as many slots as fit.
func formatJournal(mem []byte, limit uint64) {
	ne := binary.NativeEndian
	clear(mem)
	ne.PutUint32(mem[8:], journalVersion)
	ne.PutUint32(mem[12:], uint32((len(mem)-journalHeaderSize)/journalSlotSize))
	ne.PutUint64(mem[16:], limit)
	copy(mem, journalMagic)
}

// journal is a mapped journal. Its methods need no lock as long as each slot
// has one owner.
type journal struct {
	file *os.File // a sealed memfd: it cannot shrink under the mapping
	mem  []byte
}

const journalSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// newJournal makes an empty journal in shared memory.
func newJournal(limit uint64) (*journal, error) {
	fd, err := unix.MemfdCreate("foil-gate-journal", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("make gate journal: %w", err)
	}
	f := os.NewFile(uintptr(fd), "gate-journal")
	size := journalHeaderSize + journalSlots*journalSlotSize
	if err := f.Truncate(int64(size)); err != nil {
		f.Close()
		return nil, fmt.Errorf("make gate journal: %w", err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, journalSeals); err != nil {
		f.Close()
		return nil, fmt.Errorf("make gate journal: %w", err)
	}
	j, err := mapJournal(f)
	if err != nil {
		f.Close()
		return nil, err
	}
	formatJournal(j.mem, limit)
	return j, nil
}

// openJournal maps a journal that another daemon made and reads what it left.
func openJournal(f *os.File) (j *journal, limit uint64, taken []journalSlot, err error) {
	j, err = mapJournal(f)
	if err != nil {
		return nil, 0, nil, err
	}
	limit, taken, err = parseJournal(j.mem)
	if err == nil && len(j.mem) < journalHeaderSize+minSlots*journalSlotSize {
		err = fmt.Errorf("open gate journal: %d bytes, too short", len(j.mem))
	}
	if err != nil {
		unix.Munmap(j.mem)
		return nil, 0, nil, err
	}
	return j, limit, taken, nil
}

func mapJournal(f *os.File) (*journal, error) {
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
	return &journal{file: f, mem: mem}, nil
}

// slots is the number of slots.
func (j *journal) slots() int { return (len(j.mem) - journalHeaderSize) / journalSlotSize }

// setLimit raises the limit; it never falls while the journal lives.
func (j *journal) setLimit(limit uint64) { binary.NativeEndian.PutUint64(j.mem[16:], limit) }

// take notes an event in a free slot.
func (j *journal) take(slot int, r record, shared bool) {
	ne := binary.NativeEndian
	s := j.mem[journalHeaderSize+slot*journalSlotSize:][:journalSlotSize]
	ne.PutUint64(s, r.inode.dev)
	ne.PutUint64(s[8:], r.inode.ino)
	ne.PutUint64(s[16:], uint64(r.off))
	ne.PutUint64(s[24:], uint64(r.n))
	ne.PutUint32(s[32:], uint32(r.number))
	if shared {
		j.share(slot)
	} else {
		j.setState(slot, slotTaken)
	}
}

// share says of a taken slot that its number may stand for other events too.
func (j *journal) share(slot int) { j.setState(slot, slotShared) }

// free forgets an event that has its answer.
func (j *journal) free(slot int) { j.setState(slot, slotFree) }

func (j *journal) setState(slot int, state uint32) {
	at := journalHeaderSize + slot*journalSlotSize + 36
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&j.mem[at])), state)
}

// close unmaps and closes; the memory lives on while the keeper holds it.
func (j *journal) close() error {
	err := unix.Munmap(j.mem)
	j.mem = nil
	return errors.Join(err, j.file.Close())
}
