package e2e

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
)

// exec is `ctr task exec` in the background.
func (c *containerd) exec(t testing.TB, id, script string) *execution {
	t.Helper()
	e := &execution{done: make(chan struct{})}
	go func() {
		defer close(e.done)
		e.out, e.err = c.tryCtr("task", "exec", "--exec-id", "waiting", id, "/bin/sh", "-c", script)
	}()
	t.Cleanup(func() { <-e.done })
	return e
}

type execution struct {
	out  string
	err  error
	done chan struct{}
}

// rebooted makes of a worker's root what a reboot leaves: no mount, and presence
// maps of another boot. Its processes have been killed.
func rebooted(t testing.TB, dirs ...string) {
	t.Helper()
	for _, dir := range dirs {
		mounts, err := kernel.Mounts(dir)
		if err != nil {
			t.Fatal(err)
		}
		for i := len(mounts) - 1; i >= 0; i-- {
			if err := kernel.Unmount(mounts[i].Target, true); err != nil {
				t.Fatal(err)
			}
		}
		maps, err := filepath.Glob(filepath.Join(dir, "rootfs/*/presence"))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range maps {
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			b[48] ^= 0xff // the boot ID
			binary.LittleEndian.PutUint32(b[92:], crc32.Checksum(b[:92], crc32.MakeTable(crc32.Castagnoli)))
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// A year in the life of a worker: a container reads while keeper, daemon and
// containerd are killed; another image is removed, of which it uses contents;
// the host reboots with no network.
func TestContainerdThroughKillsAndAReboot(t *testing.T) {
	onHosts(t, []host{{containerd2, kernel.GateFanotify}, {containerd2, kernel.GateFUSE}}, testContainerdThroughKillsAndAReboot)
}

func testContainerdThroughKillsAndAReboot(t *testing.T, v containerdVersion) {
	needBusybox(t)
	s := startServer(t, t.TempDir())
	img := runnable(t, 200, 30_000)
	k := newLink(t, s.addr, 0)
	k.stallAfter(3 << 20) // what the container starts with, and no more than half
	ref := k.via(s.push("app", "1", img))
	root := workerRoot(t)
	w := startWorker(t, root)
	c := startContainerd(t, v, w)
	want, long := wantData(t, img), unique(t)
	t.Cleanup(func() { _, _ = c.tryCtr("task", "rm", "--force", long) })

	c.pull(t, ref)
	c.ctr(t, "run", "--detach", "--snapshotter", "hydrofoil", ref, long, "/bin/sh", "-c", "sleep 1000")
	waiting := c.exec(t, long, dataSums)
	eventually(t, "a process reads", func() error {
		out, err := c.tryCtr("task", "ps", long)
		if n := strings.Count(out, "\n"); err == nil && n < 3 { // a head line, and what sleeps
			err = fmt.Errorf("%d lines: %s", n, out)
		}
		return err
	})
	old := pidsOf(t, root, "keeper")
	if len(old) != 1 {
		t.Fatalf("keepers: %v", old)
	}
	if err := syscall.Kill(old[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "another keeper", func() error {
		st, err := w.client.Status(t.Context())
		if err == nil && (st.Keeper == 0 || st.Keeper == old[0]) {
			err = fmt.Errorf("keeper %d", st.Keeper)
		}
		return err
	})
	w.kill()
	w = startWorker(t, root)
	k.open()
	<-waiting.done
	if waiting.err != nil || waiting.out != want {
		t.Errorf("a container read through kills of keeper and daemon: %v\n%s\nwant\n%s", waiting.err, waiting.out, want)
	}
	name := w.imageRefs()[0]
	w.mustPull(name, api.Complete)

	// Nobody is left but the container; and then they all come back. A container that
	// was there before the image was complete reads through FUSE what the page cache
	// has lost meanwhile, and waits for a daemon then.
	st, err := w.client.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w.kill()
	c.kill()
	c.start(t)
	alone := c.exec(t, long, dataSums)
	if st.Gate == kernel.GateFanotify {
		<-alone.done
	}
	w = startWorker(t, root)
	<-alone.done
	if alone.err != nil || alone.out != want {
		t.Errorf("without a daemon a container of a complete image read: %v\n%s", alone.err, alone.out)
	}
	eventually(t, "containerd reaches the new daemon", func() error {
		_, err := c.tryCtr("snapshots", "--snapshotter", "hydrofoil", "ls")
		return err
	})
	if got := c.run(t, ref, unique(t)+"-two", dataSums); got != want {
		t.Errorf("a container of the new daemon read\n%s", got)
	}

	// A reboot, with no network at all.
	c.ctr(t, "task", "kill", "--signal", "SIGKILL", long)
	eventually(t, "the container has ended", func() error {
		_, err := c.tryCtr("task", "rm", "--force", long)
		if err != nil && strings.Contains(err.Error(), "not found") {
			return nil
		}
		return err
	})
	c.kill()
	w.kill()
	for _, pid := range pidsOf(t, root, "keeper") {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	k.setCut(true)
	rebooted(t, root, c.dir)
	w = startWorker(t, root)
	c.start(t)
	if got := w.imageOf(name); got.State != "complete" {
		t.Errorf("after a reboot: %+v", got)
	}
	if got := c.run(t, ref, unique(t)+"-three", dataSums); got != want {
		t.Errorf("after a reboot without a network a container read\n%s", got)
	}
	if got := c.ctr(t, "snapshots", "--snapshotter", "hydrofoil", "ls"); !strings.Contains(got, long) {
		t.Errorf("the container of before has no snapshot any more:\n%s", got)
	}
}

// A disk that is too small for an image: the lazy path and the plain one fail and
// say so, and the container that runs does not notice.
func TestContainerdDiskFull(t *testing.T) {
	onHosts(t, []host{{containerd2, ""}}, testContainerdDiskFull)
}

func testContainerdDiskFull(t *testing.T, v containerdVersion) {
	needBusybox(t)
	s := startServer(t, t.TempDir())
	img := runnable(t, 20, 30_000)
	b, err := os.ReadFile(busybox)
	if err != nil {
		t.Fatal(err)
	}
	large := newImage(t, ocispec.ImageConfig{}, layertest.Layer{layertest.File("bin/sh", 0o755, string(b)), layertest.File("big", 0o644, noise(60<<20))}.Gzip(t))
	ref, refLarge, long := s.push("app", "1", img), s.push("large", "1", large), unique(t)
	root := filepath.Join(smallDisk(t, 48), "foil")
	w := startWorker(t, root)
	t.Cleanup(func() { endKeeper(t, root) })
	c := startContainerd(t, v, w)
	c.pull(t, ref)
	c.ctr(t, "run", "--detach", "--snapshotter", "hydrofoil", ref, long, "/bin/sh", "-c", "sleep 1000")
	t.Cleanup(func() {
		_, _ = c.tryCtr("task", "rm", "--force", long)
		_, _ = c.tryCtr("containers", "rm", long)
	})
	err = c.tryPull(refLarge)
	if err == nil || !strings.Contains(err.Error(), "no space left on device") {
		t.Errorf("pull of an image that does not fit: %v", err)
	}
	if !strings.Contains(w.log.String(), "more bytes") || !strings.Contains(w.log.String(), "plain way") {
		t.Error("the log does not say that the image did not fit, and went the plain way")
	}
	if got := c.ctr(t, "task", "exec", "--exec-id", "x", long, "/bin/sh", "-c", dataSums); got != wantData(t, img) {
		t.Errorf("a container that ran meanwhile read\n%s", got)
	}
	if got := w.imageOf(w.imageRefs()[0]); got.State != "complete" {
		t.Errorf("the other image is %+v", got)
	}
}
