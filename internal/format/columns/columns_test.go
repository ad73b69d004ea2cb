package columns_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/columns"
)

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		raw := bytes.Repeat(rapid.SliceOf(rapid.Byte()).Draw(t, "raw"), rapid.IntRange(0, 20).Draw(t, "repeat"))
		var b []byte
		if rapid.Bool().Draw(t, "quick") {
			b = columns.AppendQuick(nil, raw)
		} else {
			b = columns.Append(nil, raw, rapid.Bool().Draw(t, "compress"))
		}
		got, rest, err := columns.Next(append(b, "rest"...), uint64(len(b)+len(raw)))
		if err != nil || !bytes.Equal(got, raw) || string(rest) != "rest" {
			t.Fatalf("got %q, %q, %v", got, rest, err)
		}
		if len(raw) > 0 {
			if _, _, err := columns.Next(b, uint64(len(raw)-1)); !errors.Is(err, columns.ErrCorrupt) {
				t.Fatalf("longer than the limit: %v", err)
			}
		}
		for n := range b {
			if _, _, err := columns.Next(b[:n], 1<<20); !errors.Is(err, columns.ErrCorrupt) {
				t.Fatalf("cut after %d bytes: %v", n, err)
			}
		}
	})
}

func TestReader(t *testing.T) {
	b := binary.AppendUvarint(nil, 300)
	b = binary.AppendVarint(b, -7)
	b = columns.AppendBlock(b, "block")
	if n := columns.Numbers(b[:3]); n != 2 {
		t.Errorf("%d numbers, want 2", n)
	}
	r := columns.Reader{B: b}
	if n, i, s := r.Uint(300), r.Int(), r.Block(5); n != 300 || i != -7 || string(s) != "block" || r.End() != nil {
		t.Errorf("got %d, %d, %q, %v", n, i, s, r.Err)
	}
	for _, c := range []struct {
		name string
		b    []byte
		take func(*columns.Reader)
	}{
		{"too large", b, func(r *columns.Reader) { r.Uint(299) }},
		{"small and too large", []byte{9}, func(r *columns.Reader) { r.Uint(8) }},
		{"not the shortest form", []byte{0x80, 0}, func(r *columns.Reader) { r.Uint(9) }},
		{"cut number", []byte{0x80}, func(r *columns.Reader) { r.Uint(1000) }},
		{"cut block", []byte{3, 1}, func(r *columns.Reader) { r.Block(9) }},
		{"left over", []byte{3, 1}, func(r *columns.Reader) { r.Uint(9) }},
	} {
		r := columns.Reader{B: c.b}
		c.take(&r)
		if err := r.End(); !errors.Is(err, columns.ErrCorrupt) {
			t.Errorf("%s: %v", c.name, err)
		}
		if r.Uint(9) != 0 || r.Bytes(1) != nil {
			t.Errorf("%s: something after an error", c.name)
		}
	}
}

func FuzzNext(f *testing.F) {
	f.Add(columns.Append(nil, []byte("abcabcabcabcabcabcabcabcabc"), true))
	f.Add(columns.Append(nil, []byte("abc"), false))
	f.Fuzz(func(t *testing.T, b []byte) {
		const limit = 1 << 20
		column, rest, err := columns.Next(b, limit)
		if err == nil && (len(column) > limit || len(rest) >= len(b)) {
			t.Fatalf("%d bytes, %d left", len(column), len(rest))
		}
		if err != nil && !errors.Is(err, columns.ErrCorrupt) {
			t.Fatal(err)
		}
	})
}
