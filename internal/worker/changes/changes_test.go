package changes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/pkg/archive"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/fstest"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/kernel/kerneltest"
)

func TestMain(m *testing.M) {
	kerneltest.OwnMounts()
	unix.Umask(0o022)
	os.Exit(m.Run())
}

// newTree mounts an overlay on what lower makes.
func newTree(t testing.TB, dir string, options []string, lower func(dir string)) Tree {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	at := func(name string) string {
		d := filepath.Join(dir, name)
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
		return d
	}
	tree := Tree{Upper: at("upper"), Lower: at("lower"), Merged: at("merged")}
	lower(tree.Lower)
	err := kernel.MountOverlay(kernel.Overlay{Lower: []string{tree.Lower}, Upper: tree.Upper, Work: at("work"), Target: tree.Merged, Options: options})
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

func (t Tree) close(tb testing.TB) {
	tb.Helper()
	if err := kernel.Unmount(t.Merged, false); err != nil {
		tb.Error(err)
	}
}

// must fails a test that could not make its files.
func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func write(path, content string) error { return os.WriteFile(path, []byte(content), 0o644) }

// told is what Walk tells, one line a change.
func told(t testing.TB, tree Tree) (lines []string) {
	t.Helper()
	must(t, tree.Walk(t.Context(), func(c *Change) error {
		s := string(c.Kind) + " " + c.Path
		if c.Opaque {
			s += " opaque"
		}
		lines = append(lines, s)
		return nil
	}))
	return lines
}

func TestWalk(t *testing.T) {
	for _, options := range [][]string{nil, {"redirect_dir=on", "metacopy=on"}} {
		t.Run(fmt.Sprint(options), func(t *testing.T) {
			tree := newTree(t, t.TempDir(), options, func(dir string) {
				for _, d := range []string{"kept", "gone", "emptied/sub", "replaced", "renamed/sub", "parent"} {
					must(t, os.MkdirAll(filepath.Join(dir, d), 0o755), write(filepath.Join(dir, d, "file"), d))
				}
				must(t, write(filepath.Join(dir, "a"), "a"), write(filepath.Join(dir, "b"), "b"), write(filepath.Join(dir, "was"), ""))
			})
			defer tree.close(t)
			in := func(name string) string { return filepath.Join(tree.Merged, name) }
			must(t,
				os.RemoveAll(in("gone")),
				os.RemoveAll(in("emptied")), os.Mkdir(in("emptied"), 0o700),
				os.RemoveAll(in("replaced")), write(in("replaced"), "a file now"),
				exec.Command("mv", in("renamed"), in("moved")).Run(),
				write(in("parent/new"), ""), os.Chown(in("a"), 1, 1), os.Remove(in("b")),
				os.Mkdir(in("new"), 0o755), unix.Mkfifo(in("new/fifo"), 0o600),
				write(in("temporary"), ""), os.Remove(in("temporary")),
				// Sockets, and what a runtime mounts on.
				unix.Mknod(in("socket"), unix.S_IFSOCK|0o600, 0),
				os.Remove(in("was")), unix.Mknod(in("was"), unix.S_IFSOCK|0o600, 0),
				os.Mkdir(in("proc"), 0o755), write(in("hosts"), ""),
				os.Mkdir(in("used"), 0o755), write(in("used/file"), ""),
				os.MkdirAll(in("way/to/mount"), 0o755), write(in("way/to/other"), ""),
				os.MkdirAll(in("way2/mount"), 0o755), write(in("way2/own"), ""),
			)
			tree.Mountpoints = []string{"/proc", "/hosts", "/used", "/kept", "/none", "/way/to/mount", "/way/to/other", "/way2/mount"}
			want := []string{
				"modified a", "deleted b", "modified emptied opaque", "deleted gone",
				"added moved", "added moved/sub", "added moved/sub/file",
				"added new", "added new/fifo", "modified parent", "added parent/new",
				"deleted renamed", "modified replaced", "added used", "added used/file", "deleted was",
				"added way2", "added way2/own",
			}
			if d := cmp.Diff(want, told(t, tree)); d != "" {
				t.Error(d)
			}
		})
	}
}

// A container that runs exchanges what is read for links to this host's files.
func TestNothingOfTheHost(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	must(t, os.Mkdir(secret, 0o700), write(filepath.Join(secret, "file"), "secret"))
	tree := newTree(t, t.TempDir(), nil, func(string) {})
	defer tree.close(t)
	must(t, os.Mkdir(filepath.Join(tree.Merged, "dir"), 0o755), write(filepath.Join(tree.Merged, "dir/file"), "own"))
	var out bytes.Buffer
	err := tree.Walk(t.Context(), func(c *Change) error {
		if c.Path == "dir" {
			must(t, os.Rename(filepath.Join(tree.Merged, "dir"), filepath.Join(tree.Merged, "other")), os.Symlink(secret, filepath.Join(tree.Merged, "dir")))
			return nil
		}
		f, err := c.reopen()
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = out.ReadFrom(f)
		return err
	})
	if !errors.Is(err, ErrRunning) || out.Len() > 0 {
		t.Errorf("%v, read %q", err, out.String())
	}
}

func TestLayerRefuses(t *testing.T) {
	tree := newTree(t, t.TempDir(), nil, func(string) {})
	defer tree.close(t)
	must(t, write(filepath.Join(tree.Merged, ".wh.a"), ""))
	if _, err := tree.WriteLayer(t.Context(), new(bytes.Buffer), LayerOptions{}); err == nil || !strings.Contains(err.Error(), "/.wh.a cannot be in a layer") {
		t.Error(err)
	}
	must(t, os.Remove(filepath.Join(tree.Merged, ".wh.a")), write(filepath.Join(tree.Merged, "a"), "a"))
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("enough"))
	if _, err := tree.WriteLayer(ctx, new(bytes.Buffer), LayerOptions{}); err == nil || err.Error() != "enough" {
		t.Error(err)
	}
}

// The same changes, made later, give the same layer.
func TestReproducible(t *testing.T) {
	latest := time.Unix(1_700_000_000, 0)
	var layers [2]bytes.Buffer
	for i := range layers {
		tree := newTree(t, t.TempDir(), nil, func(dir string) { must(t, write(filepath.Join(dir, "old"), "")) })
		old := filepath.Join(tree.Merged, "dir/old")
		must(t, os.Mkdir(filepath.Join(tree.Merged, "dir"), 0o755), write(old, "old"), write(filepath.Join(tree.Merged, "dir/new"), "new"),
			os.Chtimes(old, time.Unix(1_600_000_000, 5), time.Unix(1_600_000_000, 5)), os.Remove(filepath.Join(tree.Merged, "old")),
			unix.Setxattr(old, "user.b", []byte("b"), 0), unix.Setxattr(old, "user.a", []byte("a"), 0))
		n, err := tree.WriteLayer(t.Context(), &layers[i], LayerOptions{Latest: latest})
		if err != nil || n != (Written{Entries: 4, Bytes: 6}) {
			t.Errorf("%+v, %v", n, err)
		}
		tree.close(t)
		time.Sleep(10 * time.Millisecond)
	}
	if !bytes.Equal(layers[0].Bytes(), layers[1].Bytes()) {
		t.Error("the layers differ")
	}
	tree := t.TempDir()
	if _, err := archive.Apply(t.Context(), tree, &layers[0]); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]time.Time{"dir": latest, "dir/new": latest, "dir/old": time.Unix(1_600_000_000, 5)} {
		if fi, err := os.Stat(filepath.Join(tree, name)); err != nil || !fi.ModTime().Equal(want) {
			t.Errorf("%s: %v, %v", name, fi.ModTime(), err)
		}
	}
}

// random does to a tree what containers do to theirs.
type random struct {
	*rapid.T
	root string
}

// path draws one of few paths, so that many things happen to each.
func (r *random) path(label string) string {
	s := r.root
	for range rapid.IntRange(1, 3).Draw(r.T, "depth") {
		s = filepath.Join(s, rapid.SampledFrom([]string{"a", "b", "c", "ü\n", "d"}).Draw(r.T, label))
	}
	return s
}

// step does one thing, or tries to: what the tree does not allow is no matter.
func (r *random) step() {
	p := r.path("path")
	if fi, err := os.Stat(filepath.Dir(p)); err == nil && !fi.IsDir() {
		return // who opens a FIFO as if it were a directory waits, too
	}
	switch rapid.SampledFrom([]string{"write", "write", "mkdir", "mkdir", "mkdir", "remove", "removeAll", "rename", "rename", "link", "symlink", "chmod", "chown", "xattr", "append", "truncate", "times", "fifo", "device", "capability", "replaceDir"}).Draw(r.T, "what") {
	case "write":
		if fi, err := os.Stat(p); err == nil && !fi.Mode().IsRegular() {
			return // who writes to a FIFO waits for a reader
		}
		_ = os.WriteFile(p, bytes.Repeat([]byte{byte(rapid.IntRange(0, 9).Draw(r.T, "byte"))}, rapid.SampledFrom([]int{0, 1, 5000, 300_000}).Draw(r.T, "size")), 0o644)
	case "mkdir":
		_ = os.MkdirAll(p, 0o755)
	case "remove":
		_ = os.Remove(p)
	case "removeAll":
		_ = os.RemoveAll(p)
	case "rename":
		_ = exec.Command("mv", "-T", p, r.path("to")).Run() // copies where rename says EXDEV
	case "link":
		_ = os.Link(p, r.path("to"))
	case "symlink":
		_ = os.Symlink(rapid.SampledFrom([]string{"a", "../b", "/c", strings.Repeat("x", 300)}).Draw(r.T, "target"), p)
	case "chmod":
		_ = unix.Fchmodat(unix.AT_FDCWD, p, rapid.SampledFrom([]uint32{0o600, 0o755, 0o4755, 0o1777, 0}).Draw(r.T, "mode"), unix.AT_SYMLINK_NOFOLLOW)
	case "chown":
		_ = os.Lchown(p, rapid.SampledFrom([]int{0, 1, 1 << 30}).Draw(r.T, "uid"), 7)
	case "xattr":
		if fi, err := os.Lstat(p); err == nil && fi.Mode()&os.ModeSymlink == 0 {
			_ = unix.Lsetxattr(p, "user."+rapid.SampledFrom([]string{"a", "b"}).Draw(r.T, "name"), []byte(rapid.SampledFrom([]string{"", "1", "\x00=\n"}).Draw(r.T, "value")), 0)
		}
	case "append":
		if fi, err := os.Lstat(p); err == nil && fi.Mode().IsRegular() {
			if f, err := os.OpenFile(p, os.O_APPEND|os.O_WRONLY, 0); err == nil {
				_, _ = f.WriteString("more")
				_ = f.Close()
			}
		}
	case "truncate":
		if fi, err := os.Lstat(p); err == nil && fi.Mode().IsRegular() {
			_ = os.Truncate(p, rapid.SampledFrom([]int64{0, 3, 2 << 20}).Draw(r.T, "size"))
		}
	case "times":
		at := unix.Timespec{Sec: int64(rapid.IntRange(1, 1_700_000_000).Draw(r.T, "seconds")), Nsec: 123_456_789}
		_ = unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{at, at}, unix.AT_SYMLINK_NOFOLLOW)
	case "fifo":
		_ = unix.Mkfifo(p, 0o640)
	case "device":
		_ = unix.Mknod(p, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3)))
	case "capability":
		if fi, err := os.Lstat(p); err == nil && fi.Mode().IsRegular() {
			_ = unix.Lsetxattr(p, "security.capability", []byte("\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0)
		}
	case "replaceDir":
		if fi, err := os.Lstat(p); err == nil && fi.IsDir() {
			_ = os.RemoveAll(p)
			_ = os.Mkdir(p, 0o700)
		}
	}
}

// Whatever a container does, the layer of it makes the image of what containerd unpacks of that: what the
// container has seen.
func TestRandomChanges(t *testing.T) {
	options := [][]string{nil, {"redirect_dir=on", "metacopy=on"}, {"redirect_dir=on"}}
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	rapid.Check(t, func(rt *rapid.T) {
		dir, err := os.MkdirTemp("", "foil-changes-")
		must(t, err)
		defer os.RemoveAll(dir)
		tree := newTree(t, dir, rapid.SampledFrom(options).Draw(rt, "options"), func(lower string) {
			r := &random{rt, lower}
			for range rapid.IntRange(0, 25).Draw(rt, "before") {
				r.step()
			}
		})
		defer tree.close(t)
		copied := filepath.Join(dir, "copy")
		if out, err := exec.Command("cp", "-a", tree.Lower, copied).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		r := &random{rt, tree.Merged}
		for range rapid.IntRange(1, 40).Draw(rt, "steps") {
			r.step()
		}
		var tar bytes.Buffer
		if _, err := tree.WriteLayer(t.Context(), &tar, LayerOptions{}); err != nil {
			rt.Fatal(err)
		}
		if _, err := archive.Apply(t.Context(), copied, &tar); err != nil {
			rt.Fatalf("containerd does not unpack it: %v", err)
		}
		var trees [2]fstest.Tree
		ours := fstest.Options{IgnoreXattr: func(name string) bool { return strings.HasPrefix(name, "trusted.") }}
		for i, d := range []string{tree.Merged, copied} {
			if trees[i], err = ours.Snapshot(d); err != nil {
				rt.Fatal(err)
			}
			delete(trees[i], ".") // the root's metadata is no image's to say
		}
		sayable := func(_ string, a, b *fstest.Node) {
			// overlayfs goes on counting names of the image that are gone.
			a.Nlink, b.Nlink = 0, 0
			if a.Mode&unix.S_IFMT == unix.S_IFDIR && b.Mode&unix.S_IFMT == unix.S_IFDIR {
				// No layer takes an attribute from a directory.
				for name := range b.Xattrs {
					if _, ok := a.Xattrs[name]; !ok {
						delete(b.Xattrs, name)
					}
				}
			}
		}
		if d := fstest.Diff(trees[0], trees[1], sayable); d != "" {
			rt.Fatalf("what the container saw, and what was unpacked:\n%s\nchanges: %q", d, told(t, tree))
		}
	})
}
