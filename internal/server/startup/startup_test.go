package startup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/server/planner"
	"hydrofoil.dev/foil/internal/server/planner/plannertest"
)

func want(t *testing.T, what string, gotRuns []trace.Run, gotOrigin, origin string, runs ...trace.Run) {
	t.Helper()
	if d := cmp.Diff(trace.Merge(runs), gotRuns, cmpopts.EquateEmpty()); d != "" || gotOrigin != origin {
		t.Errorf("%s: origin %q, want %q; pages (want, got):\n%s", what, gotOrigin, origin, d)
	}
}

func wantPages(t *testing.T, what string, got []trace.Run, runs ...trace.Run) {
	t.Helper()
	want(t, what, got, "", "", runs...)
}

func TestSets(t *testing.T) {
	w := newWorld(t)
	m := w.image(t, "r", "1", someFiles(1))
	app, libc, libx := m.run(t, "/usr/bin/app", 0, 0), m.run(t, "/usr/lib/libc.so.6", 10, 20), m.run(t, "/usr/lib/libx.so.1.2", 5, 10)
	args := []string{"app"}
	report := func(client string, touched, unused []trace.Run) {
		m.add(t, client, m.trace(trace.Reported, args, touched, unused))
	}

	got, origin := m.pages(t, "app")
	want(t, "nobody ran it", got, origin, "")
	report("a", []trace.Run{app, libc}, nil)
	got, origin = m.pages(t, "app")
	want(t, "one report", got, origin, bundle.OriginLearned, app, libc)
	report("b", []trace.Run{app, libx}, nil)
	got, origin = m.pages(t, "app")
	want(t, "half of two", got, origin, bundle.OriginLearned, app, libc, libx)
	report("c", []trace.Run{libx, app}, nil)
	got, origin = m.pages(t, "app")
	want(t, "a third", got, origin, bundle.OriginLearned, app, libx)
	if late := m.find(t, "app").Late; !slices.Equal(late, []trace.Run{libc}) {
		t.Errorf("touched by less than half: %v, want %v", late, libc)
	}
	// What it got early and did not use, against two who waited for it.
	for _, c := range []string{"a", "b", "c"} {
		report(c, []trace.Run{app}, []trace.Run{libx})
	}
	got, origin = m.pages(t, "app")
	want(t, "not used", got, origin, bundle.OriginLearned, app)

	m.add(t, "z", m.trace(trace.Recorded, args, []trace.Run{libc}, nil))
	got, origin = m.pages(t, "app")
	want(t, "recorded, and what reports add", got, origin, bundle.OriginTraced, app, libc)

	m.add(t, "z", m.trace(trace.Reported, []string{"other"}, []trace.Run{libc, libx}, nil))
	m.add(t, "z", m.trace(trace.Reported, []string{"third"}, []trace.Run{libc}, nil))
	got, origin = m.pages(t, "sh", "-c", "whatever")
	want(t, "unknown service", got, origin, bundle.OriginCommon, libc)

	other := w.image(t, "elsewhere", "1", someFiles(1))
	got, origin = other.pages(t, "app")
	want(t, "a copy in another repository", got, origin, "")
}

func TestOrderIsTheMedian(t *testing.T) {
	w := newWorld(t)
	m := w.image(t, "r", "1", someFiles(1))
	a, b, c := m.run(t, "/usr/lib/libc.so.6", 0, 100), m.run(t, "/usr/lib/libc.so.6", 200, 100), m.run(t, "/usr/lib/libx.so.1.2", 0, 100)
	for i, order := range [][]trace.Run{{c, a, b}, {a, c, b}, {c, a, b}} {
		m.send(t, fmt.Sprint(i), m.trace(trace.Reported, nil, order, nil))
	}
	m.built(t)
	set := m.find(t)
	place := func(r trace.Run) int {
		return slices.IndexFunc(set.Runs(), func(s trace.Run) bool { return s.Content == r.Content && s.End() > r.First && s.First < r.End() })
	}
	if !(place(c) < place(a) && place(a) < place(b)) {
		t.Errorf("order %v", set.Runs())
	}
}

func TestHolesAreNeverInASet(t *testing.T) {
	w := newWorld(t)
	m := w.image(t, "r", "1", someFiles(1))
	all := m.run(t, "/var/data", 0, 0)
	m.add(t, "a", m.trace(trace.Recorded, nil, []trace.Run{all}, nil))
	got, _ := m.pages(t)
	// 1,100,000 bytes, then zeros up to 1,407,200: the pages in between are all zero.
	wantPages(t, "without the hole", got, m.run(t, "/var/data", 0, 269), m.run(t, "/var/data", 343, 0))
	m.deliver(t, m.find(t).Select(m.x.Table(), everything))
}

func TestLimit(t *testing.T) {
	w := newWorld(t)
	if err := w.max.Set("1M"); err != nil {
		t.Fatal(err)
	}
	w.start(t)
	m := w.image(t, "r", "1", someFiles(1))
	libc, large := m.run(t, "/usr/lib/libc.so.6", 0, 0), m.run(t, "/usr/share/large", 0, 0)
	m.add(t, "a", m.trace(trace.Recorded, nil, []trace.Run{large, libc}, nil))
	got, _ := m.pages(t)
	wantPages(t, "1M", got, trace.Run{Content: large.Content, Blocks: 256})
	late := m.find(t).Late
	if w := []trace.Run{{Content: large.Content, First: 256, Blocks: large.Blocks - 256}, libc}; !slices.Equal(late, w) {
		t.Errorf("late %v, want %v", late, w)
	}

	for in, bytes := range map[string]int64{"25%": (100 << 20) / 100 * 25, "100%": (100 << 20) / 100 * 100, "1%": shareFloor, "0": 0, "64M": 64 << 20, "3K": 3 << 10, "1G": 1 << 30, "77": 77} {
		var l Limit
		if err := l.Set(in); err != nil || l.Of(100<<20) != bytes {
			t.Errorf("%s: %d, want %d, %v", in, l.Of(100<<20), bytes, err)
		}
		var again Limit
		if err := again.Set(l.String()); err != nil || again != l {
			t.Errorf("%s is printed as %s: %v", in, l.String(), err)
		}
	}
	for _, in := range []string{"", "%", "0%", "101%", "-1", "M", "1T", "99999999999G", "1.5M"} {
		if err := new(Limit).Set(in); err == nil {
			t.Errorf("%q was taken", in)
		}
	}
	if l := new(Limit); l.String() != "25%" || l.Of(1<<30) != 1<<30/100*25 {
		t.Errorf("zero value: %s, %d", l, l.Of(1<<30))
	}
}

// One client that reports garbage, again and again and as other services too,
// does not change the set of a service that five others report.
func TestOneClientHasLittleInfluence(t *testing.T) {
	w := newWorld(t)
	m := w.image(t, "r", "1", someFiles(1))
	app, garbage := m.run(t, "/usr/bin/app", 0, 0), m.run(t, "/usr/share/large", 0, 0)
	args := []string{"app"}
	for i := range 5 {
		m.send(t, fmt.Sprint("honest ", i), m.trace(trace.Reported, args, []trace.Run{app}, nil))
	}
	bad := m.trace(trace.Reported, args, []trace.Run{garbage}, []trace.Run{app})
	for i := range 1000 {
		if i%10 == 0 {
			m.send(t, "bad", m.trace(trace.Reported, []string{"garbage", fmt.Sprint(i)}, []trace.Run{garbage}, nil))
		}
		m.send(t, "bad", bad)
	}
	m.built(t)
	got, origin := m.pages(t, "app")
	want(t, "of the honest", got, origin, bundle.OriginLearned, app)
	report, err := w.Report(t.Context(), m.Image, m.TOC)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(report.Services, func(v bundle.Service) bool { return v.ID == trace.Service(args) })
	if len(report.Services) > maxServices || i < 0 || report.Services[i].Reports != 6 {
		t.Errorf("%d services, at %d: %+v", len(report.Services), i, report.Services)
	}
}

func TestAging(t *testing.T) {
	w := newWorld(t)
	m := w.image(t, "r", "1", someFiles(1))
	before, now := m.run(t, "/usr/bin/app", 0, 0), m.run(t, "/usr/lib/libx.so.1.2", 0, 0)
	for i := range tracesKept {
		m.send(t, fmt.Sprint("client ", i), m.trace(trace.Reported, nil, []trace.Run{before}, nil))
	}
	m.built(t)
	got, _ := m.pages(t)
	wantPages(t, "before", got, before)
	for i := range tracesKept/2 + 1 {
		m.send(t, fmt.Sprint("other client ", i), m.trace(trace.Reported, nil, []trace.Run{now}, nil))
	}
	m.built(t)
	got, _ = m.pages(t)
	wantPages(t, "what is touched now has come in", got, now)
}

func TestInherit(t *testing.T) {
	w := newWorld(t)
	files := someFiles(1)
	files["/opt/app-1.9/lib/part-3f2a1c.so"] = text(40, 300_000)
	old := w.image(t, "r", "1", files)
	args := []string{"app"}
	touched := []trace.Run{
		old.run(t, "/usr/bin/app", 0, 10), old.run(t, "/usr/lib/libx.so.1.2", 100, 10), old.run(t, "/usr/share/large", 700, 60),
		old.run(t, "/etc/version", 0, 0), old.run(t, "/etc/passwd", 0, 0), old.run(t, "/opt/app-1.9/lib/part-3f2a1c.so", 50, 1),
	}
	old.add(t, "a", old.trace(trace.Recorded, args, touched, nil))

	files = someFiles(2)
	delete(files, "/etc/passwd")
	// Has another name, 20 pages more at its beginning, and is cut in what was
	// page 107, so that the last two are at its end.
	files["/usr/lib/libx.so.1.3"] = text(30, 20*trace.BlockSize) + files["/usr/lib/libx.so.1.2"][:440_000]
	files["/usr/lib/libx.so.1"] = "-> libx.so.1.3"
	delete(files, "/usr/lib/libx.so.1.2")
	files["/usr/share/large"] = text(31, 100)
	// Has another name by its directory and its hash, and half a page less.
	files["/opt/app-1.10/lib/part-77b0de.so"] = text(40, 300_000)[2048:]
	next := w.image(t, "r", "2", files)
	if err := w.Prepare(t.Context(), next.Image); err != nil {
		t.Fatal(err)
	}
	got, origin := next.pages(t, "app")
	moved := []trace.Run{next.run(t, "/usr/lib/libx.so.1.3", 120, 8), next.run(t, "/etc/version", 0, 0), next.run(t, "/opt/app-1.10/lib/part-77b0de.so", 49, 2)}
	inherited := append([]trace.Run{next.run(t, "/usr/bin/app", 0, 10)}, moved...)
	want(t, "inherited", got, origin, bundle.OriginInherited, inherited...)
	wantPages(t, "what comes right after it", trace.Merge(next.find(t, "app").Late), moved...)
	next.deliver(t, next.find(t, "app").Select(next.x.Table(), everything))

	third := w.image(t, "r", "3", someFiles(3))
	if err := w.Prepare(t.Context(), third.Image); err != nil {
		t.Fatal(err)
	}
	got, origin = third.pages(t, "app")
	want(t, "from the one that was traced, not from the one between", got, origin, bundle.OriginInherited,
		third.run(t, "/usr/bin/app", 0, 10), third.run(t, "/usr/lib/libx.so.1.2", 100, 10), third.run(t, "/usr/share/large", 700, 60),
		third.run(t, "/etc/version", 0, 0), third.run(t, "/etc/passwd", 0, 0))

	// Reports add to it and take away.
	more := next.run(t, "/usr/lib/libc.so.6", 0, 5)
	next.add(t, "b", next.trace(trace.Reported, args, []trace.Run{more}, []trace.Run{next.run(t, "/etc/version", 0, 0)}))
	got, origin = next.pages(t, "app")
	want(t, "with a report", got, origin, bundle.OriginLearned, inherited[0], moved[0], moved[2], more)

	// Not from another platform or another repository.
	arm := w.image(t, "r", "arm", someFiles(4))
	arm.Platform = "linux/arm64"
	elsewhere := w.image(t, "elsewhere", "4", someFiles(4))
	for _, m := range []*image{arm, elsewhere} {
		if err := w.Prepare(t.Context(), m.Image); err != nil {
			t.Fatal(err)
		}
		got, origin = m.pages(t, "app")
		want(t, m.Platform+" "+m.Repository, got, origin, "")
	}

	// A version that was there before learns of it as well.
	if err := w.Forget(t.Context(), old.Image, ""); err != nil {
		t.Fatal(err)
	}
	third.built(t)
	got, origin = third.pages(t, "app")
	want(t, "from the report on the second", got, origin, bundle.OriginInherited, third.run(t, "/usr/lib/libc.so.6", 0, 5))
	if err := w.Forget(t.Context(), third.Image, trace.Service(args)); !errors.Is(err, ErrUnknown) {
		t.Errorf("forgot what is inherited: %v", err)
	}
}

// What the version before had in a pack that is lost is inherited by place.
func TestInheritWithoutPacks(t *testing.T) {
	w := newWorld(t)
	old := w.image(t, "r", "1", plannertest.Files{"/usr/bin/app": text(1, 400_000)})
	old.add(t, "a", old.trace(trace.Recorded, nil, []trace.Run{old.run(t, "/usr/bin/app", 30, 10)}, nil))
	if err := w.memory.List(t.Context(), "packs/", func(key string, _ int64) error { return w.memory.Delete(t.Context(), key) }); err != nil {
		t.Fatal(err)
	}
	next := w.image(t, "r", "2", plannertest.Files{"/usr/bin/app": text(2, 400_000)})
	if err := w.Prepare(t.Context(), next.Image); err != nil {
		t.Fatal(err)
	}
	got, origin := next.pages(t)
	want(t, "inherited", got, origin, bundle.OriginInherited, next.run(t, "/usr/bin/app", 30, 10))
}

func TestVersionless(t *testing.T) {
	for in, out := range map[string]string{
		"/usr/lib/libssl.so.3":                                 "/usr/lib/libssl.so.#",
		"/usr/lib/libssl.so.3.0.15":                            "/usr/lib/libssl.so.#",
		"/usr/lib/libfoo-1.so":                                 "/usr/lib/libfoo-#.so",
		"/usr/lib/python3.12/__pycache__/a.cpython-312.pyc":    "/usr/lib/python#/__pycache__/a.cpython-#.pyc",
		"/x/psycopg_binary.libs/libcrypto-1edd6557.so.3":       "/x/psycopg_binary.libs/libcrypto-#.so.#",
		"/x/psycopg-3.2.6.dist-info/METADATA":                  "/x/psycopg-#.dist-info/METADATA",
		"/nix/1b9p07z77phvv2hf6gm9f28syp39f1ag-glibc-2.35/lib": "/nix/#-glibc-#/lib",
		"/facade/decade":                                       "/facade/decade",
		"":                                                     "",
		"7.":                                                   "#.",
		".7":                                                   ".#",
	} {
		if got := versionless(in); got != out {
			t.Errorf("%s: %s, want %s", in, got, out)
		}
	}
	if likeness("liba-1.so", "liba-22.so") != 8 || likeness("abc", "abc") != 3 || likeness("", "x") != 0 || likeness("aa", "aaa") != 2 {
		t.Error("likeness")
	}
}

func keys(t *testing.T, w *world) []string {
	t.Helper()
	var keys []string
	if err := w.memory.List(t.Context(), "startup/", func(key string, _ int64) error {
		keys = append(keys, key)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return keys
}

// A server that dies after it took a trace builds the sets when it comes back,
// and what a build left that it did not finish is removed.
func TestRestart(t *testing.T) {
	w := newWorld(t)
	m := w.image(t, "r", "1", someFiles(1))
	m.add(t, "a", m.trace(trace.Recorded, nil, []trace.Run{m.run(t, "/usr/bin/app", 0, 5)}, nil))
	w.Put(t, keyPrefix(m.Image)+"77", []byte("of a build that was killed"))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	// The trace is durable; nothing is built any more.
	err := w.Add(t.Context(), m.Image, m.TOC, "b", m.trace(trace.Recorded, nil, []trace.Run{m.run(t, "/usr/bin/app", 5, 5)}, nil).Encode())
	if err == nil {
		t.Error("Add waited for a build after Close, and got one")
	}
	got, _ := m.pages(t)
	wantPages(t, "the old one is still served", got, m.run(t, "/usr/bin/app", 0, 5))
	w.start(t)
	m.built(t)
	got, _ = m.pages(t)
	wantPages(t, "after the restart", got, m.run(t, "/usr/bin/app", 0, 10))
	if k := keys(t, w); len(k) != 2 || slices.ContainsFunc(k, func(k string) bool { return strings.HasSuffix(k, "77") }) {
		t.Errorf("objects %v: want this generation and the one before", k)
	}
	before := keys(t, w)
	m.add(t, "c", m.trace(trace.Recorded, []string{}, []trace.Run{m.run(t, "/usr/bin/app", 0, 10)}, nil))
	if d := cmp.Diff(before, keys(t, w)); d != "" {
		t.Errorf("a trace that changed nothing wrote an object:\n%s", d)
	}
}

// Streams go on that read a store which was damaged, lost, or is of long ago.
func TestDamagedStore(t *testing.T) {
	for name, damage := range map[string]func(t *testing.T, w *world, m *image, key string){
		"a byte of a frame": func(t *testing.T, w *world, m *image, key string) {
			o, err := w.memory.Open(t.Context(), key, 0, -1)
			if err != nil {
				t.Fatal(err)
			}
			b, _ := io.ReadAll(o)
			b = bytes.Clone(b)
			b[len(magic)+1000] ^= 1
			w.Put(t, key, b)
		},
		"cut": func(t *testing.T, w *world, m *image, key string) {
			w.Put(t, key, []byte(magic))
		},
		"gone": func(t *testing.T, w *world, m *image, key string) {
			if err := w.memory.Delete(t.Context(), key); err != nil {
				t.Fatal(err)
			}
		},
		"two generations later": func(t *testing.T, w *world, m *image, key string) {
			for i := range uint32(2) {
				m.add(t, fmt.Sprint(i), m.trace(trace.Recorded, nil, []trace.Run{m.run(t, "/usr/lib/libx.so.1.2", 10*i, 5)}, nil))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			m := w.image(t, "r", "1", someFiles(1))
			touched := []trace.Run{m.run(t, "/usr/lib/libc.so.6", 0, 0), m.run(t, "/usr/bin/app", 0, 0)}
			m.add(t, "a", m.trace(trace.Recorded, nil, touched, nil))
			set := m.find(t)
			damage(t, w, m, set.row.Key)
			odd := func(r trace.Run) bool { return r.Content%2 == 1 }
			for _, wanted := range []func(trace.Run) bool{everything, odd} {
				m.deliver(t, set.Select(m.x.Table(), wanted))
			}
			m.built(t)
			if set := m.find(t); set == nil {
				t.Error("no set after it was built anew")
			} else {
				m.deliver(t, set.Select(m.x.Table(), everything))
			}
		})
	}
	t.Run("its index", func(t *testing.T) {
		w := newWorld(t)
		m := w.image(t, "r", "1", someFiles(1))
		m.add(t, "a", m.trace(trace.Recorded, nil, []trace.Run{m.run(t, "/usr/bin/app", 0, 0)}, nil))
		row, err := w.World.Catalog.StartupImage(t.Context(), "r", m.Image.ChainID)
		if err != nil {
			t.Fatal(err)
		}
		w.Put(t, row.Key, []byte("nothing of the kind, and long enough to have had a trailer at its end"))
		w.start(t) // forgets what it has in memory
		if set, err := w.Find(t.Context(), m.Image, nil, m.x.Table()); set != nil || !errors.Is(err, ErrCorrupt) {
			t.Errorf("%v, %v", set, err)
		}
		m.built(t)
		if m.find(t) == nil {
			t.Error("no set after it was built anew")
		}
	})
}

func TestConcurrent(t *testing.T) {
	w := newWorld(t)
	w.o.Settle = 1
	m := w.image(t, "r", "1", someFiles(1))
	m.add(t, "a", m.trace(trace.Recorded, nil, []trace.Run{m.run(t, "/usr/bin/app", 0, 0)}, nil))
	var work sync.WaitGroup
	for i := range 4 {
		work.Go(func() {
			for k := range uint32(10) {
				kind := trace.Reported
				if k%5 == 4 {
					kind = trace.Recorded
				}
				v := m.trace(kind, nil, []trace.Run{m.run(t, "/usr/lib/libc.so.6", 100*uint32(i)+10*k, 10)}, nil)
				if err := w.Add(context.Background(), m.Image, m.TOC, fmt.Sprint(i), v.Encode()); err != nil {
					t.Error(err)
				}
			}
		})
		work.Go(func() {
			for range 10 {
				if set := m.find(t); set == nil {
					t.Error("no set")
				} else {
					m.deliver(fatalError{t}, set.Select(m.x.Table(), everything))
				}
				if _, err := w.Report(context.Background(), m.Image, m.TOC); err != nil {
					t.Error(err)
				}
			}
		})
	}
	work.Wait()
	m.built(t)
	if k := keys(t, w); len(k) > 2 {
		t.Errorf("left: %v", k)
	}
}

// fatalError is a test for goroutines.
type fatalError struct{ *testing.T }

func (f fatalError) Fatal(args ...any)                 { f.Error(args...) }
func (f fatalError) Fatalf(format string, args ...any) { f.Errorf(format, args...) }

// Whatever services touch: their sets are what they touched, each page is stored
// once, and what is delivered has what is wanted, with the right bytes.
func TestStoreProperty(t *testing.T) {
	w := newWorld(t)
	files := someFiles(1)
	delete(files, "/usr/share/large")
	files["/usr/lib/libc.so.6"] = text(2, 300_000) // quick
	m := w.image(t, "r", "1", files)
	rapid.Check(t, func(rt *rapid.T) {
		run := rapid.Custom(func(t *rapid.T) trace.Run {
			c := rapid.IntRange(0, len(m.Contents)-1).Draw(t, "content")
			pages := trace.Pages(m.Contents[c].Size)
			first := rapid.Uint32Range(0, pages-1).Draw(t, "first")
			return trace.Run{Content: uint32(c), First: first, Blocks: rapid.Uint32Range(1, pages-first).Draw(t, "blocks")}
		})
		var services []planned
		for i := range rapid.IntRange(1, 5).Draw(rt, "services") {
			var v evidence
			runs := trace.Merge(rapid.SliceOfN(run, 0, 6).Draw(rt, "touched"))
			shuffled := rapid.Permutation(runs).Draw(rt, "order")
			v.recorded = voters([]*trace.Trace{m.trace(trace.Recorded, nil, shuffled, nil)}, []string{"x"})
			set, late := v.choose(m.TOC)
			if len(late) > 0 {
				rt.Fatalf("late %v", late)
			}
			services = append(services, planned{Service: Service{Args: []string{fmt.Sprint(i)}, Origin: bundle.OriginTraced}, set: set})
		}
		s := lay(services, m.TOC)
		s.TOC = m.Image.TOC
		key := "startup/property"
		if err := s.write(context.Background(), w.World.Objects, key, m.TOC, &planner.Contents{TOC: m.TOC, Index: m.x, Objects: w.World.Objects}); err != nil {
			rt.Fatal(err)
		}
		read, err := open(context.Background(), w.World.Objects, key, m.x.Table(), m.Image.TOC)
		if err != nil {
			rt.Fatal(err)
		}
		if d := cmp.Diff(read.Frames, s.Frames); d != "" {
			rt.Fatalf("frames:\n%s", d)
		}
		if !sameSets(read, s) || !slices.Equal(read.Digests, s.Digests) || !slices.Equal(read.Common, s.Common) {
			rt.Fatal("another store was read than was written")
		}
		stored, distinct := int64(0), int64(0)
		for _, r := range read.Runs {
			stored += int64(r.Blocks)
		}
		for _, r := range trace.Merge(read.Runs) {
			distinct += int64(r.Blocks)
		}
		if stored != distinct {
			rt.Fatalf("%d pages are stored, %d different ones", stored, distinct)
		}
		for i, v := range services {
			set := &Set{sets: w.Sets, store: read, frames: read.Services[i].Frames, Origin: v.Origin}
			set.row.Key = key
			if d := cmp.Diff(trace.Merge(bare(v.set)), trace.Merge(set.Runs()), cmpopts.EquateEmpty()); d != "" {
				rt.Fatalf("service %d (want, got):\n%s", i, d)
			}
			modulus := rapid.Uint32Range(1, 4).Draw(rt, "modulus")
			wanted := func(r trace.Run) bool { return (r.Content+r.First)%modulus == 0 }
			d := set.Select(m.x.Table(), wanted)
			got := trace.Merge(d.Wire.Runs)
			for _, r := range set.Runs() {
				if wanted(r) && !trace.Contains(got, r) {
					rt.Fatalf("run %v is wanted and not delivered", r)
				}
			}
			for _, f := range d.Wire.Frames {
				useful := int64(0)
				for _, r := range d.Wire.Runs[f.First : f.First+f.Count] {
					if wanted(r) {
						_, n := r.Range(m.Contents[r.Content].Size)
						useful += n
					}
				}
				if 4*useful < 3*int64(f.RawLength) {
					rt.Fatalf("%d of %d bytes of a frame are wanted", useful, f.RawLength)
				}
			}
			m.deliver(rt, d)
		}
	})
}

// golden is a small store with fixed bytes.
func golden(t testing.TB) (*image, *Store) {
	w := newWorld(t)
	m := w.image(t, "r", "1", someFiles(1))
	services := []planned{
		{Service: Service{Args: []string{"app", "-v"}, Origin: bundle.OriginTraced, Late: []trace.Run{m.run(t, "/usr/lib/libc.so.6", 400, 3)}},
			set: []ranked{{m.run(t, "/usr/bin/app", 0, 0), 0}, {m.run(t, "/usr/lib/libc.so.6", 7, 90), 60}}},
		{Service: Service{Origin: bundle.OriginInherited}, set: []ranked{{m.run(t, "/usr/lib/libc.so.6", 50, 20), 0}, {m.run(t, "/etc/passwd", 0, 0), 20}}},
	}
	s := lay(services, m.TOC)
	s.Services[0].Filled = 1
	s.TOC = m.Image.TOC
	s.Digests = make([]segment.ID, len(s.Runs))
	for i, r := range s.Runs {
		s.Digests[i] = segment.Sum(fmt.Append(nil, r))
		if c := &m.Contents[r.Content]; r.Whole(c.Size) {
			s.Digests[i] = c.ID
		}
	}
	offset := int64(len(magic))
	for i := range s.Frames {
		f := &s.Frames[i]
		f.Offset, f.Length, f.Sum = offset, uint32(100+i), uint32(7777*i)
		offset += int64(f.Length)
	}
	return m, s
}

func (s *Store) end() int64 {
	last := s.Frames[len(s.Frames)-1]
	return last.Offset + int64(last.Length)
}

func TestGolden(t *testing.T) {
	m, s := golden(t)
	b := s.encode(m.TOC)
	file := filepath.Join("testdata", "index-2.golden")
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	old, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b, old) {
		t.Error("the format has changed: it needs another version")
	}
	index := old[:len(old)-trailerSize]
	got, err := decode(index, s.end(), m.x.Table(), m.Image.TOC)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(s, got, cmpopts.IgnoreUnexported(Store{})); d != "" {
		t.Errorf("got:\n%s", d)
	}
	before, err := os.ReadFile(filepath.Join("testdata", "index-1.golden"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err = decode(before[:len(before)-trailerSize], s.end(), m.x.Table(), m.Image.TOC); err != nil {
		t.Fatal(err)
	}
	s.Services[0].Filled = 0
	if d := cmp.Diff(s, got, cmpopts.IgnoreUnexported(Store{})); d != "" {
		t.Errorf("of the version before, got:\n%s", d)
	}
	for n := range index {
		if _, err := decode(index[:n], s.end(), m.x.Table(), m.Image.TOC); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("cut after %d bytes: %v", n, err)
		}
	}
	if _, err := decode(index, s.end()+1, m.x.Table(), m.Image.TOC); !errors.Is(err, ErrCorrupt) {
		t.Errorf("frames of another length: %v", err)
	}
	if _, err := decode(index, s.end(), m.x.Table(), m.Image.ChainID); !errors.Is(err, ErrCorrupt) {
		t.Errorf("another TOC: %v", err)
	}
}

func FuzzDecode(f *testing.F) {
	m, s := golden(f)
	b := s.encode(m.TOC)
	f.Add(b[:len(b)-trailerSize])
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := decode(b, s.end(), m.x.Table(), m.Image.TOC)
		if err != nil {
			if !errors.Is(err, ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		again := got.encode(m.x.Table())
		same, err := decode(again[:len(again)-trailerSize], s.end(), m.x.Table(), m.Image.TOC)
		if err != nil || !sameSets(got, same) {
			t.Fatalf("written again: %v", err)
		}
		for i := range got.Services {
			set := &Set{store: got, frames: got.Services[i].Frames}
			set.Select(m.x.Table(), everything)
		}
	})
}

// Of recorded traces a quarter makes a page part of the set: up to four, that is
// what any of them touched.
func TestAQuarterOfTheTraces(t *testing.T) {
	w := newWorld(t)
	m := w.image(t, "r", "1", someFiles(1))
	page := func(first uint32) trace.Run { return trace.Run{Content: 0, First: first, Blocks: 1} }
	for traces, want := range map[int]int{1: 2, 2: 2, 4: 2, 5: 1, 8: 1} {
		var list []*trace.Trace
		var clients []string
		for i := range traces {
			touched := []trace.Run{page(0)}
			if i == 0 {
				touched = append(touched, page(2))
			}
			list, clients = append(list, m.trace(trace.Recorded, nil, touched, nil)), append(clients, "x")
		}
		v := evidence{recorded: voters(list, clients)}
		set, late := v.choose(m.TOC)
		if len(set) != want || len(set)+len(late) != 2 {
			t.Errorf("%d traces: set %v, late %v", traces, set, late)
		}
	}
}
