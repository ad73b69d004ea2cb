package layer_test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"runtime"
	"testing"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/layer"
)

// many is a tar stream of so many FIFOs. (tar.Writer would take most of the
// test's time.)
type many struct {
	entries, at int
	header      [512]byte
	rest        []byte
}

func newMany(entries int) *many {
	m := &many{entries: entries}
	var buf bytes.Buffer
	err := tar.NewWriter(&buf).WriteHeader(&tar.Header{Typeflag: tar.TypeFifo, Name: "d000/f00000000", Mode: 0o644, Format: tar.FormatUSTAR})
	if err != nil {
		panic(err) // the header is constant
	}
	copy(m.header[:], buf.Bytes())
	return m
}

func (m *many) Read(p []byte) (int, error) {
	for n := 0; n < len(p); {
		if len(m.rest) == 0 {
			if m.at == m.entries {
				return n, io.EOF // an end without zero blocks is one
			}
			h := m.header[:]
			copy(h[1:4], fmt.Sprintf("%03d", m.at/10_000))
			copy(h[6:14], fmt.Sprintf("%08d", m.at))
			copy(h[148:156], "        ")
			sum := 0
			for _, c := range h {
				sum += int(c)
			}
			copy(h[148:156], fmt.Sprintf("%06o\x00 ", sum))
			m.rest = h
			m.at++
		}
		c := copy(p[n:], m.rest)
		m.rest = m.rest[c:]
		if n += c; n == len(p) {
			return n, nil
		}
	}
	return 0, nil
}

// A million entries are taken, and need no memory for them. (What is beyond
// the limit is refused: TestRefusesWhatIsHostile.)
func TestAMillionEntries(t *testing.T) {
	if testing.Short() {
		t.Skip("reads half a gigabyte of tar headers, twice")
	}
	const entries = 1_000_000
	sum := digest.SHA256.Digester()
	if _, err := io.CopyBuffer(sum.Hash(), newMany(entries), make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	r, err := layer.NewReader(context.Background(), newMany(entries), layer.Descriptor{Digest: sum.Digest()}, layer.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	list, err := layer.NewListWriter(io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	for n := 0; ; n++ {
		e, err := r.Next()
		if err == io.EOF && n == entries {
			return
		}
		if err != nil {
			t.Fatalf("after %d entries: %v", n, err)
		}
		if err := list.Write(e); err != nil {
			t.Fatal(err)
		}
		if n%200_000 == 0 {
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			if m.HeapAlloc > 64<<20 {
				t.Fatalf("%d bytes in use after %d entries", m.HeapAlloc, n)
			}
		}
	}
}
