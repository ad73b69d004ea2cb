package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/rootlock"
)

// A daemon that is killed while it unmounts an incomplete image waits in the kernel for reads that it should have
// answered itself, and every sync(2) of the host with it. The next daemon ends the FUSE connection.
func TestDaemonKilledWhileItUnmounts(t *testing.T) {
	t.Setenv(gateEnv, kernel.GateFUSE)
	for name, withKeeper := range map[string]bool{"with its keeper": true, "alone": false} {
		t.Run(name, func(t *testing.T) {
			_, k, w, ref, img := halfPulled(t)
			connection := connectionOf(t, w.root)
			// Whatever goes wrong here, this host is to go on.
			t.Cleanup(func() { _ = kernel.AbortFuse(connection) })
			path, _ := absent(t, w, ref, img)
			r := startReader(t, path)
			r.waits(t)
			keepers := pidsOf(t, w.root, "keeper")
			if withKeeper {
				for _, pid := range keepers {
					_ = syscall.Kill(pid, syscall.SIGSTOP)
				}
			}
			removed := make(chan error, 1)
			go func() { removed <- w.client.RemoveImage(t.Context(), ref) }()
			_ = r.cmd.Process.Kill()
			pid := w.cmd.Process.Pid
			for begun := time.Now(); !unmounts(pid); {
				select {
				case err := <-removed:
					t.Fatalf("the image was removed, %v; nothing hangs", err)
				default:
				}
				if time.Since(begun) > time.Minute {
					t.Fatal("it does not unmount")
				}
			}
			w.signal(syscall.SIGKILL)
			if withKeeper {
				for _, pid := range keepers {
					_ = syscall.Kill(pid, syscall.SIGKILL)
				}
			}
			r.ends(t)
			// All of it has ended that can.
			eventually(t, "the daemon is a zombie", func() error {
				stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
				if errors.Is(err, fs.ErrNotExist) {
					return nil
				}
				if err == nil && !strings.Contains(string(stat), ") Z ") && !unmounts(pid) {
					err = fmt.Errorf("%s", stat)
				}
				return err
			})
			if !unmounts(pid) {
				t.Skip("its reads ended before it was killed")
			}
			if why := rootlock.Hanging(w.root); !strings.Contains(why, fmt.Sprintf("process %d was killed", pid)) {
				t.Errorf("foil doctor finds %q", why)
			}
			k.open()
			next := startWorker(t, w.root)
			<-w.done
			intact(t, next, ref, img)
			if why := rootlock.Hanging(w.root); why != "" {
				t.Errorf("foil doctor still finds %q", why)
			}
		})
	}
}

// connectionOf is the FUSE connection of a worker.
func connectionOf(t *testing.T, root string) int {
	t.Helper()
	mounts, err := kernel.Mounts(filepath.Join(root, "run", "gate"))
	if err != nil || len(mounts) == 0 {
		t.Fatal(mounts, err)
	}
	return mounts[len(mounts)-1].Minor
}

// unmounts reports whether a thread of a process waits in umount2(2).
func unmounts(pid int) bool {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	for _, dir := range tasks {
		call, err := os.ReadFile(filepath.Join(dir, "syscall"))
		if err != nil || !strings.HasPrefix(string(call), fmt.Sprintf("%d ", unix.SYS_UMOUNT2)) {
			continue
		}
		stat, err := os.ReadFile(filepath.Join(dir, "stat"))
		if err == nil && strings.HasPrefix(string(stat[strings.LastIndexByte(string(stat), ')')+1:]), " D") {
			return true
		}
	}
	return false
}
