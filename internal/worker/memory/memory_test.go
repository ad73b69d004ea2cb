package memory

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"hydrofoil.dev/foil/internal/kernel"
)

func half(n int64) int64 { return n / 2 }

func TestTake(t *testing.T) {
	for _, c := range []struct {
		name string
		s    Sight
		do   func(a, other *Account)
		want bool // of 10 bytes more
	}{
		{"nothing is taken", Sight{Available: 40}, func(*Account, *Account) {}, true},
		{"half of what is available", Sight{Available: 40}, func(a, _ *Account) { a.Take(10) }, true},
		{"more than that", Sight{Available: 40}, func(a, _ *Account) { a.Take(11) }, false},
		{"another start has it", Sight{Available: 40}, func(_, o *Account) { o.Take(11) }, false},
		{"it has given it back", Sight{Available: 40}, func(_, o *Account) { o.Take(11); o.End() }, true},
		{"and gives it back once", Sight{Available: 40}, func(a, o *Account) { a.Take(11); o.Take(1); o.End(); o.End() }, false},
		{"what was refused is not taken", Sight{Available: 40}, func(a, _ *Account) { a.Take(21) }, true},
		{"memory is short", Sight{Available: 40, Tight: true}, func(*Account, *Account) {}, false},
		{"nothing is available", Sight{}, func(*Account, *Account) {}, false},
		{"the container's limit", Sight{Available: 400}, func(a, _ *Account) { a.Bound(9) }, false},
		{"the least of two", Sight{Available: 400}, func(a, _ *Account) { a.Bound(9); a.Bound(100) }, false},
		{"it has none", Sight{Available: 400}, func(a, _ *Account) { a.Bound(kernel.Unlimited) }, true},
		{"what it had before counts", Sight{Available: 400}, func(a, _ *Account) { a.Take(10); a.Bound(19) }, false},
		{"the other's limit", Sight{Available: 400}, func(_, o *Account) { o.Bound(0) }, true},
		{"the start is over", Sight{Available: 400}, func(a, _ *Account) { a.End() }, false},
	} {
		b := New(Options{Limit: half, Look: func() Sight { return c.s }})
		a, other := b.Begin(), b.Begin()
		c.do(a, other)
		before := b.Refused()
		if got := a.Take(10); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
		if refused := b.Refused() - before; refused != map[bool]int64{false: 10}[c.want] {
			t.Errorf("%s: %d bytes were refused", c.name, refused)
		}
		a.End()
		other.End()
		if n := b.Taken(); n != 0 {
			t.Errorf("%s: %d bytes stay taken", c.name, n)
		}
	}
}

// Who has no budget is refused nothing.
func TestNone(t *testing.T) {
	var b *Budget
	a := b.Begin()
	a.Bound(0)
	if !a.Take(1<<60) || b.Tight() || b.Taken() != 0 || b.Refused() != 0 {
		t.Error("no budget refuses something")
	}
	a.End()
	if !new(Account).Take(1) {
		t.Error("the zero account is refused something")
	}
}

// It is looked now and then, and nobody waits for who looks.
func TestLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		looks, slow := 0, make(chan struct{})
		b := New(Options{Limit: half, Look: func() Sight {
			if looks++; looks == 2 {
				<-slow
			}
			return Sight{Available: 100, Tight: looks == 2}
		}})
		a := b.Begin()
		for range 10 {
			if !a.Take(1) {
				t.Error("refused")
			}
		}
		if looks != 1 {
			t.Errorf("looked %d times at once", looks)
		}
		time.Sleep(lookEvery)
		var work sync.WaitGroup
		work.Go(func() {
			if a.Take(1) {
				t.Error("it is short, and something is taken")
			}
		})
		synctest.Wait()
		if !a.Take(1) {
			t.Error("who comes while somebody looks does not go by what is known")
		}
		close(slow)
		work.Wait()
		if !b.Tight() {
			t.Error("it is not known that memory is short")
		}
		time.Sleep(lookEvery)
		if b.Tight() || !a.Take(1) || looks != 3 {
			t.Errorf("it stays short after %d looks", looks)
		}
	})
}

func TestHost(t *testing.T) {
	const meminfo = "MemTotal: 100 kB\nMemAvailable: 50 kB\n"
	for _, c := range []struct {
		name  string
		files map[string]string
		want  Sight
	}{
		{"nothing is known", nil, Sight{Available: kernel.Unlimited}},
		{"no pressure", map[string]string{"meminfo": meminfo, "pressure/memory": "some avg10=4.99 \n"}, Sight{Available: 50 << 10}},
		{"pressure", map[string]string{"meminfo": meminfo, "pressure/memory": "some avg10=5.00 \n"}, Sight{Available: 50 << 10, Tight: true}},
		{"next to nothing", map[string]string{"meminfo": "MemTotal: 1000 kB\nMemAvailable: 49 kB\n"}, Sight{Available: 49 << 10, Tight: true}},
		{"the daemon's limit", map[string]string{"meminfo": meminfo, "self/cgroup": "0::/foil\n", "cgroup.controllers": "memory",
			"foil/memory.max": "2000\n", "foil/memory.current": "500\n", "foil/memory.stat": "inactive_file 100\n"}, Sight{Available: 1600}},
	} {
		dir := t.TempDir()
		for name, text := range c.files {
			at := filepath.Join(dir, name)
			if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(at, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if got := (Host{kernel.Proc(dir), kernel.Cgroups(dir)}).Look(); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
	limited := t.TempDir()
	for name, text := range map[string]string{"self/cgroup": "0::/a\n", "cgroup.controllers": "memory", "a/memory.max": "4500\n", "a/memory.current": "500\n", "a/memory.stat": ""} {
		if err := errors.Join(os.MkdirAll(filepath.Join(limited, filepath.Dir(name)), 0o755), os.WriteFile(filepath.Join(limited, name), []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	if own := (Host{kernel.Proc(limited), kernel.Cgroups(limited)}).Own(); own != 3000 {
		t.Errorf("of a limit that leaves 4000 bytes the program may have %d", own)
	}
	if own := (Host{kernel.Proc(t.TempDir()), kernel.Cgroups(t.TempDir())}).Own(); own != 0 {
		t.Errorf("without a limit it may have %d", own)
	}
	if s := (Host{}).Look(); s.Available <= 0 {
		t.Errorf("of this host: %+v", s)
	}
}

// What a look costs, which a start pays for once a second at most.
func BenchmarkLook(b *testing.B) {
	for b.Loop() {
		(Host{}).Look()
	}
}

// What each run of pages costs that is read ahead.
func BenchmarkTake(b *testing.B) {
	a := New(Options{Limit: half, Look: (Host{}).Look}).Begin()
	for b.Loop() {
		a.Take(0)
	}
}
