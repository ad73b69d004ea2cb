package gate

import (
	"bytes"
	"encoding/binary"
	"flag"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func emptyJournal(slots int) *journal {
	j := &journal{mem: make([]byte, journalHeaderSize+slots*journalSlotSize)}
	formatJournal(j.mem, 65536)
	return j
}

func TestJournalGolden(t *testing.T) {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		t.Skip("the golden file is of a little-endian machine")
	}
	j := emptyJournal(4)
	j.take(1, record{inode: inode{0x0801, 1234567}, off: 4096, n: 131072, number: 42}, false)
	j.take(2, record{inode: inode{math.MaxUint64, 1}, off: math.MaxInt64, n: 0, number: math.MaxInt32}, true)
	j.take(3, record{number: 7}, false)
	j.free(3)
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
	limit, taken, err := parseJournal(want)
	if err != nil {
		t.Fatal(err)
	}
	wantTaken := []journalSlot{
		{1, record{inode{0x0801, 1234567}, 4096, 131072, 42}, false},
		{2, record{inode{math.MaxUint64, 1}, math.MaxInt64, 0, math.MaxInt32}, true},
	}
	if diff := cmp.Diff(wantTaken, taken, cmp.AllowUnexported(journalSlot{}, record{}, inode{})); diff != "" || limit != 65536 {
		t.Errorf("limit %d, slots (-want +got):\n%s", limit, diff)
	}
}

func TestJournalRefuses(t *testing.T) {
	ne := binary.NativeEndian
	for name, change := range map[string]func(b []byte) []byte{
		"empty":    func(b []byte) []byte { return nil },
		"magic":    func(b []byte) []byte { b[0] = 'x'; return b },
		"version":  func(b []byte) []byte { ne.PutUint32(b[8:], 2); return b },
		"too many": func(b []byte) []byte { ne.PutUint32(b[12:], math.MaxUint32); return b },
		"too long": func(b []byte) []byte { return append(b, 0) },
		"limit":    func(b []byte) []byte { ne.PutUint64(b[16:], math.MaxUint64); return b },
	} {
		if _, _, err := parseJournal(change(emptyJournal(3).mem)); err == nil {
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
		j := emptyJournal(1)
		j.take(0, record{off: 4096, n: 4096, number: 3}, false)
		change(j.mem[journalHeaderSize:])
		if _, taken, err := parseJournal(j.mem); err != nil || len(taken) != 0 {
			t.Errorf("%s: %v, %v", name, taken, err)
		}
	}
}

// TestJournalModel: what a journal holds is what was taken and not freed.
func TestJournalModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		slots := rapid.IntRange(1, 20).Draw(t, "slots")
		j := emptyJournal(slots)
		model := make([]*journalSlot, slots)
		for range rapid.IntRange(0, 50).Draw(t, "steps") {
			slot := rapid.IntRange(0, slots-1).Draw(t, "slot")
			if model[slot] != nil {
				j.free(slot)
				model[slot] = nil
				continue
			}
			off := rapid.Int64Range(0, math.MaxInt64).Draw(t, "off")
			r := record{
				inode:  inode{rapid.Uint64().Draw(t, "dev"), rapid.Uint64().Draw(t, "ino")},
				off:    off,
				n:      rapid.Int64Range(0, math.MaxInt64-off).Draw(t, "n"),
				number: rapid.Int32Range(0, math.MaxInt32).Draw(t, "number"),
			}
			shared := rapid.Bool().Draw(t, "shared")
			j.take(slot, r, shared)
			model[slot] = &journalSlot{slot, r, shared}
		}
		var want []journalSlot
		for _, s := range model {
			if s != nil {
				want = append(want, *s)
			}
		}
		_, got, err := parseJournal(j.mem)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(journalSlot{}, record{}, inode{})); diff != "" {
			t.Fatalf("(-want +got):\n%s", diff)
		}
	})
}

func TestJournalOpen(t *testing.T) {
	j, err := newJournal(20000)
	if err != nil {
		t.Fatal(err)
	}
	defer j.close()
	want := record{inode: inode{1, 2}, off: 3, n: 4, number: 5}
	j.take(100, want, false)
	f, err := duplicate(int(j.file.Fd()), "journal")
	if err != nil {
		t.Fatal(err)
	}
	j2, limit, taken, err := openJournal(f)
	if err != nil {
		t.Fatal(err)
	}
	defer j2.close()
	if limit != 20000 || len(taken) != 1 || taken[0] != (journalSlot{100, want, false}) {
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
	if _, _, _, err := openJournal(plain); err == nil {
		t.Error("a plain file was mapped as a journal")
	}
}

func FuzzParseJournal(f *testing.F) {
	j := emptyJournal(3)
	j.take(1, record{inode: inode{1, 2}, off: 4096, n: 4096, number: 17}, false)
	f.Add(j.mem)
	f.Add(j.mem[:journalHeaderSize])
	f.Add([]byte(journalMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		_, taken, err := parseJournal(b)
		if err != nil {
			return
		}
		again := &journal{mem: make([]byte, len(b))}
		formatJournal(again.mem, 0)
		for _, s := range taken {
			if s.off < 0 || s.n < 0 || s.off+s.n < 0 || s.number < 0 {
				t.Fatalf("slot out of range: %+v", s)
			}
			again.take(s.slot, s.record, s.shared)
		}
		_, got, err := parseJournal(again.mem)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(taken, got, cmp.AllowUnexported(journalSlot{}, record{}, inode{})); diff != "" {
			t.Fatalf("(-first +again):\n%s", diff)
		}
	})
}
