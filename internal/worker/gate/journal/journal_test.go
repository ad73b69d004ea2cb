package journal

import (
	"bytes"
	"encoding/binary"
	"flag"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func empty(slots int) *Journal {
	j := &Journal{mem: make([]byte, headerSize+slots*slotSize)}
	format(j.mem, 65536)
	return j
}

func TestGolden(t *testing.T) {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		t.Skip("the golden file is of a little-endian machine")
	}
	j := empty(4)
	j.Take(1, Record{Inode: Inode{0x0801, 1234567}, Off: 4096, N: 131072, Number: 42}, false)
	j.Take(2, Record{Inode: Inode{math.MaxUint64, 1}, Off: math.MaxInt64, N: 0, Number: math.MaxInt32}, true)
	j.Take(3, Record{Number: 7}, false)
	j.Free(3)
	golden := filepath.Join("testdata", "journal.v1")
	if *update {
		if err := os.WriteFile(golden, j.mem, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(j.mem, want) {
		t.Errorf("journal differs from %s:\n% x", golden, j.mem)
	}
	limit, taken, err := parse(want)
	if err != nil {
		t.Fatal(err)
	}
	wantTaken := []Slot{
		{1, Record{Inode{0x0801, 1234567}, 4096, 131072, 42}, false},
		{2, Record{Inode{math.MaxUint64, 1}, math.MaxInt64, 0, math.MaxInt32}, true},
	}
	if diff := cmp.Diff(wantTaken, taken); diff != "" || limit != 65536 {
		t.Errorf("limit %d, slots (-want +got):\n%s", limit, diff)
	}
}

func TestRefuses(t *testing.T) {
	ne := binary.NativeEndian
	for name, change := range map[string]func(b []byte) []byte{
		"empty":    func(b []byte) []byte { return nil },
		"magic":    func(b []byte) []byte { b[0] = 'x'; return b },
		"version":  func(b []byte) []byte { ne.PutUint32(b[8:], 2); return b },
		"too many": func(b []byte) []byte { ne.PutUint32(b[12:], math.MaxUint32); return b },
		"too long": func(b []byte) []byte { return append(b, 0) },
		"limit":    func(b []byte) []byte { ne.PutUint64(b[16:], math.MaxUint64); return b },
	} {
		if _, _, err := parse(change(empty(3).mem)); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	// A slot that makes no sense is nobody's.
	for name, change := range map[string]func(s []byte){
		"state":  func(s []byte) { ne.PutUint32(s[36:], 3) },
		"number": func(s []byte) { ne.PutUint32(s[32:], math.MaxUint32) },
		"offset": func(s []byte) { ne.PutUint64(s[16:], 1<<63) },
		"count":  func(s []byte) { ne.PutUint64(s[24:], math.MaxInt64) },
	} {
		j := empty(1)
		j.Take(0, Record{Off: 4096, N: 4096, Number: 3}, false)
		change(j.mem[headerSize:])
		if _, taken, err := parse(j.mem); err != nil || len(taken) != 0 {
			t.Errorf("%s: %v, %v", name, taken, err)
		}
	}
}

// TestJournalModel: what a journal holds is what was taken and not freed.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		slots := rapid.IntRange(1, 20).Draw(t, "slots")
		j := empty(slots)
		model := make([]*Slot, slots)
		for range rapid.IntRange(0, 50).Draw(t, "steps") {
			slot := rapid.IntRange(0, slots-1).Draw(t, "slot")
			if model[slot] != nil {
				j.Free(slot)
				model[slot] = nil
				continue
			}
			off := rapid.Int64Range(0, math.MaxInt64).Draw(t, "off")
			r := Record{
				Inode:  Inode{rapid.Uint64().Draw(t, "dev"), rapid.Uint64().Draw(t, "ino")},
				Off:    off,
				N:      rapid.Int64Range(0, math.MaxInt64-off).Draw(t, "n"),
				Number: rapid.Int32Range(0, math.MaxInt32).Draw(t, "number"),
			}
			shared := rapid.Bool().Draw(t, "shared")
			j.Take(slot, r, shared)
			model[slot] = &Slot{slot, r, shared}
		}
		var want []Slot
		for _, s := range model {
			if s != nil {
				want = append(want, *s)
			}
		}
		_, got, err := parse(j.mem)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("(-want +got):\n%s", diff)
		}
	})
}

func TestOpen(t *testing.T) {
	j, err := New(20000)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	want := Record{Inode: Inode{1, 2}, Off: 3, N: 4, Number: 5}
	j.Take(100, want, false)
	fd, err := unix.FcntlInt(j.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "journal")
	j2, limit, taken, err := Open(f, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer j2.Close()
	if limit != 20000 || len(taken) != 1 || taken[0] != (Slot{100, want, false}) {
		t.Errorf("limit %d, slots %v", limit, taken)
	}
	// One that could be cut off under the mapping is refused.
	plain, err := os.Create(filepath.Join(t.TempDir(), "journal"))
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	if _, err := plain.Write(j.mem); err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := Open(plain, 1); err == nil {
		t.Error("a plain file was mapped as a journal")
	}
}

func FuzzParse(f *testing.F) {
	j := empty(3)
	j.Take(1, Record{Inode: Inode{1, 2}, Off: 4096, N: 4096, Number: 17}, false)
	f.Add(j.mem)
	f.Add(j.mem[:headerSize])
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, b []byte) {
		_, taken, err := parse(b)
		if err != nil {
			return
		}
		again := &Journal{mem: make([]byte, len(b))}
		format(again.mem, 0)
		for _, s := range taken {
			if s.Off < 0 || s.N < 0 || s.Off+s.N < 0 || s.Number < 0 {
				t.Fatalf("slot out of range: %+v", s)
			}
			again.Take(s.Index, s.Record, s.Shared)
		}
		_, got, err := parse(again.mem)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(taken, got); diff != "" {
			t.Fatalf("(-first +again):\n%s", diff)
		}
	})
}
