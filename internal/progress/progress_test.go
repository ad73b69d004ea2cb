package progress

import (
	"bytes"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"pgregory.net/rapid"
)

func TestLine(t *testing.T) {
	full := Transfer{Name: "r.example/redis:7", Phase: "mounted", Moved: 12_340_000, Total: 36_100_000,
		Rate: 4_100_000, Waits: 3, Waited: 210 * time.Millisecond}
	for _, test := range []struct {
		name  string
		t     Transfer
		width int
		want  string
	}{
		{"wide", full, 120,
			"r.example/redis:7 [==========                  ] mounted  34%  12.3 MB of 36.1 MB  4.1 MB/s  5.80s left  3 waits (0.21s)"},
		{"no room for a bar", full, 97,
			"r.example/redis:7 mounted  34%  12.3 MB of 36.1 MB  4.1 MB/s  5.80s left  3 waits (0.21s)"},
		{"narrow", full, 40, "r.example/redis:7 mounted  34%  12.3 MB "},
		{"total unknown", Transfer{Name: "a", Moved: 5, Rate: 2}, 80, "a 5 B  2 B/s"},
		{"nothing yet", Transfer{Name: "a", Phase: "resolved", Total: 1000}, 50, "a [                  ] resolved  0%  0 B of 1.0 kB"},
		{"done", Transfer{Name: "a", Phase: "complete", Moved: 1000, Total: 2000, Rate: 7, Waits: 1, Done: true}, 80,
			"a [========================================] complete  1.0 kB  1 wait (0.00s)"},
		{"in trouble", Transfer{Name: "a", Phase: "resolved", Total: 1000, Trouble: "Post: EOF\n\x1b[1mx"}, 90, "a [                            ] resolved  trying again: Post: EOF [1mx  0%  0 B of 1.0 kB"},
		{"in trouble, narrow", Transfer{Name: "a", Moved: 5, Total: 1000, Trouble: "unexpected EOF"}, 24, "a trying again: unexpect"},
		{"more than the total", Transfer{Name: "a", Moved: 3000, Total: 2000}, 44, "a [=================] 100%  3.0 kB of 2.0 kB"},
		{"stalled", Transfer{Name: "a", Moved: 1, Total: 1e12, Rate: 1}, 0, "a 0%  1 B of 1.0 TB  1 B/s"},
	} {
		if got := test.t.Line(test.width); got != test.want {
			t.Errorf("%s:\ngot  %q\nwant %q", test.name, got, test.want)
		}
	}
}

func TestLineFits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tr := Transfer{
			Name:    rapid.StringMatching(`[a-z]{1,12}\.[a-zé]{0,60}`).Draw(t, "name"),
			Phase:   rapid.SampledFrom([]string{"", "resolved", "mounted"}).Draw(t, "phase"),
			Moved:   rapid.Int64Range(0, 1<<62).Draw(t, "moved"),
			Total:   rapid.Int64Range(0, 1<<62).Draw(t, "total"),
			Rate:    rapid.Float64Range(0, 1e12).Draw(t, "rate"),
			Waits:   rapid.Int64Range(0, 1<<40).Draw(t, "waits"),
			Waited:  time.Duration(rapid.Int64Range(0, 1<<62).Draw(t, "waited")),
			Trouble: rapid.String().Draw(t, "trouble"),
			Done:    rapid.Bool().Draw(t, "done"),
		}
		width := rapid.IntRange(1, 200).Draw(t, "width")
		if line := tr.Line(width); utf8.RuneCountInString(line) > width || strings.Contains(line, "\n") {
			t.Errorf("%d columns, at most %d: %q", utf8.RuneCountInString(line), width, line)
		}
	})
}

func TestBytes(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0 B", 999: "999 B", 1000: "1.0 kB", 999_949: "999.9 kB", 999_950: "1.0 MB",
		36_100_000: "36.1 MB", 1 << 62: "4.6 EB",
	} {
		if got := Bytes(n); got != want {
			t.Errorf("%d: got %s, want %s", n, got, want)
		}
	}
}

func TestDuration(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0.00s", 250 * time.Millisecond: "0.25s", 9996 * time.Millisecond: "10.0s", 12345 * time.Millisecond: "12.3s",
		59990 * time.Millisecond: "1m00s", 245 * time.Second: "4m05s", 3599600 * time.Millisecond: "1h00m",
		130 * time.Minute: "2h10m",
	} {
		if got := Duration(d); got != want {
			t.Errorf("%v: got %s, want %s", d, got, want)
		}
	}
}

func TestRate(t *testing.T) {
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	var r Rate
	if got := r.Add(at, 50); got != 0 {
		t.Errorf("after one count: %v", got)
	}
	// 100 B/s for five seconds, then nothing: the rate must forget.
	n := int64(50)
	for range 10 {
		at, n = at.Add(500*time.Millisecond), n+50
		if got := r.Add(at, n); got != 100 {
			t.Fatalf("got %v, want 100", got)
		}
	}
	for range 5 {
		at = at.Add(500 * time.Millisecond)
		r.Add(at, n)
	}
	if got := r.Add(at.Add(time.Second), n); got != 0 {
		t.Errorf("after a stall: %v", got)
	}
	if len(r.points) > 8 {
		t.Errorf("%d points kept", len(r.points))
	}
}

func TestDisplay(t *testing.T) {
	var b bytes.Buffer
	d := NewDisplay(&b)
	d.Width = func() int { return 12 }
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	must(d.Show(Transfer{Name: "a", Moved: 1}, Transfer{Name: "a long name", Moved: 2}))
	must(d.Lines("x"))
	must(d.Clear())
	must(d.Lines("kept"))
	d.Keep()
	must(d.Lines("below"))
	want := "\r\x1b[Ja 1 B\na long name\n" + "\x1b[2A\r\x1b[Jx\n" + "\x1b[1A\r\x1b[J" + "\r\x1b[Jkept\n" + "\r\x1b[Jbelow\n"
	if got := b.String(); got != want {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}
