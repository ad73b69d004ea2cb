package images_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/images"
	"hydrofoil.dev/foil/internal/worker/origin"
)

// newRoot returns a worker's directory with no images.
func newRoot(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "images"), 0o755); err != nil {
		t.Fatal(err)
	}
	return root
}

// load loads a root, and returns what was warned of.
func load(t *testing.T, root string) (s *images.Set, warnings []string) {
	t.Helper()
	s, err := images.Load(root, slog.New(slog.DiscardHandler), func(format string, args ...any) {
		warnings = append(warnings, fmt.Sprintf(format, args...))
	})
	if err != nil {
		t.Fatal(err)
	}
	return s, warnings
}

func image(ref string) *images.Image {
	return &images.Image{
		Version: images.Version, Ref: ref, Digest: digest.FromString("manifest of " + ref), Manifest: []byte("{}"),
		Config: []byte("{}"), ChainID: digest.FromString("rootfs"), Rootfs: origin.KeyOf("r", "c", "t"), Created: time.Unix(1_700_000_000, 0).UTC(),
	}
}

// put puts images into a set, and returns the paths of their records.
func put(t *testing.T, s *images.Set, refs ...string) (paths []string) {
	t.Helper()
	for _, ref := range refs {
		img := image(ref)
		record, err := s.Stage(img)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Put(img, record); err != nil {
			t.Fatal(err)
		}
		paths = append(paths, record.Path())
	}
	return paths
}

// refs lists the references of a set, the least recently used first.
func refs(s *images.Set) (refs []string) {
	list := s.List()
	slices.SortFunc(list, func(a, b images.Listed) int { return a.Used.Compare(b.Used) })
	for _, img := range list {
		refs = append(refs, img.Ref)
	}
	return refs
}

func TestWhatWasPutIsLoaded(t *testing.T) {
	root := newRoot(t)
	s, _ := load(t, root)
	put(t, s, "r/b", "r/a")
	if err := s.Remove("r/b"); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove("r/none"); err != nil {
		t.Errorf("remove what is not there: %v", err)
	}
	again, warnings := load(t, root)
	if d := cmp.Diff(image("r/a"), again.Get("r/a")); d != "" || again.Len() != 1 || again.Get("r/b") != nil {
		t.Errorf("%d images:\n%s", again.Len(), d)
	}
	if of := again.Of(image("r/a").Rootfs); len(of) != 1 || of[0].Ref != "r/a" {
		t.Errorf("%d images of the rootfs", len(of))
	}
	if len(warnings) > 0 {
		t.Errorf("warned of %q", warnings)
	}
}

// A record that is only staged is no image: a crash leaves it, and Load removes it.
func TestStagedIsNoImage(t *testing.T) {
	root := newRoot(t)
	s, _ := load(t, root)
	if _, err := s.Stage(image("r/a")); err != nil {
		t.Fatal(err)
	}
	again, warnings := load(t, root)
	left, err := os.ReadDir(filepath.Join(root, "images"))
	if again.Len() != 0 || len(warnings) > 0 || err != nil || len(left) > 0 {
		t.Errorf("%d images, warnings %q, left %v, %v", again.Len(), warnings, left, err)
	}
}

func TestLoadSetsAside(t *testing.T) {
	for _, c := range []struct {
		name   string
		damage func(record string) string
		want   string // in the warning
	}{
		{"no JSON", func(r string) string { return r[:len(r)/2] }, "JSON"},
		{"version 0", func(r string) string { return strings.Replace(r, `"version":1`, `"version":0`, 1) }, "version 0"},
		{"digest", func(r string) string { return strings.Replace(r, `"digest":"sha256:`, `"digest":"sha256:x`, 1) }, "digest"},
		{"rootfs", func(r string) string { return strings.Replace(r, `"chain_id":"sha256:`, `"chain_id":"`, 1) }, "digest"},
		{"of another reference", func(r string) string { return strings.Replace(r, `"r/bad"`, `"r/other"`, 1) }, "record of r/other"},
	} {
		t.Run(c.name, func(t *testing.T) {
			root := newRoot(t)
			s, _ := load(t, root)
			path := put(t, s, "r/good", "r/bad")[1]
			rewrite(t, path, c.damage)
			s, warnings := load(t, root)
			if s.Len() != 1 || s.Get("r/good") == nil {
				t.Errorf("%d images", s.Len())
			}
			if len(warnings) != 1 || !strings.Contains(warnings[0], c.want) {
				t.Errorf("warned of %q, want %q", warnings, c.want)
			}
			if aside := s.SetAside(); !slices.Equal(aside, []string{path + ".bad"}) {
				t.Errorf("set aside: %q", aside)
			}
			if _, warnings := load(t, root); len(warnings) > 0 {
				t.Errorf("the next daemon warns of %q", warnings)
			}
		})
	}
}

func TestNewerRecordIsRefused(t *testing.T) {
	root := newRoot(t)
	s, _ := load(t, root)
	path := put(t, s, "r/a")[0]
	rewrite(t, path, func(r string) string { return strings.Replace(r, `"version":1`, `"version":2`, 1) })
	_, err := images.Load(root, slog.New(slog.DiscardHandler), t.Errorf)
	e, ok := errors.AsType[*api.Error](err)
	if !ok || e.Code != api.CodeUnsupported || !strings.Contains(e.Message, "newer foil") {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Errorf("the record is not where it was: %v", err)
	}
}

// What was used last is last, whatever the clock says, also for the next daemon.
func TestTouch(t *testing.T) {
	root := newRoot(t)
	s, _ := load(t, root)
	paths := put(t, s, "r/a", "r/b", "r/c")
	for _, c := range []struct {
		ref  string
		want []string
	}{
		{"r/c", []string{"r/a", "r/b", "r/c"}},
		{"r/a", []string{"r/b", "r/c", "r/a"}},
		{"r/b", []string{"r/c", "r/a", "r/b"}},
		{"r/none", []string{"r/c", "r/a", "r/b"}},
	} {
		s.Touch(c.ref)
		if got := refs(s); !slices.Equal(got, c.want) {
			t.Errorf("after %s: %q, want %q", c.ref, got, c.want)
		}
	}
	// The clock was ahead.
	ahead := time.Now().Add(time.Hour)
	if err := os.Chtimes(paths[2], ahead, ahead); err != nil {
		t.Fatal(err)
	}
	s, _ = load(t, root)
	s.Touch("r/a")
	for range 2 {
		if got, want := refs(s), []string{"r/b", "r/c", "r/a"}; !slices.Equal(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
		s, _ = load(t, root)
	}
}

func TestSetWhy(t *testing.T) {
	s, _ := load(t, newRoot(t))
	put(t, s, "r/a")
	for _, why := range []string{"no answer", ""} {
		s.SetWhy("r/a", why)
		s.SetWhy("r/none", why)
		if list := s.List(); len(list) != 1 || list[0].Why != why {
			t.Errorf("%+v, want %q", list, why)
		}
	}
}

func rewrite(t *testing.T, path string, change func(string) string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	changed := change(string(b))
	if changed == string(b) {
		t.Fatal("nothing was changed")
	}
	if err := os.WriteFile(path, []byte(changed), 0o600); err != nil {
		t.Fatal(err)
	}
}

// Records of versions that knew no origins name a rootfs by its chain ID.
func TestARecordWithoutARootfsHasTheChainIDs(t *testing.T) {
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "images"), 0o700); err != nil {
		t.Fatal(err)
	}
	s, _ := load(t, root)
	path := put(t, s, "r/a")[0]
	b, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, bytes.Replace(b, []byte(`"rootfs":"`+string(image("r/a").Rootfs)+`",`), nil, 1), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	again, _ := load(t, root)
	if img := again.Get("r/a"); img == nil || img.Rootfs != origin.Key(img.ChainID) {
		t.Errorf("it names %+v", img)
	}
}
