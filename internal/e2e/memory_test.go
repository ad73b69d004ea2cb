package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
)

// memoryCgroup is a cgroup of version 1's memory controller, below the one of this process.
type memoryCgroup struct {
	t   *testing.T
	dir string
}

// newMemoryCgroup makes one that may have limit bytes; 0: any number. It goes at the end of the test, when its
// processes have.
func newMemoryCgroup(t *testing.T, name string, limit int64) *memoryCgroup {
	t.Helper()
	own, err := kernel.Cgroups("").OwnMemory("")
	if err != nil {
		t.Skip("skip: ", err)
	}
	c := &memoryCgroup{t, filepath.Join("/sys/fs/cgroup/memory", own, fmt.Sprintf("foil-e2e-%d-%s", os.Getpid(), name))}
	if err := os.Mkdir(c.dir, 0o755); err != nil {
		t.Skip("skip: no cgroup of the memory controller, version 1, can be made: ", err)
	}
	t.Cleanup(func() {
		eventually(t, "the cgroup is empty", func() error { return os.Remove(c.dir) })
	})
	if limit > 0 {
		if err := os.WriteFile(filepath.Join(c.dir, "memory.limit_in_bytes"), fmt.Append(nil, limit), 0); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

// add moves a process into it, with those that it will start.
func (c *memoryCgroup) add(pid int) {
	c.t.Helper()
	if err := os.WriteFile(filepath.Join(c.dir, "cgroup.procs"), fmt.Append(nil, pid), 0); err != nil {
		c.t.Fatal(err)
	}
}

// number returns a number of one of its files: of the line that begins with a name, or with "" of all the file.
func (c *memoryCgroup) number(file, name string) int64 {
	c.t.Helper()
	b, err := os.ReadFile(filepath.Join(c.dir, file))
	if err != nil {
		c.t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) > 0 && (name == "" || f[0] == name) {
			n, err := strconv.ParseInt(f[len(f)-1], 10, 64)
			if err != nil {
				c.t.Fatal(err)
			}
			return n
		}
	}
	c.t.Fatalf("%s of %s has no %q:\n%s", file, c.dir, name, b)
	return 0
}

// cache is how many bytes of pages of files it is charged with.
func (c *memoryCgroup) cache() int64 { c.t.Helper(); return c.number("memory.stat", "total_cache") }

// killed is how many of its processes were killed for want of memory.
func (c *memoryCgroup) killed() int64 {
	c.t.Helper()
	return c.number("memory.oom_control", "oom_kill")
}

// read has a process of the cgroup read files, and returns their digest. It ends when the daemon does: nobody would
// answer its reads.
func (c *memoryCgroup) read(w *worker, paths ...string) ([]byte, error) {
	ctx, stop := context.WithCancelCause(c.t.Context())
	defer stop(nil)
	go func() {
		select {
		case <-w.done:
			stop(errors.New("the daemon has ended"))
		case <-ctx.Done():
		}
	}()
	cmd := exec.CommandContext(ctx, "sh", append([]string{"-c", `echo $$ >"$0" && exec cat "$@"`, filepath.Join(c.dir, "cgroup.procs")}, paths...)...)
	sum := sha256.New()
	var diagnosis bytes.Buffer
	cmd.Stdout, cmd.Stderr = sum, &diagnosis
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("read in %s: %w: %w\n%s", c.dir, err, context.Cause(ctx), diagnosis.Bytes())
	}
	return sum.Sum(nil), nil
}

// Pages of a startup set that are read ahead are charged to the daemon; without memory for them, what a container
// reads is charged to the container, as with any filesystem.
func TestWhoPaysForStartupPages(t *testing.T) {
	s, ref, _ := withStartupSet(t)
	for _, c := range []struct {
		name  string
		flags []string
		ahead bool
	}{
		{"with a budget", nil, true},
		{"without", []string{"--startup-memory", "0"}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := newLink(t, s.addr, 0)
			k.stallAfter(5 << 20) // the set, and less than half of all
			daemons, container := newMemoryCgroup(t, "daemon", 0), newMemoryCgroup(t, "container", 0)
			w := startWorker(t, workerRoot(t), c.flags...)
			if st, err := w.client.Status(t.Context()); err != nil || st.Gate != kernel.GateFanotify {
				t.Skipf("skip: pages are read ahead with pre-content events only: %v, %v", st, err)
			}
			daemons.add(w.cmd.Process.Pid)
			ref := k.via(ref)
			w.begin(ref)
			w.brought(ref, 0)
			var paths []string
			for i := 10; i < 50; i++ {
				paths = append(paths, filepath.Join(w.mountOf(ref), fmt.Sprintf("data/%05d", i)))
			}
			if c.ahead {
				inCache(t, w, ref)
				if n := daemons.cache(); n < serviceBytes {
					t.Errorf("the daemon is charged with %d bytes of %d", n, serviceBytes)
				}
			}
			before, daemonBefore := container.cache(), daemons.cache()
			if _, err := container.read(w, paths...); err != nil {
				t.Fatal(err)
			}
			got := container.cache() - before
			t.Logf("the daemon is charged with %d bytes of pages, and %d more when the container has read %d; the container with %d",
				daemonBefore, daemons.cache()-daemonBefore, serviceBytes, got)
			if c.ahead && got > serviceBytes/4 || !c.ahead && got < serviceBytes*3/4 {
				t.Errorf("a container that reads %d bytes is charged with %d", serviceBytes, got)
			}
		})
	}
}

// Several images arrive at a daemon with little memory, and containers with less read them. Nobody is killed for it, nor by overlayfs.
func TestLittleMemory(t *testing.T) {
	const (
		images    = 3
		files     = 500
		ofDaemon  = 160 << 20
		container = 8 << 20
	)
	s := startServer(t, t.TempDir())
	daemons := newMemoryCgroup(t, "daemon", ofDaemon)
	w := startWorker(t, workerRoot(t), "--report", "off")
	daemons.add(w.cmd.Process.Pid)
	var refs []string
	var want [][]byte
	var plain []string
	for i := range images {
		img := manyFiles(t, files, 60_000, uint64(10+i), 1)
		refs = append(refs, s.push(fmt.Sprintf("little-%d", i), "1", img))
		plain = append(plain, filepath.Join(unpack(t, img), "data"))
		evict := func(path string) { // so that whoever reads it pays for it
			f, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if err := errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)); err != nil {
				t.Fatal(err)
			}
		}
		sum := sha256.New()
		for _, path := range pathsIn(t, plain[i]) {
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			sum.Write(b)
			evict(path)
		}
		want = append(want, sum.Sum(nil))
	}
	var reads sync.WaitGroup
	check := func(name, dir string, c *memoryCgroup, want []byte, began time.Time) {
		got, err := c.read(w, pathsIn(t, dir)...)
		t.Logf("%s: %d MB were read with %d MB of memory after %v; the limit was reached %d times", name, files*60_000/1_000_000, container>>20,
			time.Since(began).Round(time.Millisecond), c.number("memory.failcnt", ""))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %x, want %x; %v", name, got, want, err)
		}
		if n := c.killed(); n > 0 {
			t.Errorf("%s: %d processes were killed", name, n)
		}
		if n := c.number("memory.failcnt", ""); n == 0 {
			t.Errorf("%s: its limit was not reached, and nothing is shown", name)
		}
	}
	for i, ref := range refs {
		lazy, over := newMemoryCgroup(t, fmt.Sprintf("lazy-%d", i), container), newMemoryCgroup(t, fmt.Sprintf("over-%d", i), container)
		dir := filepath.Join(overlay(t, filepath.Dir(plain[i])), "data")
		reads.Go(func() {
			began := time.Now()
			for _, err := range w.client.Pull(t.Context(), api.PullRequest{Ref: ref, Until: api.Mounted}) {
				if err != nil {
					t.Error(err)
					return
				}
			}
			check(ref, filepath.Join(w.mountOf(ref), "data"), lazy, want[i], began)
			check("overlayfs", dir, over, want[i], time.Now())
		})
	}
	reads.Wait()
	for _, ref := range refs {
		w.mustPull(ref, api.Complete)
	}
	if n := daemons.killed(); n > 0 {
		t.Errorf("%d of the daemon's processes were killed", n)
	}
	t.Logf("the daemon, with %d bytes at most, had %d; its limit was reached %d times; %d bytes of pages in the end",
		ofDaemon, daemons.number("memory.max_usage_in_bytes", ""), daemons.number("memory.failcnt", ""), daemons.cache())
}

// pathsIn returns the files of a directory.
func pathsIn(t *testing.T, dir string) (paths []string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Error(err) // also outside of the test's goroutine
	}
	for _, e := range list {
		paths = append(paths, filepath.Join(dir, e.Name()))
	}
	return paths
}

// overlay mounts an overlayfs over a directory, as a container has it.
func overlay(t *testing.T, lower string) string {
	t.Helper()
	dir := t.TempDir()
	for _, d := range []string{"upper", "work", "merged"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	at := filepath.Join(dir, "merged")
	opts := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", lower, filepath.Join(dir, "upper"), filepath.Join(dir, "work"))
	if err := unix.Mount("overlay", at, "overlay", 0, opts); err != nil {
		t.Skip("skip: no overlayfs on the directory of temporary files: ", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return at
}
