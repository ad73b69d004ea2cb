package node

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
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
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/kernel/kerneltest"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/keeper"
)

// This test binary is also the keeper, and the daemon that dies at a point.
const (
	daemonEnv = "FOIL_NODE_TEST_DAEMON" // root
	pointEnv  = "FOIL_NODE_TEST_POINT"  // where to die
	pullEnv   = "FOIL_NODE_TEST_PULL"   // reference to pull first; "-" and one to remove then
)

func TestMain(m *testing.M) {
	kerneltest.OwnMounts()
	if len(os.Args) > 3 && os.Args[1] == "keeper" {
		err := keeper.Serve(context.Background(), os.Args[3], func() {
			fmt.Println("ready")
			_ = keeper.Detach()
		})
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if root := os.Getenv(daemonEnv); root != "" {
		os.Exit(dyingDaemon(root))
	}
	if os.Geteuid() != 0 {
		fmt.Println("skip: these tests mount filesystems and need root")
		os.Exit(0)
	}
	features, err := kernel.Features(context.Background(), os.TempDir())
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	for _, f := range features {
		if f.Need && !f.Have {
			fmt.Printf("skip: this host has no %s: %s\n", f.Name, f.Detail)
			os.Exit(0)
		}
	}
	os.Exit(m.Run())
}

// host is a worker of a test: a root, and the daemons on it, one after the other.
type host struct {
	t      testing.TB
	root   string
	giveUp time.Duration
	early  time.Duration // how long pulls that are begun for a header wait; 0: an hour
	store  DescriptorStore
	warm   time.Duration // Options.warmFor; 0: an hour
	retry  time.Duration // Options.firstRetry; 0: an hour
	wanted time.Duration // Options.wantedRetry; 0: an hour
	at     func(string)  // called at the points at which a daemon can die
	n      *Node
	log    logBuffer
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// newHost starts a daemon on a new root.
func newHost(t testing.TB) *host {
	t.Helper()
	root, err := os.MkdirTemp("", "foil-node-")
	if err != nil {
		t.Fatal(err)
	}
	h := &host{t: t, root: root}
	t.Cleanup(func() {
		if h.n != nil {
			h.stop()
		}
		h.endKeeper()
		h.unmountAll()
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("log:\n%s", h.log.String())
		}
	})
	h.start()
	return h
}

func (h *host) options() Options {
	self, err := os.Executable()
	if err != nil {
		h.t.Fatal(err)
	}
	return Options{Root: h.root, Binary: self, GiveUp: h.giveUp, Store: h.store, earlyFor: cmp.Or(h.early, time.Hour), warmFor: cmp.Or(h.warm, time.Hour), firstRetry: cmp.Or(h.retry, time.Hour), wantedRetry: cmp.Or(h.wanted, time.Hour), crash: h.at, Logger: slog.New(slog.NewTextHandler(&h.log, nil))}
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

func (h *host) keepers() []int {
	h.t.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		h.t.Fatal(err)
	}
	var pids []int
	for _, d := range dirs {
		b, err := os.ReadFile(d)
		args := strings.Split(string(b), "\x00")
		if err != nil || len(args) < 4 || args[1] != "keeper" || !strings.HasPrefix(args[3], h.root+"/") {
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(d, "/proc/%d/", &pid); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// endKeeper kills the keeper, which stays while something is incomplete.
func (h *host) endKeeper() {
	h.t.Helper()
	for _, pid := range h.keepers() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	eventually(h.t, "the keeper is gone", func() error {
		if k := h.keepers(); len(k) > 0 {
			return fmt.Errorf("%v", k)
		}
		return nil
	})
}

func (h *host) mounts() []string {
	h.t.Helper()
	list, err := kernel.Mounts(h.root)
	if err != nil {
		h.t.Fatal(err)
	}
	var targets []string
	for _, m := range list {
		targets = append(targets, m.Target)
	}
	return targets
}

func (h *host) unmountAll() {
	h.t.Helper()
	for _, m := range slices.Backward(h.mounts()) {
		if err := kernel.Unmount(m, true); err != nil {
			h.t.Error(err)
		}
	}
}

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
	ctx, cancel := context.WithTimeout(h.t.Context(), time.Minute)
	defer cancel()
	err = h.n.Pull(ctx, api.PullRequest{Ref: ref, Until: until}, func(ev api.Event) error { last = ev; return nil })
	if err == nil && last.Err != "" {
		err = &api.Error{Code: last.Code, Message: last.Err}
	}
	return last, err
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

func (h *host) dir(m *fakeImage) string {
	if h.n != nil {
		h.n.mu.Lock()
		defer h.n.mu.Unlock()
		if r := h.n.rootfs[m.ChainID]; r != nil {
			return r.dir
		}
	}
	return filepath.Join(h.root, "rootfs", m.ChainID.Encoded())
}

// same compares every file of a mounted image with what it should be.
func (h *host) same(m *fakeImage) {
	h.t.Helper()
	for _, name := range slices.Sorted(maps.Keys(m.files)) {
		got, err := os.ReadFile(filepath.Join(h.dir(m), "mnt", name))
		if err != nil {
			h.t.Fatal(err)
		}
		if string(got) != m.files[name] {
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

func eventually(t testing.TB, what string, cond func() error) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		err := cond()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not after a minute: %v", what, err)
		}
	}
}

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

func TestPullsAndRemovalsLeaveNothing(t *testing.T) {
	s := newFakeServer(t)
	one, two := newFakeImage(t, some(1, 8, 5000)), newFakeImage(t, some(5, 8, 5000))
	ref1, ref2 := s.serve("app:1", one), s.serve("app:2", two)
	h := newHost(t)
	h.mustPull(ref1, api.Complete)
	h.remove(ref1)
	h.empty()
	before := descriptors(t)
	for range 5 {
		h.mustPull(ref1, api.Complete)
		h.mustPull(ref2, api.Complete)
		h.same(one)
		h.same(two)
		h.verified(ref2)
		h.remove(ref1)
		h.verified(ref2)
		h.remove(ref2)
	}
	h.empty()
	eventually(t, "no descriptor was leaked", func() error {
		if now := descriptors(t); now > before {
			return fmt.Errorf("%d descriptors, %d before", now, before)
		}
		return nil
	})
	h.stop()
	eventually(t, "a keeper that has nothing to keep ends", func() error {
		if k := h.keepers(); len(k) > 0 {
			return fmt.Errorf("%v", k)
		}
		return nil
	})
	h.start()
}

func TestRestartsLeakNoDescriptors(t *testing.T) {
	s := newFakeServer(t)
	m, done := newFakeImage(t, some(1, 12, 5000)), newFakeImage(t, some(50, 5, 5000))
	refDone, ref := s.serve("done:1", done), s.serve("app:1", m)
	h := newHost(t)
	h.mustPull(refDone, api.Complete)
	s.setLimit(3)
	h.mustPull(ref, api.Mounted)
	h.here(ref, 15000)
	h.restart()
	h.stop()
	before := descriptors(t)
	for range 5 {
		h.start()
		h.stop()
	}
	eventually(t, "no descriptor was leaked", func() error {
		if now := descriptors(t); now > before {
			return fmt.Errorf("%d descriptors, %d before", now, before)
		}
		return nil
	})
	s.setLimit(-1)
	h.start()
	h.mustPull(ref, api.Complete)
	h.same(m)
}

func TestAnImageUnderTwoNamesIsPulledOnce(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 20, 5000))
	ref1, ref2 := s.serve("app:1", m), s.serve("other:1", m)
	s.setLimit(4)
	h := newHost(t)
	var wg sync.WaitGroup
	for _, ref := range []string{ref1, ref2} {
		wg.Go(func() {
			if _, err := h.pull(ref, api.Mounted); err != nil {
				t.Error(err)
			}
			if _, err := os.Stat(filepath.Join(h.dir(m), "mnt", "f001-000")); err != nil {
				t.Errorf("%s was said to be mounted: %v", ref, err)
			}
		})
	}
	wg.Wait()
	s.setLimit(-1)
	for _, ref := range []string{ref1, ref2} {
		h.mustPull(ref, api.Complete)
		h.verified(ref)
	}
	h.same(m)
	if dirs, err := filepath.Glob(filepath.Join(h.root, "rootfs/*")); err != nil || len(dirs) != 1 {
		t.Errorf("rootfs: %v, %v", dirs, err)
	}
	h.remove(ref1)
	h.verified(ref2)
	h.remove(ref2)
	h.empty()
}

// When the reference goes that fills the rootfs, the other one goes on with it.
func TestRemovingOneNameOfAnImageLeavesTheOther(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 20, 5000))
	ref1, ref2 := s.serve("app:1", m), s.serve("other:1", m)
	s.setLimit(4)
	h := newHost(t)
	h.mustPull(ref1, api.Mounted) // fills
	h.mustPull(ref2, api.Mounted) // waits
	end, _ := cat(t, filepath.Join(h.dir(m), "mnt", "f001-019"))
	h.remove(ref1)
	s.setLimit(-1)
	h.mustPull(ref2, api.Complete)
	if err := ends(t, "the read", end); err != nil {
		t.Errorf("the read of the other image: %v", err)
	}
	h.same(m)
}

// The same when the other's pull had ended.
func TestRemovingOneNameGoesOnWithTheOther(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 20, 5000))
	ref1, ref2 := s.serve("app:1", m), s.serve("other:1", m)
	s.setLimit(4)
	h := newHost(t)
	h.mustPull(ref1, api.Mounted)
	h.mustPull(ref2, api.Mounted)
	h.n.mu.Lock()
	p := h.n.pulls[ref2]
	h.n.mu.Unlock()
	p.stop(errRemoved) // it came to nothing
	if err := p.wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.remove(ref1)
	s.setLimit(-1)
	eventually(t, "the other image is complete", func() error {
		if img := h.image(ref2); img.State != "complete" {
			return fmt.Errorf("%+v", img)
		}
		return nil
	})
	h.same(m)
}

func TestRemoveStopsAPull(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 20, 5000))
	ref := s.serve("app:1", m)
	s.setLimit(4)
	h := newHost(t)
	h.mustPull(ref, api.Mounted)
	end := make(chan error, 1)
	go func() {
		_, err := h.pull(ref, api.Complete)
		end <- err
	}()
	eventually(t, "the pull is followed", func() error {
		if img := h.image(ref); img.ContentHere == 0 {
			return errors.New("no")
		}
		return nil
	})
	h.remove(ref)
	if err := ends(t, "the pull", end); err == nil {
		t.Error("the pull of a removed image came to a good end")
	}
	h.empty()
	s.setLimit(-1)
	h.mustPull(ref, api.Complete)
	h.same(m)

	// Before anything is known of the image, too.
	s.setHeader(false)
	ref2 := s.serve("app:2", newFakeImage(t, some(90, 2, 5000)))
	go func() {
		_, err := h.pull(ref2, api.Complete)
		end <- err
	}()
	eventually(t, "the pull runs", func() error { return h.n.RemoveImage(t.Context(), ref2) })
	if err := ends(t, "the pull", end); err == nil {
		t.Error("the pull of a removed image came to a good end")
	}
}

// Many at once, in every order that comes up.
func TestPullAndRemoveAtOnce(t *testing.T) {
	s := newFakeServer(t)
	var refs []string
	for i := range 3 {
		m := newFakeImage(t, some(uint64(1+4*i), 8, 3000)) // neighbours share contents
		refs = append(refs, s.serve(fmt.Sprintf("app:%d", i), m), s.serve(fmt.Sprintf("again:%d", i), m))
	}
	h := newHost(t)
	var wg sync.WaitGroup
	for i, ref := range refs {
		wg.Go(func() {
			for k := range 6 {
				until := api.Complete
				if k%2 == i%2 {
					until = api.Mounted
				}
				if _, err := h.pull(ref, until); err != nil && codeOfErr(err) != api.CodeConflict {
					t.Errorf("pull %s: %v", ref, err)
				}
				if c, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: fmt.Sprintf("c%d", i), Ref: ref}); err == nil {
					if _, err := os.Stat(c.Rootfs); err != nil {
						t.Error(err)
					}
					if err := h.n.RemoveContainer(t.Context(), c.ID); err != nil {
						t.Error(err)
					}
				} else {
					t.Errorf("container of %s: %v", ref, err)
				}
				if err := h.n.RemoveImage(t.Context(), ref); err != nil {
					t.Errorf("remove %s: %v", ref, err)
				}
			}
		})
	}
	wg.Wait()
	h.empty()
}

func TestATagMovesWhileAContainerUsesTheOldRootfs(t *testing.T) {
	s := newFakeServer(t)
	old, new := newFakeImage(t, some(1, 8, 5000)), newFakeImage(t, some(5, 8, 5000))
	ref := s.serve("app:1", old)
	h := newHost(t)
	h.mustPull(ref, api.Complete)
	c, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "c", Ref: ref})
	if err != nil {
		t.Fatal(err)
	}
	s.serve("app:1", new)
	h.mustPull(ref, api.Complete)
	h.same(new)
	for name, want := range old.files {
		if got, err := os.ReadFile(filepath.Join(c.Rootfs, name)); err != nil || string(got) != want {
			t.Errorf("%s in the container: %v", name, err)
		}
	}
	h.restart()
	h.same(old)
	if err := h.n.RemoveContainer(t.Context(), "c"); err != nil {
		t.Fatal(err)
	}
	if slices.Contains(h.mounts(), filepath.Join(h.dir(old), "mnt")) {
		t.Error("the old rootfs is mounted, and nothing names it")
	}
	h.same(new)
	h.remove(ref)
	h.empty()
}

func TestAnImageThatAContainerUsesStays(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 3, 100))
	ref := s.serve("app:1", m)
	h := newHost(t)
	h.mustPull(ref, api.Complete)
	for range 2 {
		if _, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "c", Ref: ref}); err != nil {
			if codeOfErr(err) != api.CodeConflict {
				t.Errorf("a second container of the same name: %v", err)
			}
		}
	}
	if err := h.n.RemoveImage(t.Context(), ref); codeOfErr(err) != api.CodeConflict {
		t.Errorf("remove an image in use: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := h.n.CreateContainer(ctx, api.ContainerRequest{ID: "gone", Ref: ref}); err == nil {
		t.Error("a container was made for somebody who had gone")
	}
	if list, _ := h.n.Containers(t.Context()); len(list) != 1 {
		t.Errorf("containers: %+v", list)
	}
	if err := h.n.RemoveContainer(t.Context(), "c"); err != nil {
		t.Fatal(err)
	}
	h.remove(ref)
	h.empty()
}

// Who lists processes holds their roots for a moment: a container that ends just then is
// removed all the same, and one whose files stay open is not, and says why.
func TestAContainerIsRemovedThatIsLookedAt(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 3, 100))
	ref := s.serve("app:1", m)
	h := newHost(t)
	h.mustPull(ref, api.Complete)
	c, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "c", Ref: ref})
	if err != nil {
		t.Fatal(err)
	}
	looked, err := os.Open(c.Rootfs)
	if err != nil {
		t.Fatal(err)
	}
	defer looked.Close()
	if err := h.n.RemoveContainer(t.Context(), "c"); !errors.Is(err, unix.EBUSY) {
		t.Errorf("remove a container whose root is open: %v", err)
	}
	gone := make(chan error, 1)
	go func() {
		time.Sleep(100 * time.Millisecond)
		gone <- looked.Close()
	}()
	if err := h.n.RemoveContainer(t.Context(), "c"); err != nil {
		t.Errorf("remove a container whose root is open for a moment: %v", err)
	}
	if err := <-gone; err != nil {
		t.Error(err)
	}
	h.remove(ref)
	h.empty()
}

// A process of the host has a file of the mount open. The arena must not be let
// go of under it: holes would be read as zeros.
func TestAMountInUseStaysBehindTheGate(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 10, 5000))
	ref := s.serve("app:1", m)
	s.setLimit(2)
	h := newHost(t)
	h.mustPull(ref, api.Mounted)
	f, err := os.Open(filepath.Join(h.dir(m), "mnt", "f001-009"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h.remove(ref)
	got := make([]byte, 5009)
	if n, err := f.ReadAt(got, 0); !errors.Is(err, unix.EIO) {
		t.Errorf("read %d bytes of a file that is not here: %v", n, err)
	}
	s.setLimit(-1)
	h.mustPull(ref, api.Complete)
	if _, err := f.ReadAt(got, 0); err != nil || string(got) != m.files["f001-009"] {
		t.Errorf("after it was pulled again: %v", err)
	}
	h.same(m)
	f.Close()
	h.remove(ref)
	h.empty()
}

func TestCloseWhilePullsAndRequestsRun(t *testing.T) {
	s := newFakeServer(t)
	h := newHost(t)
	var refs []string
	var images []*fakeImage
	for i := range 4 {
		m := newFakeImage(t, some(uint64(1+10*i), 15, 4000))
		images = append(images, m)
		refs = append(refs, s.serve(fmt.Sprintf("app:%d", i), m))
	}
	h.mustPull(refs[0], api.Complete)
	s.setLimit(5)
	var wg sync.WaitGroup
	n := h.n
	for _, ref := range refs {
		wg.Go(func() { _, _ = pullOf(n, ref) })
		wg.Go(func() {
			for n.Verify(context.Background(), ref, func(api.VerifyEvent) error { return nil }) == nil {
			}
		})
	}
	wg.Go(func() {
		for i := 0; ; i++ {
			_, err := n.CreateContainer(context.Background(), api.ContainerRequest{ID: fmt.Sprint("c", i), Ref: refs[0]})
			if err == nil {
				err = n.RemoveContainer(context.Background(), fmt.Sprint("c", i))
			}
			if err != nil {
				return
			}
		}
	})
	eventually(t, "every pull runs", func() error {
		if s.requestCount() < 5 {
			return errors.New("no")
		}
		return nil
	})
	h.stop()
	wg.Wait()
	s.setLimit(-1)
	h.start()
	for i, ref := range refs {
		h.mustPull(ref, api.Complete)
		h.same(images[i])
	}
}

func pullOf(n *Node, ref string) (last api.Event, err error) {
	err = n.Pull(context.Background(), api.PullRequest{Ref: ref}, func(ev api.Event) error { last = ev; return nil })
	return last, err
}

// Who reads an arena while its pull ends goes on reading.
func TestAnArenaIsClosedAfterItsReaders(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 10, 5000))
	ref := s.serve("app:1", m)
	s.setLimit(2)
	h := newHost(t)
	h.mustPull(ref, api.Mounted)
	r, release, err := h.n.lookup(ref)
	if err != nil {
		t.Fatal(err)
	}
	h.n.mu.Lock()
	reader, holds := r.reader(), r.holder()
	h.n.mu.Unlock()
	s.setLimit(-1)
	h.mustPull(ref, api.Complete)
	b := make([]byte, 5000)
	if _, err := reader.ReadAt(b, 0); err != nil || !holds(0, 5000) {
		t.Errorf("an arena that was completed meanwhile: %v, present %v", err, holds(0, 5000))
	}
	_ = reader.Close()
	release()
	if r.retired != nil {
		t.Error("the arena is open, and nobody uses it")
	}
}

func TestRootBehindASymbolicLink(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 3, 5000))
	ref := s.serve("app:1", m)
	h := newHost(t)
	h.stop()
	real := h.root
	link := real + "-link"
	if err := os.Symlink(real, link); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(link)
	for range 2 {
		h.root = link
		h.start()
		h.mustPull(ref, api.Complete)
		h.stop()
	}
	h.root = real
	if got := h.mounts(); len(got) != 1 {
		t.Errorf("mounts after a restart: %v", got)
	}
	h.start()
}

// After a restart with the server gone, reads fail when the daemon gives up.
func TestReadsFailWhenTheServerDoesNotComeBack(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 10, 5000))
	ref := s.serve("app:1", m)
	s.setLimit(2)
	h := newHost(t)
	h.mustPull(ref, api.Mounted)
	h.stop()
	s.stop()
	h.giveUp = time.Second
	h.start()
	end, out := cat(t, filepath.Join(h.dir(m), "mnt", "f001-009"))
	if err := ends(t, "the read", end); err == nil {
		t.Errorf("a read of what nobody has returned %d bytes", out.Len())
	}
	// Reads fail a moment before the pull has ended, which another would join.
	h.n.mu.Lock()
	p := h.n.pulls[ref]
	h.n.mu.Unlock()
	if err := p.wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.setLimit(-1)
	s.listen(s.addr)
	_, _ = h.pull(ref, api.Complete) // perhaps the one that has just failed, and is about to end
	h.mustPull(ref, api.Complete)
	h.same(m)
}

func TestTheServerDescribesAnImageAnew(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 10, 5000))
	ref := s.serve("app:1", m)
	h := newHost(t)
	s.setLimit(2)
	h.mustPull(ref, api.Mounted)
	h.here(ref, 10000)
	h.stop()
	// The same rootfs, other TOC bytes: one file more, whose name comes first.
	anew := newFakeImage(t, func() files { f := maps.Clone(m.files); f["a"] = "new"; return f }())
	anew.ChainID, anew.toc.ChainID = m.ChainID, m.ChainID
	anew.Config, anew.Manifest = m.Config, m.Manifest
	var err error
	if anew.TOC, err = toc.Encode(anew.toc); err != nil {
		t.Fatal(err)
	}
	anew.TOCDigest = toc.Digest(anew.TOC)
	s.serve("app:1", anew)
	s.setLimit(-1)
	h.start()
	if _, err := h.pull(ref, api.Complete); codeOfErr(err) != api.CodeConflict {
		t.Errorf("go on by another TOC: %v", err)
	}
	h.remove(ref)
	h.mustPull(ref, api.Complete)
	h.same(anew)
	// What is complete stays what it is.
	s.serve("app:1", m)
	h.mustPull(ref, api.Complete)
	h.same(anew)
}
