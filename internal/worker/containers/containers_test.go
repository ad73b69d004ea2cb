package containers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/origin"
)

// newRoot returns a worker's directory with files below containers/. A name that
// ends with a slash is a directory.
func newRoot(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for _, name := range append([]string{""}, slices.Sorted(maps.Keys(files))...) {
		path := filepath.Join(root, "containers", name)
		dir := strings.HasSuffix(name, "/") || name == ""
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if dir && err == nil {
			err = os.MkdirAll(path, 0o755)
		}
		if !dir && err == nil {
			err = os.WriteFile(path, []byte(files[name]), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// load loads a root, and returns what was warned of.
func load(t *testing.T, root string) (s *Set, warnings []string) {
	t.Helper()
	s, err := Load(root, slog.New(slog.DiscardHandler), func(format string, args ...any) {
		warnings = append(warnings, fmt.Sprintf(format, args...))
	})
	if err != nil {
		t.Fatal(err)
	}
	return s, warnings
}

var chain = digest.FromString("rootfs")

func record(t *testing.T, id string, version int, created time.Time) string {
	t.Helper()
	c := Container{Version: version, Container: api.Container{ID: id, Ref: "r/a", Created: created}, ChainID: chain}
	b, err := json.Marshal(&c)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func ids(s *Set) (ids []string) {
	for _, c := range s.List() {
		ids = append(ids, c.ID)
	}
	return ids
}

func wantCode(t *testing.T, what string, err error, code string) {
	t.Helper()
	if e, ok := errors.AsType[*api.Error](err); !ok || e.Code != code {
		t.Errorf("%s: %v, want an error of code %s", what, err, code)
	}
}

func TestLoad(t *testing.T) {
	early, late := time.Unix(1_700_000_000, 0), time.Unix(1_700_000_001, 0)
	root := newRoot(t, map[string]string{
		"late/container.json":    record(t, "late", 1, late),
		"b/container.json":       record(t, "b", 1, early),
		"a/container.json":       record(t, "a", 1, early),
		"damaged/container.json": "{",
		"damaged/upper/file":     "what it wrote",
		"old/container.json":     record(t, "old", 0, early),
		"leftover/upper/file":    "what it wrote",
		"empty/":                 "",
	})
	s, warnings := load(t, root)
	want := []string{"a", "b", "late"} // the oldest first, then by ID
	if got := ids(s); !slices.Equal(got, want) || s.Len() != len(want) {
		t.Errorf("loaded %q, want %q", got, want)
	}
	if d := cmp.Diff(map[origin.Key][]string{origin.Key(chain): want}, s.On()); d != "" {
		t.Errorf("on the rootfs:\n%s", d)
	}
	// What cannot be read is left for somebody who can; leftovers go.
	if len(warnings) != 2 || !strings.Contains(warnings[0], "container damaged") || !strings.Contains(warnings[1], "container old") {
		t.Errorf("warned of %q", warnings)
	}
	left, err := os.ReadDir(filepath.Join(root, "containers"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range left {
		names = append(names, e.Name())
	}
	if want := []string{"a", "b", "damaged", "late", "old"}; !slices.Equal(names, want) {
		t.Errorf("directories %q, want %q", names, want)
	}
	if _, err := os.Stat(filepath.Join(root, "containers/damaged/upper/file")); err != nil {
		t.Error(err)
	}
}

func TestNewerRecordIsRefused(t *testing.T) {
	root := newRoot(t, map[string]string{"a/container.json": record(t, "a", version+1, time.Time{}), "a/upper/file": ""})
	_, err := Load(root, slog.New(slog.DiscardHandler), t.Errorf)
	wantCode(t, "a newer record", err, api.CodeUnsupported)
	for _, name := range []string{"container.json", "upper/file"} {
		if _, err := os.Stat(filepath.Join(root, "containers/a", name)); err != nil {
			t.Error(err)
		}
	}
}

func TestReserve(t *testing.T) {
	s, _ := load(t, newRoot(t, map[string]string{"taken/container.json": record(t, "taken", 1, time.Time{})}))
	for _, c := range []struct {
		id   string
		code string // empty: it is reserved
	}{
		{"a", ""},
		{"A.b_c-9", ""},
		{"9", ""},
		{strings.Repeat("x", 128), ""},
		{"a", api.CodeConflict},
		{"taken", api.CodeConflict},
		{"", api.CodeInvalid},
		{strings.Repeat("x", 129), api.CodeInvalid},
		{".", api.CodeInvalid},
		{"..", api.CodeInvalid},
		{"-x", api.CodeInvalid},
		{"a/b", api.CodeInvalid},
		{"a b", api.CodeInvalid},
		{"a\n", api.CodeInvalid},
		{"ä", api.CodeInvalid},
	} {
		got, err := s.reserve(c.id, nil)
		if c.code != "" {
			wantCode(t, fmt.Sprintf("reserve %q", c.id), err, c.code)
			continue
		}
		if err != nil || got.Dir != filepath.Join(s.opts.Root, "containers", c.id) || !got.busy {
			t.Errorf("reserve %q: %+v, %v", c.id, got, err)
		}
	}
	// A reserved one counts, and is not listed: nobody can run it yet.
	if got := ids(s); !slices.Equal(got, []string{"taken"}) || s.Len() != 5 {
		t.Errorf("%d containers, listed %q", s.Len(), got)
	}
	left, err := os.ReadDir(filepath.Join(s.opts.Root, "containers"))
	if err != nil || len(left) != 1 {
		t.Errorf("reserving touched the disk: %v, %v", left, err)
	}
}

// What an earlier container of this ID left is not seen in the next one.
func TestMakeDirs(t *testing.T) {
	root := newRoot(t, map[string]string{"a/": ""})
	s, _ := load(t, root)
	c, err := s.reserve("a", nil)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := s.makeDirs(c); err != nil {
			t.Fatal(err)
		}
		left, err := filepath.Glob(filepath.Join(c.Dir, "*", "*"))
		if err != nil || len(left) > 0 {
			t.Errorf("left: %q, %v", left, err)
		}
		for _, name := range []string{"rootfs", "upper", "work"} {
			if err := os.WriteFile(filepath.Join(c.Dir, name, "file"), nil, 0o600); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestTakeForRemoval(t *testing.T) {
	s, _ := load(t, newRoot(t, map[string]string{"a/container.json": record(t, "a", 1, time.Time{})}))
	c, err := s.takeForRemoval(t.Context(), "a")
	if err != nil || c == nil {
		t.Fatalf("%v, %v", c, err)
	}
	_, err = s.takeForRemoval(t.Context(), "a")
	wantCode(t, "one that is being removed", err, api.CodeConflict)
	_, err = s.takeForRemoval(t.Context(), "none")
	wantCode(t, "none", err, api.CodeNotFound)
}

// Who removes a container that waits for its image ends the wait, and removes what it
// has become meanwhile, if anything.
func TestRemovalOfOneThatWaitsForItsImage(t *testing.T) {
	for _, made := range []bool{false, true} {
		t.Run(fmt.Sprintf("made %v", made), func(t *testing.T) {
			s, _ := load(t, newRoot(t, nil))
			pull, drop := context.WithCancelCause(t.Context())
			c, err := s.reserve("a", &reservation{drop: drop, ended: make(chan struct{})})
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				<-pull.Done()
				if made {
					s.settle(c, true)
					return
				}
				s.mu.Lock()
				r := c.reserved
				delete(s.all, "a")
				s.mu.Unlock()
				close(r.ended)
			}()
			got, err := s.takeForRemoval(t.Context(), "a")
			if err != nil || made != (got == c) {
				t.Errorf("took %+v, %v", got, err)
			}
			wantCode(t, "the pull ends with", context.Cause(pull), api.CodeConflict)
		})
	}
}

func TestTracesOfWhatIsNotTraced(t *testing.T) {
	traced := strings.Replace(record(t, "b", 1, time.Time{}), `"version":1`, `"version":1,"traced":true`, 1)
	s, _ := load(t, newRoot(t, map[string]string{"a/container.json": record(t, "a", 1, time.Time{}), "b/container.json": traced}))
	for _, c := range []struct{ id, want string }{
		{"a", "is not traced"},
		{"b", "was restarted"},
		{"none", "no container"},
	} {
		_, err := s.TraceStatus(c.id)
		wantCode(t, c.id, err, api.CodeNotFound)
		if err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.id, err, c.want)
		}
	}
}
