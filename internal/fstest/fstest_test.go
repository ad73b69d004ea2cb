package fstest_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/fstest"
)

func build(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	p := func(s string) string { return filepath.Join(dir, s) }
	must(os.Mkdir(p("d"), 0o755))
	must(os.WriteFile(p("d/f"), []byte("data"), 0o644))
	must(os.Link(p("d/f"), p("a")))
	must(os.Symlink("d/f", p("s")))
	must(unix.Mkfifo(p("p"), 0o600))
	for _, f := range []string{"d/f", "p", "d", "."} {
		must(os.Chtimes(p(f), time.Unix(5, 7), time.Unix(5, 7)))
	}
	must(unix.Lutimes(p("s"), []unix.Timeval{{Sec: 5}, {Sec: 5}}))
	return dir
}

func TestSnapshotSeesEveryField(t *testing.T) {
	x, err := fstest.Snapshot(build(t))
	if err != nil {
		t.Fatal(err)
	}
	if len(x) != 6 {
		t.Fatalf("%d nodes, want 6: %v", len(x), x)
	}
	if n := x["d/f"]; n.Link != "a" || n.Nlink != 2 || n.Size != 4 || n.Mtime != 5 || n.MtimeNsec != 7 {
		t.Errorf("d/f is %+v", n)
	}
	if n := x["s"]; n.Target != "d/f" || n.Mode&unix.S_IFMT != unix.S_IFLNK {
		t.Errorf("s is %+v", n)
	}
	y, err := fstest.Snapshot(build(t))
	if err != nil {
		t.Fatal(err)
	}
	if d := fstest.Diff(x, y); d != "" {
		t.Errorf("equal trees differ:\n%s", d)
	}
}

func TestDiffNamesEachChange(t *testing.T) {
	a, err := fstest.Snapshot(build(t))
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		change func(dir string) error
		want   string
	}{
		"content": {func(d string) error {
			if err := os.WriteFile(d+"/d/f", []byte("DATA"), 0); err != nil {
				return err
			}
			return os.Chtimes(d+"/d/f", time.Unix(5, 7), time.Unix(5, 7))
		}, `"a": content`},
		"mode":    {func(d string) error { return os.Chmod(d+"/d", 0o700) }, `"d": mode 040755 != 040700`},
		"removed": {func(d string) error { return os.Remove(d + "/p") }, `"p": only in the first`},
		"added":   {func(d string) error { return os.WriteFile(d+"/new", nil, 0o644) }, `"new": only in the second`},
		"unlinked": {func(d string) error {
			if err := os.Remove(d + "/a"); err != nil {
				return err
			}
			return os.Link(d+"/s", d+"/a")
		}, `hard link of "a" != ""`},
		"mtime": {func(d string) error { return os.Chtimes(d+"/p", time.Time{}, time.Unix(5, 8)) }, `"p": mtime 5.000000007 != 5.000000008`},
		"xattr": {func(d string) error { return unix.Lsetxattr(d+"/d", "user.k", []byte{0, 1}, 0) }, `"d": xattr "user.k" only in the second`},
	} {
		t.Run(name, func(t *testing.T) {
			dir := build(t)
			if err := tc.change(dir); err != nil {
				t.Fatal(err)
			}
			b, err := fstest.Snapshot(dir)
			if err != nil {
				t.Fatal(err)
			}
			if d := fstest.Diff(a, b); !strings.Contains(d, tc.want) {
				t.Errorf("want %s in:\n%s", tc.want, d)
			}
		})
	}
}
