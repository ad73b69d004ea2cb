package popularity

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
)

var update = flag.Bool("update", false, "write golden files anew")

var began = time.Unix(1_700_000_000, 0)

func TestScores(t *testing.T) {
	tb := New(began)
	a, b := digest.FromString("a"), digest.FromString("b")
	tb.Pulled(a, began)
	tb.Pulled(a, began.Add(24*time.Hour))
	if s, pushed := tb.Get(a, began.Add(48*time.Hour)); math.Abs(s-0.75) > 1e-6 || !pushed.Equal(began) {
		t.Errorf("a: %v, pushed %v", s, pushed)
	}
	tb.Pushed(b, began.Add(time.Hour))
	if s, pushed := tb.Get(b, began.Add(time.Hour)); s != 0 || !pushed.Equal(began.Add(time.Hour)) {
		t.Errorf("b: %v, pushed %v", s, pushed)
	}
	// A clock that was set back makes nothing hotter.
	if s, _ := tb.Get(a, began.Add(-time.Hour)); s > 1.51 {
		t.Errorf("before: %v", s)
	}
}

func TestSaved(t *testing.T) {
	file := filepath.Join(t.TempDir(), "popularity")
	tb := New(began)
	a, b := digest.FromString("a"), digest.SHA512.FromString("b")
	tb.Pulled(a, began)
	tb.Pushed(b, began.Add(time.Minute))
	if err := tb.Save(file, began); err != nil {
		t.Fatal(err)
	}
	got, err := Open(file, began.Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []digest.Digest{a, b, digest.FromString("unknown")} {
		s1, p1 := tb.Get(d, began)
		s2, p2 := got.Get(d, began)
		if s1 != s2 || !p1.Equal(p2) {
			t.Errorf("%s: %v, %v; read %v, %v", d, s1, p1, s2, p2)
		}
	}
	// What has not changed is not written.
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := got.Save(file, began); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("written though nothing changed: %v", err)
	}
	if fresh, err := Open(file, began.Add(time.Hour)); err != nil || !fresh.began.Equal(began.Add(time.Hour)) {
		t.Errorf("without a file: %v", err)
	}
}

// The file stays what it is.
func TestGolden(t *testing.T) {
	tb := New(began)
	tb.Pulled(digest.FromString("a"), began)
	tb.Pushed(digest.FromString("b"), began.Add(time.Minute))
	b := tb.append(nil)
	const name = "testdata/table"
	if *update {
		if err := os.WriteFile(name, b, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(name)
	if err != nil || string(want) != string(b) {
		t.Errorf("other bytes than in %s: %v", name, err)
	}
}

func TestBounded(t *testing.T) {
	tb := New(began)
	for i := range most + 10 {
		tb.Pulled(digest.NewDigestFromEncoded(digest.SHA256, fmt.Sprintf("%064x", i)), began.Add(time.Duration(i)*time.Second))
	}
	if n := len(tb.entries); n > most {
		t.Errorf("%d entries", n)
	}
	if s, _ := tb.Get(digest.NewDigestFromEncoded(digest.SHA256, fmt.Sprintf("%064x", most+5)), began); s == 0 {
		t.Error("the latest is forgotten")
	}
	tb = New(began)
	tb.Pulled(digest.FromString("a"), began)
	tb.Pushed(digest.FromString("b"), began.Add(99*24*time.Hour))
	tb.forget(began.Add(100 * 24 * time.Hour))
	if len(tb.entries) != 1 {
		t.Errorf("%d entries, want that which is new", len(tb.entries))
	}
}

func FuzzParse(f *testing.F) {
	tb := New(began)
	tb.Pulled(digest.FromString("a"), began)
	good := tb.append(nil)
	f.Add(good)
	f.Add(good[:len(good)-1])
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := parse(b)
		if err != nil {
			if !errors.Is(err, ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		if again, err := parse(got.append(nil)); err != nil || len(again.entries) != len(got.entries) {
			t.Fatalf("written again: %v", err)
		}
	})
}
