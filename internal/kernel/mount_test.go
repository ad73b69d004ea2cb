package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func fsconfigCreate(fs int) error { return unix.FsconfigCreate(fs) }

// needErofs makes an empty image and a mount point, or skips.
func needErofs(tb testing.TB) (image, target string) {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Skip("mounting needs root")
	}
	dir := tb.TempDir()
	if _, err := probeErofs(tb.Context(), dir); err != nil {
		tb.Skipf("no EROFS from files: %v", err)
	}
	return filepath.Join(dir, "image"), filepath.Join(dir, "mnt")
}

func TestMountErofs(t *testing.T) {
	image, target := needErofs(t)
	if err := MountErofs(Erofs{Image: image, Target: target}); err != nil {
		t.Fatal(err)
	}
	mounts, err := Mounts(target)
	if err != nil || len(mounts) != 1 || mounts[0].Type != "erofs" || mounts[0].Source != image || mounts[0].Target != target {
		t.Errorf("mounts %+v, %v", mounts, err)
	}
	if err := os.WriteFile(filepath.Join(target, "x"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("write: %v", err)
	}

	busy, err := os.Open(target)
	if err != nil {
		t.Fatal(err)
	}
	if err := Unmount(target, false); !errors.Is(err, unix.EBUSY) {
		t.Errorf("unmount while in use: %v", err)
	}
	if err := Unmount(target, true); err != nil {
		t.Error(err)
	}
	busy.Close()
	if mounts, err := Mounts(target); err != nil || len(mounts) != 0 {
		t.Errorf("mounts %+v, %v", mounts, err)
	}
	if err := Unmount(target, false); !errors.Is(err, unix.EINVAL) {
		t.Errorf("unmount of nothing: %v", err)
	}
}

// A path longer than an option may be.
func TestMountErofsLongPath(t *testing.T) {
	image, target := needErofs(t)
	deep := filepath.Join(filepath.Dir(image), strings.Repeat("d", 200), strings.Repeat("e", 200))
	if err := os.MkdirAll(deep, 0o755); err != nil {
		t.Fatal(err)
	}
	long := filepath.Join(deep, "image")
	if err := os.Rename(image, long); err != nil {
		t.Fatal(err)
	}
	if err := MountErofs(Erofs{Image: long, Target: target}); err != nil {
		t.Fatal(err)
	}
	if err := Unmount(target, false); err != nil {
		t.Error(err)
	}
}

func TestMountErofsReadAhead(t *testing.T) {
	image, target := needErofs(t)
	for _, kib := range []int{0, 64} {
		before, err := bdis("erofs")
		if err != nil {
			t.Fatal(err)
		}
		if err := MountErofs(Erofs{Image: image, Target: target, ReadAhead: &kib}); err != nil {
			t.Fatal(err)
		}
		after, err := bdis("erofs")
		if err != nil {
			t.Fatal(err)
		}
		found := 0
		for _, name := range after {
			b, err := os.ReadFile(filepath.Join(bdiDir, name, "read_ahead_kb"))
			if err == nil && strings.TrimSpace(string(b)) == strconv.Itoa(kib) {
				found++
			}
		}
		// Other mounts may come and go meanwhile.
		if len(after) >= len(before) && found == 0 {
			t.Errorf("no bdi of %v has a read-ahead of %d KiB", after, kib)
		}
		if err := Unmount(target, false); err != nil {
			t.Error(err)
		}
	}
}

// Where the read-ahead is set is told also of a mount that has the kernel's.
func TestMountErofsReadAheadFile(t *testing.T) {
	image, target := needErofs(t)
	var file string
	if err := MountErofs(Erofs{Image: image, Target: target, ReadAheadFile: &file}); err != nil {
		t.Fatal(err)
	}
	defer Unmount(target, true)
	for _, want := range []int{DefaultReadAhead, 2048, 0} {
		if want != DefaultReadAhead {
			if err := SetReadAhead(file, want); err != nil {
				t.Fatal(err)
			}
		}
		b, err := os.ReadFile(file)
		if got := strings.TrimSpace(string(b)); err != nil || got != strconv.Itoa(want) {
			t.Errorf("%s: read-ahead %q KiB, want %d, %v", file, got, want, err)
		}
	}
}

func TestDiskReadAhead(t *testing.T) {
	if kib, err := DiskReadAhead("/proc"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what is on no disk has a read-ahead of %d KiB, %v", kib, err)
	}
	if _, err := DiskReadAhead(filepath.Join(t.TempDir(), "not")); !errors.Is(err, unix.ENOENT) {
		t.Errorf("what is not there: %v", err)
	}
	dir := t.TempDir()
	kib, err := DiskReadAhead(dir)
	if errors.Is(err, os.ErrNotExist) {
		t.Skip("skip: temporary files are on no disk:", err)
	}
	if err != nil || kib < 0 {
		t.Errorf("%d KiB, %v", kib, err)
	}
}

func TestMountErofsErrors(t *testing.T) {
	image, target := needErofs(t)
	if err := MountErofs(Erofs{Image: image + "-not", Target: target}); !errors.Is(err, unix.ENOENT) {
		t.Errorf("missing image: %v", err)
	}
	if err := MountErofs(Erofs{Image: image, Target: target + "-not"}); !errors.Is(err, unix.ENOENT) {
		t.Errorf("missing target: %v", err)
	}
	if err := MountErofs(Erofs{Image: image, Target: target, Devices: []string{image}}); !errors.Is(err, unix.EINVAL) {
		t.Errorf("a device too many: %v", err)
	}
	if err := os.WriteFile(image, make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := MountErofs(Erofs{Image: image, Target: target}); !errors.Is(err, unix.EINVAL) {
		t.Errorf("no image: %v", err)
	}
}

func TestMountOverlay(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	// Characters that the list of lowerdir would need escaped, in a long path.
	dir := filepath.Join(t.TempDir(), `a:b,c\d e`, strings.Repeat("long", 60))
	path := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"upper", "work", "mnt"} {
		if err := os.MkdirAll(path(name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	o := Overlay{Upper: path("upper"), Work: path("work"), Target: path("mnt")}
	for i := range 3 {
		lower := path(fmt.Sprint("lower", i))
		if err := os.Mkdir(lower, 0o755); err != nil {
			t.Fatal(err)
		}
		for name, text := range map[string]string{"same": fmt.Sprint("of ", i), fmt.Sprint("only", i): "x"} {
			if err := os.WriteFile(filepath.Join(lower, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		o.Lower = append(o.Lower, lower)
	}
	if err := MountOverlay(o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := Unmount(path("mnt"), false); err != nil {
			t.Error(err)
		}
	})
	if b, err := os.ReadFile(path("mnt/same")); err != nil || string(b) != "of 0" {
		t.Errorf("the first lower directory is not on top: %q, %v", b, err)
	}
	for i := range 3 {
		if _, err := os.Stat(path(fmt.Sprint("mnt/only", i))); err != nil {
			t.Error(err)
		}
	}
	if err := os.WriteFile(path("mnt/new"), []byte("x"), 0o644); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path("upper/new")); err != nil {
		t.Error(err)
	}
	mounts, err := Mounts(path("mnt"))
	if err != nil || len(mounts) != 1 || mounts[0].Type != "overlay" || mounts[0].Target != path("mnt") {
		t.Errorf("mounts %+v, %v", mounts, err)
	}

	bad := o
	bad.Lower = []string{path("missing")}
	if err := MountOverlay(bad); !errors.Is(err, unix.ENOENT) {
		t.Errorf("missing lower directory: %v", err)
	}
	// The kernel's own words must be in the error.
	bad.Lower, bad.Options = o.Lower, []string{"no_such_option=1"}
	if err := MountOverlay(bad); err == nil || !strings.Contains(err.Error(), "Unknown parameter 'no_such_option'") {
		t.Errorf("unknown option: %v", err)
	}
}

func TestStatSpace(t *testing.T) {
	s, err := StatSpace(t.TempDir())
	if err != nil || s.Size <= 0 || s.Free < 0 || s.Free > s.Size || s.Type == 0 {
		t.Errorf("%+v, %v", s, err)
	}
	if _, err := StatSpace("/no/such/path"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

func TestMountErofsByLoopDevices(t *testing.T) {
	image, target := needErofs(t)
	if _, err := probeLoop(t.Context(), ""); err != nil {
		t.Skip(err)
	}
	if err := MountErofs(Erofs{Image: image, Target: target, Loop: true}); err != nil {
		t.Fatal(err)
	}
	mounts, err := Mounts(target)
	if err != nil || len(mounts) != 1 || !strings.HasPrefix(mounts[0].Source, "/dev/loop") {
		t.Fatalf("mounts %+v, %v", mounts, err)
	}
	loop := filepath.Join("/sys/block", filepath.Base(mounts[0].Source), "loop")
	if b, err := os.ReadFile(filepath.Join(loop, "dio")); err != nil || strings.TrimSpace(string(b)) != "1" {
		t.Errorf("direct I/O: %s, %v", b, err)
	}
	if err := Unmount(target, false); err != nil {
		t.Error(err)
	}
	// The device goes with the mount, a moment later.
	for range 1000 {
		if _, err = os.Stat(loop); err != nil {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the loop device is left: %v", err)
	}
}

func TestMountErofsBeneath(t *testing.T) {
	image, target := needErofs(t)
	for range 2 {
		err := MountErofs(Erofs{Image: image, Target: target, Beneath: true})
		if err == nil {
			t.Fatal("mounted beneath nothing")
		}
	}
	if err := MountErofs(Erofs{Image: image, Target: target}); err != nil {
		t.Fatal(err)
	}
	top, err := Mounts(target)
	if err != nil || len(top) != 1 {
		t.Fatalf("mounts %+v, %v", top, err)
	}
	if err := MountErofs(Erofs{Image: image, Target: target, Beneath: true}); err != nil {
		t.Fatal(err)
	}
	if err := Unmount(target, true); err != nil {
		t.Fatal(err)
	}
	mounts, err := Mounts(target)
	if err != nil || len(mounts) != 1 || mounts[0].ID == top[0].ID {
		t.Errorf("mounts %+v, %v; want one that is not %+v", mounts, err, top)
	}
	if err := Unmount(target, false); err != nil {
		t.Error(err)
	}
}
