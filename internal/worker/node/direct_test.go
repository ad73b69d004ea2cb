package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
)

// direct reports whether the mount of an image reads past the page cache of arenas.
func (h *host) direct(m *fakeImage) bool {
	h.t.Helper()
	at := filepath.Join(h.dir(m), "mnt")
	mounts, err := kernel.Mounts(at)
	if err != nil || len(mounts) != 1 {
		h.t.Fatalf("mounts at %s: %v, %v", at, mounts, err)
	}
	return slices.Contains(strings.Split(mounts[0].Options, ","), "directio")
}

// resident returns how many pages of the image's arena are in memory.
func (h *host) resident(m *fakeImage) (pages int) {
	h.t.Helper()
	f, err := os.Open(filepath.Join(h.dir(m), "arena"))
	if err != nil {
		h.t.Fatal(err)
	}
	defer f.Close()
	var all unix.CachestatRange
	var st unix.Cachestat_t
	if err := unix.Cachestat(uint(f.Fd()), &all, &st, 0); err != nil {
		h.t.Skip("skip: cachestat:", err)
	}
	return int(st.Cache)
}

// What a pull left in memory serves the containers that start right after it.
// Then a page that a container has read is in memory once.
func TestACompleteImageIsInMemoryOnce(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 20, 100<<10))
	ref := s.Serve("app:latest", m)
	h := newHost(t)
	h.mustPull(ref, api.Complete)
	if h.direct(m) {
		t.Error("an image that has just become complete is read from the disk")
	}
	if h.resident(m) == 0 {
		t.Error("nothing of an image that has just been pulled is in memory")
	}

	h.restart()
	if !h.direct(m) {
		t.Skip("skip: EROFS reads devices directly since Linux 6.15")
	}
	h.same(m)
	if n := h.resident(m); n > 0 {
		t.Errorf("%d pages of the arena of an image that was read directly are in memory", n)
	}
	h.reboot()
	h.start()
	if !h.direct(m) {
		t.Error("not read directly after a reboot")
	}
	h.same(m)

	// While the daemon runs, and after one that has nothing of its own.
	other := newFakeImage(t, some(100, 20, 100<<10))
	refOther := s.Serve("other:latest", other)
	h.stop()
	h.warm = time.Nanosecond
	h.start()
	h.mustPull(refOther, api.Complete)
	eventually(t, "the mount reads directly", func() error {
		if !h.direct(other) {
			return errors.New("it does not")
		}
		return nil
	})
	h.same(other)
	if n := h.resident(other); n > 0 {
		t.Errorf("%d pages of the arena of an image that was read directly are in memory", n)
	}
}

// A mount that reads past the page cache of its arenas has their disk's read-ahead,
// also one that an earlier daemon made; until then it has the kernel's.
func TestReadAheadOfTheDisk(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 3, 100<<10))
	h := newHost(t)
	disk, err := kernel.DiskReadAhead(h.root)
	if err != nil {
		t.Skip("skip:", err)
	}
	readAhead := func() int {
		t.Helper()
		file, err := os.ReadFile(filepath.Join(h.dir(m), "bdi"))
		if err != nil {
			t.Skip("skip: the read-ahead of a mount cannot be set:", err)
		}
		text, err := os.ReadFile(string(file))
		if err != nil {
			t.Fatal(err)
		}
		kib, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil {
			t.Fatal(err)
		}
		return kib
	}
	h.mustPull(s.Serve("app:latest", m), api.Complete)
	eventually(t, "the mount has read-ahead", func() error {
		if got := readAhead(); got != kernel.DefaultReadAhead {
			return fmt.Errorf("%d KiB while the arena has its own", got)
		}
		return nil
	})
	for _, restart := range []func(){h.restart, func() { h.reboot(); h.start() }} {
		restart()
		if !h.direct(m) {
			t.Skip("skip: EROFS reads devices directly since Linux 6.15")
		}
		if got, want := readAhead(), min(max(disk, kernel.DefaultReadAhead), 2048); got != want {
			t.Errorf("%d KiB of read-ahead, want %d of the disk's %d", got, want, disk)
		}
	}
}
