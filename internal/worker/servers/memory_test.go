package servers

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

var epoch = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

func server(name string) Server { return Server{Registry: name, Base: "https://" + name} }

func TestTop(t *testing.T) {
	days := func(n float64) time.Time { return epoch.Add(time.Duration(n * 24 * float64(time.Hour))) }
	type used struct {
		at   float64 // days
		name string
	}
	for name, tc := range map[string]struct {
		uses []used
		at   float64
		n    int
		want []string
	}{
		"nothing":           {n: 2},
		"the most used":     {[]used{{0, "a"}, {0, "b"}, {0, "b"}, {0, "c"}, {0, "c"}, {0, "c"}}, 0, 2, []string{"c", "b"}},
		"equal: the latest": {[]used{{0, "a"}, {0.001, "b"}}, 0.01, 1, []string{"b"}},
		"of late counts":    {[]used{{0, "a"}, {0, "a"}, {0, "a"}, {2, "b"}}, 2, 1, []string{"b"}},
		"but not alone":     {[]used{{0, "a"}, {0, "a"}, {0, "a"}, {0.5, "b"}}, 0.5, 1, []string{"a"}},
		"given up":          {[]used{{0, "a"}, {2, "b"}}, 3, 2, []string{"b"}},
		"all given up":      {[]used{{0, "a"}}, 4, 2, nil},
		"a clock ran ahead": {[]used{{30, "a"}, {0, "b"}, {0.1, "b"}}, 0.2, 2, []string{"b", "a"}},
	} {
		t.Run(name, func(t *testing.T) {
			var m memory
			for _, u := range tc.uses {
				m.note(days(u.at), server(u.name))
			}
			var got []string
			for _, s := range m.top(days(tc.at), tc.n) {
				got = append(got, s.Registry)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// One address for two registries is one connection.
func TestTopHasEachAddressOnce(t *testing.T) {
	var m memory
	a := Server{Registry: "a", Base: "https://mirror"}
	for _, s := range []Server{a, a, {Registry: "b", Base: "https://mirror"}, server("c")} {
		m.note(epoch, s)
	}
	if diff := cmp.Diff([]Server{a, server("c")}, m.top(epoch, 3)); diff != "" {
		t.Error(diff)
	}
}

// Whatever is used, and whatever the clock does: there are few, each is what was used, and what is
// written is read again.
func TestMemoryIsBounded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var m memory
		now := epoch
		for range rapid.IntRange(0, 200).Draw(t, "uses") {
			now = now.Add(time.Duration(rapid.Int64Range(int64(-4*24*time.Hour), int64(4*24*time.Hour)).Draw(t, "later")))
			last := server(fmt.Sprint("s", rapid.IntRange(0, 40).Draw(t, "server")))
			m.note(now, last)
			if len(m.uses) > mostRemembered {
				t.Fatalf("%d are remembered", len(m.uses))
			}
			found := false
			for _, u := range m.uses {
				found = found || u.Server == last
				if now.Sub(u.Last) >= ForgetAfter || u.Last.After(now) {
					t.Fatalf("%s, used at %v, is remembered at %v", u.Base, u.Last, now)
				}
			}
			if !found {
				t.Fatalf("%s was used, and is not remembered", last.Base)
			}
			n := rapid.IntRange(0, MostKept).Draw(t, "n")
			if top := m.top(now, n); len(top) > n {
				t.Fatalf("%d of at most %d", len(top), n)
			}
			b, err := m.encode()
			if err != nil {
				t.Fatal(err)
			}
			again, err := decodeMemory(b)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(m.top(now, MostKept), again.top(now, MostKept)); diff != "" {
				t.Fatal(diff)
			}
		}
	})
}

func TestDecodeRefuses(t *testing.T) {
	entry := `{"registry":"a","base":"https://a","uses":1,"last":"2030-01-01T00:00:00Z"}`
	many := strings.TrimSuffix(strings.Repeat(entry+",", mostRemembered+1), ",")
	for _, text := range []string{
		"", "{}", `{"version":2,"servers":[]}`, `{"version":1,"servers":[],"more":1}`,
		`{"version":1,"servers":[` + entry + `,` + entry + `]}`,
		`{"version":1,"servers":[` + many + `]}`,
		`{"version":1,"servers":[` + strings.Replace(entry, "https://a", "https://user:secret@a", 1) + `]}`,
		`{"version":1,"servers":[` + strings.Replace(entry, "https://a", "file:///etc", 1) + `]}`,
		`{"version":1,"servers":[` + strings.Replace(entry, `"uses":1`, `"uses":-1`, 1) + `]}`,
		strings.Repeat(" ", maxRecord+1),
	} {
		if m, err := decodeMemory([]byte(text)); err == nil {
			t.Errorf("%.80q was read as %+v", text, m)
		}
	}
	if _, err := decodeMemory([]byte(`{"version":1,"servers":[` + entry + `]}`)); err != nil {
		t.Error(err)
	}
}

func FuzzDecodeMemory(f *testing.F) {
	var m memory
	m.note(epoch, server("a"))
	b, err := m.encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeMemory(b)
		if err != nil {
			return
		}
		m.note(epoch, server("b"))
		if len(m.uses) > mostRemembered || len(m.top(epoch, 2)) > 2 {
			t.Errorf("%+v", m)
		}
	})
}
