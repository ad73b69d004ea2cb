package startup

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/trace"
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

// Few reports do not change much what is known of a service from another version of the image.
func TestFewChangeLittle(t *testing.T) {
	files := func(version uint64) plannertest.Files {
		f := someFiles(version)
		f["/usr/share/huge"] = text(50, 3000*trace.BlockSize)
		return f
	}
	args := []string{"db"}
	for _, c := range []struct {
		name string
		// what each of so many clients touched and did not use, of the set and besides
		touched, unused func(m *image, i int) []trace.Run
		clients         int
		kept            bool // what was inherited
		grown           int64
	}{
		{"one sleeps", none, inheritedOf, 1, true, 0},
		{"two sleep", none, inheritedOf, 2, true, 0},
		{"three sleep", none, inheritedOf, 3, false, 0},
		{"one of five sleeps", none, func(m *image, i int) []trace.Run {
			if i == 0 {
				return inheritedOf(m, i)
			}
			return nil
		}, 5, true, 0},
		{"one reads everything", hugeOf, none, 1, true, growLeast},
		{"two read everything", hugeOf, none, 2, true, growLeast},
		{"three read everything", hugeOf, none, 3, true, 3000},
		{"one of three reads everything", func(m *image, i int) []trace.Run {
			if i == 0 {
				return hugeOf(m, i)
			}
			return nil
		}, none, 3, true, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			old := w.image(t, "r", "1", files(1))
			old.add(t, "tracer", old.trace(trace.Recorded, args, inheritedOf(old, 0), nil))
			m := w.image(t, "r", "2", files(2))
			for i := range c.clients {
				touched := append([]trace.Run{m.run(t, "/etc/passwd", 0, 0)}, c.touched(m, i)...)
				m.send(t, fmt.Sprint("client ", i), m.trace(trace.Reported, args, touched, c.unused(m, i)))
			}
			m.built(t)
			got, _ := m.pages(t, args...)
			count := map[uint32]int64{}
			for _, r := range got {
				count[r.Content] += int64(r.Blocks)
			}
			base := inheritedOf(m, 0)[0]
			if kept := count[base.Content] == int64(base.Blocks); kept != c.kept || !kept && count[base.Content] != 0 {
				t.Errorf("of what was inherited there are %d of %d pages, want them kept: %v", count[base.Content], base.Blocks, c.kept)
			}
			if count[m.run(t, "/etc/passwd", 0, 0).Content] != 1 {
				t.Error("the little that all touched is not in the set")
			}
			huge := count[m.run(t, "/usr/share/huge", 0, 0).Content]
			if c.grown == growLeast && (huge > growLeast || huge < growLeast/2) || c.grown != growLeast && huge != c.grown {
				t.Errorf("%d pages came in, want %d", huge, c.grown)
			}
		})
	}
}

func none(*image, int) []trace.Run { return nil }

func inheritedOf(m *image, _ int) []trace.Run {
	i, _ := m.Lookup("/usr/lib/libc.so.6")
	return []trace.Run{{Content: uint32(m.Inodes[i].Content), Blocks: 400}}
}

func hugeOf(m *image, _ int) []trace.Run {
	i, _ := m.Lookup("/usr/share/huge")
	return []trace.Run{{Content: uint32(m.Inodes[i].Content), Blocks: 3000}}
}
