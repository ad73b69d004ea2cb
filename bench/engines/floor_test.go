package engines

import (
	"bytes"
	"crypto/sha256"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestResidentPages(t *testing.T) {
	page := os.Getpagesize()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, bytes.Repeat([]byte("x"), 10*page+1), 0o644); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil {
		t.Fatal(err)
	}
	if fs.Type == unix.TMPFS_MAGIC {
		t.Skip("files of a tmpfs are always in memory")
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	for _, advice := range []int{unix.FADV_DONTNEED, unix.FADV_RANDOM} {
		if err := unix.Fadvise(int(f.Fd()), 0, 0, advice); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := f.ReadAt(make([]byte, 2), int64(3*page)-1); err != nil {
		t.Fatal(err)
	}
	pages, err := residentPages(path, int64(10*page+1))
	if err != nil {
		t.Fatal(err)
	}
	got := make([]bool, len(pages))
	for i, p := range pages {
		got[i] = p&1 == 1
	}
	want := make([]bool, 11)
	want[2], want[3] = true, true
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("resident (-want +got):\n%s", diff)
	}
}

// Only what is touched counts, links once, and known contents not as new.
func TestCollectTouched(t *testing.T) {
	tree := t.TempDir()
	content := bytes.Repeat([]byte("all of it has just been written, and so is in the page cache\n"), 1000)
	for _, name := range []string{"new", "known"} {
		if err := os.WriteFile(filepath.Join(tree, name), append(content, name...), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Link(filepath.Join(tree, "new"), filepath.Join(tree, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(tree, "empty"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	s, err := collectTouched(tree, nil)
	if err != nil {
		t.Fatal(err)
	}
	if want := int64(2*len(content) + len("new") + len("known")); s.Touched != want {
		t.Errorf("touched %d bytes, want %d", s.Touched, want)
	}
	if s.Compressed == 0 || s.Compressed > s.Touched/10 {
		t.Errorf("%d bytes compressed to %d", s.Touched, s.Compressed)
	}
	all, err := collectTouched(tree, map[[sha256.Size]byte]bool{
		sha256.Sum256(append(content, "new"...)):   true,
		sha256.Sum256(append(content, "known"...)): true,
	})
	if err != nil {
		t.Fatal(err)
	}
	if all.Touched != s.Touched || all.Compressed > 20 {
		t.Errorf("with every content known: touched %d, %d new ones compressed", all.Touched, all.Compressed)
	}
}
