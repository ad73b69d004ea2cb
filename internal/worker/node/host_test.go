package node

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/logtest"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/hosttest"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

// This test binary is also the keeper, and the daemon that dies at a point.
const (
	daemonEnv = "FOIL_NODE_TEST_DAEMON" // root
	pointEnv  = "FOIL_NODE_TEST_POINT"  // where to die
	pullEnv   = "FOIL_NODE_TEST_PULL"   // reference to pull first; "-" and one to remove then
)

func TestMain(m *testing.M) {
	hosttest.Main(m, func() {
		if root := os.Getenv(daemonEnv); root != "" {
			os.Exit(dyingDaemon(root))
		}
	})
}

// host is a worker of a test: a root, and the daemons on it, one after the other.
type host struct {
	t       testing.TB
	root    string
	giveUp  time.Duration
	early   time.Duration // how long pulls that are begun for a header wait; 0: an hour
	store   DescriptorStore
	warm    time.Duration // Options.keepWarm; 0: an hour
	retry   time.Duration // Options.firstRetry; 0: an hour
	wanted  time.Duration // Options.wantedRetry; 0: an hour
	stall   time.Duration // Options.stalled; 0: an hour
	servers int           // Options.KeepServers
	at      func(string)  // called at the points at which a daemon can die
	n       *Node
	log     logtest.Buffer
}

func (h *host) imagePath(ref string) string { return imagePath(h.root, ref) }

func imagePath(root, ref string) string {
	sum := sha256.Sum256([]byte(ref))
	return filepath.Join(root, "images", hex.EncodeToString(sum[:])+".json")
}

// newHost starts a daemon on a new root.
func newHost(t testing.TB) *host {
	t.Helper()
	h := &host{t: t}
	h.root = hosttest.Root(t, func() {
		if h.n != nil {
			h.stop()
		}
		if t.Failed() {
			t.Logf("log:\n%s", h.log.String())
		}
	})
	h.start()
	return h
}

// bestGate is the one that a daemon under systemd has here; empty: none, which is said where it is needed.
func bestGate() string {
	list, err := hosttest.Gates()
	if err != nil {
		return ""
	}
	return list[0]
}

func (h *host) options() Options {
	self, err := os.Executable()
	if err != nil {
		h.t.Fatal(err)
	}
	return Options{Root: h.root, Binary: self, Gate: bestGate(), GiveUp: h.giveUp, Store: h.store, KeepServers: h.servers, noProofs: true, claimWithin: cmp.Or(h.early, time.Hour), keepWarm: cmp.Or(h.warm, time.Hour), firstRetry: cmp.Or(h.retry, time.Hour), stalled: cmp.Or(h.stall, time.Hour), wantedRetry: cmp.Or(h.wanted, time.Hour), crash: h.at, Logger: slog.New(slog.NewTextHandler(&h.log, nil))}
}

func (h *host) start() {
	h.t.Helper()
	var err error
	if h.n, err = New(h.options()); err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) stop() {
	h.t.Helper()
	if err := h.n.Close(); err != nil {
		h.t.Errorf("close: %v", err)
	}
	h.n = nil
}

func (h *host) restart() {
	h.t.Helper()
	h.stop()
	h.start()
}

func (h *host) keepers() []int { return hosttest.Keepers(h.t, h.root) }

func (h *host) endKeeper() { hosttest.EndKeeper(h.t, h.root) }

func (h *host) mounts() []string { return hosttest.Mounts(h.t, h.root) }

func (h *host) unmountAll() { hosttest.Unmount(h.t, h.root) }

// reboot is what is left of the host after one, with no daemon yet: no process,
// no mount, and presence maps of another boot.
func (h *host) reboot() {
	h.t.Helper()
	if h.n != nil {
		h.stop()
	}
	h.endKeeper()
	h.unmountAll()
	maps, err := filepath.Glob(filepath.Join(h.root, "rootfs/*/presence"))
	if err != nil {
		h.t.Fatal(err)
	}
	for _, path := range maps {
		b, err := os.ReadFile(path)
		if err != nil {
			h.t.Fatal(err)
		}
		b[48] ^= 0xff // the boot ID
		binary.LittleEndian.PutUint32(b[92:], crc32.Checksum(b[:92], crc32.MakeTable(crc32.Castagnoli)))
		if err := os.WriteFile(path, b, 0o600); err != nil {
			h.t.Fatal(err)
		}
	}
}

// pull follows a pull until an event.
func (h *host) pull(ref string, until api.EventKind) (last api.Event, err error) {
	return hosttest.Pull(h.t, h.n, ref, until)
}

func (h *host) mustPull(ref string, until api.EventKind) api.Event {
	h.t.Helper()
	ev, err := h.pull(ref, until)
	if err != nil || ev.Event != until {
		h.t.Fatalf("pull %s: %v, last event %+v", ref, err, ev)
	}
	return ev
}

func (h *host) remove(ref string) {
	h.t.Helper()
	if err := h.n.RemoveImage(h.t.Context(), ref); err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) image(ref string) api.Image {
	h.t.Helper()
	list, err := h.n.Images(h.t.Context())
	if err != nil {
		h.t.Fatal(err)
	}
	for _, img := range list {
		if img.Ref == ref {
			return img
		}
	}
	return api.Image{}
}

// dir is that of an image's rootfs, or of what is left of it; one that is not there if there is none.
func (h *host) dir(m *fakeImage) string {
	records, _ := filepath.Glob(filepath.Join(h.root, "rootfs", "*", rootfs.RecordName))
	lenders, _ := filepath.Glob(filepath.Join(h.root, "rootfs", "*", rootfs.LenderName))
	for _, path := range append(records, lenders...) {
		b, err := os.ReadFile(path)
		if err == nil && bytes.Contains(b, []byte(m.ChainID)) && bytes.Contains(b, []byte(m.TOCDigest)) {
			return filepath.Dir(path)
		}
	}
	return filepath.Join(h.root, "rootfs", "none")
}

// key is that of an image's rootfs.
func (h *host) key(m *fakeImage) origin.Key { return rootfs.KeyOf(h.dir(m)) }

// same compares every file of a mounted image with what it should be.
func (h *host) same(m *fakeImage) {
	h.t.Helper()
	for _, name := range slices.Sorted(maps.Keys(m.Files)) {
		got, err := os.ReadFile(filepath.Join(h.dir(m), "mnt", name))
		if err != nil {
			h.t.Fatal(err)
		}
		if string(got) != m.Files[name] {
			h.t.Fatalf("%s: wrong bytes", name)
		}
	}
}

// verified has the daemon compare all contents of an image.
func (h *host) verified(ref string) {
	h.t.Helper()
	var last api.VerifyEvent
	err := h.n.Verify(h.t.Context(), ref, func(ev api.VerifyEvent) error {
		if ev.Bad != "" {
			h.t.Errorf("verify %s: %s is wrong", ref, ev.Bad)
		}
		last = ev
		return nil
	})
	if err != nil || !last.Done || last.Checked != last.Total {
		h.t.Errorf("verify %s: %v, %+v", ref, err, last)
	}
}

// empty checks that nothing is left of what was pulled.
func (h *host) empty() {
	h.t.Helper()
	// A process of the host may have a copy of the mounts for a moment.
	eventually(h.t, "nothing is left behind", func() error {
		for _, pattern := range []string{"rootfs/*", "images/*", "containers/*"} {
			if left, err := filepath.Glob(filepath.Join(h.root, pattern)); err != nil || len(left) > 0 {
				return errors.Join(fmt.Errorf("%v", left), err)
			}
		}
		return nil
	})
	if left := h.mounts(); len(left) > 0 {
		h.t.Errorf("still mounted: %v", left)
	}
}

var eventually = hosttest.Eventually

// here waits until n bytes of an image's contents are here.
func (h *host) here(ref string, n int64) {
	h.t.Helper()
	eventually(h.t, "some bytes are here", func() error {
		if img := h.image(ref); img.ContentHere < n {
			return fmt.Errorf("%d", img.ContentHere)
		}
		return nil
	})
}

// complete waits until all of an image has arrived.
func (h *host) complete(ref string) {
	h.t.Helper()
	eventually(h.t, "the image is complete", func() error {
		if img := h.image(ref); img.State != "complete" {
			return fmt.Errorf("%+v", img)
		}
		return nil
	})
}

// logged waits for a line in the daemon's log.
func (h *host) logged(msg string) {
	h.t.Helper()
	eventually(h.t, "the daemon says: "+msg, func() error {
		if !strings.Contains(h.log.String(), msg) {
			return errors.New("it does not")
		}
		return nil
	})
}

// cat reads a file in a process of its own, which can be killed.
func cat(t testing.TB, path string) (end <-chan error, out *bytes.Buffer) {
	t.Helper()
	cmd := exec.Command("cat", path)
	out = new(bytes.Buffer)
	cmd.Stdout = out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done, ended := make(chan error, 1), make(chan struct{})
	go func() {
		done <- cmd.Wait()
		close(ended)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
	})
	return done, out
}

func ends(t testing.TB, what string, end <-chan error) error {
	t.Helper()
	select {
	case err := <-end:
		return err
	case <-time.After(time.Minute):
		t.Fatalf("%s hangs", what)
		return nil
	}
}

func codeOfErr(err error) string {
	e, _ := errors.AsType[*api.Error](err)
	if e == nil {
		return ""
	}
	return e.Code
}

func descriptors(t testing.TB) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}
