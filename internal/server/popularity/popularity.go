// Package popularity knows how often blobs were pulled lately, and when they were pushed.
//
// The score of a blob is a number of pulls, each of which counts half as much after a day, a quarter after two. What is old and cold
// is forgotten, so that a table has what is pulled, and what is new.
//
// # File
//
// A table is kept in one file, all numbers little-endian:
//
//	magic    8 bytes: "hfpops\x00\x01"
//	began    int64: seconds of Unix time when the table was empty
//	count    uint32
//	entries  count times: length of the digest (uint8), the digest as text, score (float32), at (int64: when the score was that),
//	         pushed (int64), seconds of Unix time; pushed is 0 if it was not seen
//	sum      SHA-256 of all before it
package popularity

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	_ "crypto/sha512" // digests may be of it
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/durable"
)

const (
	magic    = "hfpops\x00\x01"
	halfLife = 24 * time.Hour
	// most is how many blobs a table has; when there are more the coldest quarter goes.
	most = 1 << 18
	// cold and old are when a blob is forgotten.
	cold = 1.0 / 16
	old  = 90 * 24 * time.Hour
	// maxFile bounds what is read.
	maxFile = most * (1 + 256 + 4 + 8 + 8)
)

// ErrCorrupt is returned, wrapped, for a file that is no table.
var ErrCorrupt = errors.New("damaged table of popularity")

// Table is what is known. Its methods are safe for concurrent use.
type Table struct {
	mu      sync.Mutex
	began   time.Time               // guarded by mu
	entries map[digest.Digest]entry // guarded by mu
	changed bool                    // guarded by mu: since it was written
}

type entry struct {
	score  float32
	at     int64
	pushed int64
}

// New returns an empty table, which begins now.
func New(now time.Time) *Table {
	return &Table{began: now.Truncate(time.Second), entries: map[digest.Digest]entry{}, changed: true}
}

// Open reads a table; one that is not there begins now.
func Open(file string, now time.Time) (*Table, error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return New(now), nil
	}
	if err != nil {
		return nil, fmt.Errorf("read popularity: %w", err)
	}
	return parse(b)
}

func (e entry) now(t time.Time) float64 {
	age := max(0, t.Unix()-e.at)
	return float64(e.score) * math.Exp2(-float64(age)/halfLife.Seconds())
}

// Pulled counts a pull.
func (t *Table) Pulled(d digest.Digest, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[d]
	e.score, e.at = float32(e.now(now)+1), now.Unix()
	t.put(d, e, now)
}

// Pushed says that a blob was pushed.
func (t *Table) Pushed(d digest.Digest, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[d]
	if e.at == 0 {
		e.at = now.Unix()
	}
	e.pushed = now.Unix()
	t.put(d, e, now)
}

// put is called with mu held.
func (t *Table) put(d digest.Digest, e entry, now time.Time) {
	t.entries[d] = e
	t.changed = true
	if len(t.entries) > most {
		t.forget(now)
	}
}

// forget forgets what is old and cold, and if that is not enough the coldest quarter. It is called with mu held.
func (t *Table) forget(now time.Time) {
	type scored struct {
		d digest.Digest
		n float64
	}
	var list []scored
	for d, e := range t.entries {
		if n := e.now(now); n < cold && now.Unix()-e.pushed > int64(old.Seconds()) {
			delete(t.entries, d)
		} else {
			list = append(list, scored{d, n})
		}
	}
	if len(list) <= most*3/4 {
		return
	}
	slices.SortFunc(list, func(a, b scored) int { return cmp.Compare(a.n, b.n) })
	for _, v := range list[:len(list)-most*3/4] {
		delete(t.entries, v.d)
	}
}

// Get returns the score of a blob, and when it was pushed: when the table began, if it may have been then.
func (t *Table) Get(d digest.Digest, now time.Time) (score float64, pushed time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[d]
	pushed = t.began
	if p := time.Unix(e.pushed, 0); e.pushed != 0 && p.After(pushed) {
		pushed = p
	}
	return e.now(now), pushed
}

// Save writes the table to a file, durably, if it has changed since.
func (t *Table) Save(file string, now time.Time) error {
	t.mu.Lock()
	if !t.changed {
		t.mu.Unlock()
		return nil
	}
	t.forget(now)
	b := t.append(nil)
	t.changed = false
	t.mu.Unlock()
	if err := durable.Replace(file, b); err != nil {
		t.mu.Lock()
		t.changed = true
		t.mu.Unlock()
		return fmt.Errorf("write popularity: %w", err)
	}
	return nil
}

// append is called with mu held.
func (t *Table) append(b []byte) []byte {
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint64(b, uint64(t.began.Unix()))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(t.entries)))
	names := make([]digest.Digest, 0, len(t.entries))
	for d := range t.entries {
		names = append(names, d)
	}
	slices.Sort(names)
	for _, d := range names {
		e := t.entries[d]
		b = append(b, byte(len(d)))
		b = append(b, d...)
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(e.score))
		b = binary.LittleEndian.AppendUint64(b, uint64(e.at))
		b = binary.LittleEndian.AppendUint64(b, uint64(e.pushed))
	}
	sum := sha256.Sum256(b)
	return append(b, sum[:]...)
}

// parse reads what append wrote. Errors: ErrCorrupt.
func parse(b []byte) (*Table, error) {
	wrong := func(why string) (*Table, error) { return nil, fmt.Errorf("%w: %s", ErrCorrupt, why) }
	const head = len(magic) + 8 + 4
	if len(b) < head+sha256.Size || len(b) > maxFile || string(b[:len(magic)]) != magic {
		return wrong("it does not begin as one")
	}
	rest := b[:len(b)-sha256.Size]
	if sum := sha256.Sum256(rest); !bytes.Equal(sum[:], b[len(rest):]) {
		return wrong("its sum is another one")
	}
	t := &Table{began: time.Unix(int64(binary.LittleEndian.Uint64(b[len(magic):])), 0), entries: map[digest.Digest]entry{}}
	n := binary.LittleEndian.Uint32(b[head-4:])
	rest = rest[head:]
	for range n {
		if len(rest) < 1 || len(rest) < 1+int(rest[0])+20 {
			return wrong("it is cut")
		}
		d := digest.Digest(rest[1 : 1+rest[0]])
		if err := d.Validate(); err != nil {
			return wrong(err.Error())
		}
		rest = rest[1+rest[0]:]
		e := entry{
			score:  math.Float32frombits(binary.LittleEndian.Uint32(rest)),
			at:     int64(binary.LittleEndian.Uint64(rest[4:])),
			pushed: int64(binary.LittleEndian.Uint64(rest[12:])),
		}
		if _, twice := t.entries[d]; twice || !(e.score >= 0 && e.score < 1e30) {
			return wrong("an entry makes no sense")
		}
		t.entries[d] = e
		rest = rest[20:]
	}
	if len(rest) > 0 {
		return wrong("something follows it")
	}
	return t, nil
}
