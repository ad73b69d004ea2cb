package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
)

// The tests that lean on the gate most, on the gates that this kernel would
// not choose.
func TestOtherGates(t *testing.T) {
	tests := []struct {
		name string
		test func(t *testing.T)
	}{
		{"daemon killed", TestDaemonKilled},
		{"daemon and keeper killed together", TestDaemonAndKeeperKilledTogether},
		{"reader killed while it waits", TestReaderKilledWhileItWaits},
		{"daemon killed again and again", TestDaemonKilledAgainAndAgain},
		{"mounted before the bytes are here", TestMountedBeforeTheBytesAreHere},
		{"complete without the gate", testCompletePassesTheGate},
		{"startup set", TestStartupSet},
		{"trace is exact", TestTraceIsExact},
		{"trace, daemon killed", TestTraceDaemonKilled},
	}
	t.Run(kernel.GateFUSE, func(t *testing.T) {
		t.Setenv(gateEnv, kernel.GateFUSE)
		for _, tt := range tests {
			t.Run(tt.name, tt.test)
		}
	})
	t.Run(kernel.GateLoop, func(t *testing.T) {
		if _, err := os.Stat("/dev/loop-control"); err != nil {
			t.Skip(err)
		}
		t.Setenv(gateEnv, kernel.GateLoop)
		for _, tt := range tests {
			switch tt.name {
			case "daemon killed", "daemon and keeper killed together", "complete without the gate", "trace is exact":
				t.Run(tt.name, tt.test)
			}
		}
	})
}

// testCompletePassesTheGate: when an image is complete its mount is made anew
// without the gate, so that neither daemon nor keeper is needed for it, and
// what has a file open goes on.
func testCompletePassesTheGate(t *testing.T) {
	_, k, w, ref, img := halfPulled(t)
	st, err := w.client.Status(t.Context())
	if err != nil || st.Gate == kernel.GateFanotify {
		t.Fatalf("gate %v, %v", st, err)
	}
	name := filepath.Join(w.mountOf(ref), "data", "00199")
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	k.open()
	w.mustPull(ref, api.Complete)
	eventually(t, "the mount is made anew", func() error {
		_, err := os.Stat(filepath.Join(filepath.Dir(w.mountOf(ref)), "gated"))
		if err == nil {
			return os.ErrExist
		}
		return nil
	})
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("1"), 0); err != nil {
		t.Log(err)
	}
	if _, err := f.ReadAt(make([]byte, 4096), 0); err != nil {
		t.Errorf("a file that was open before: %v", err)
	}
	mnt := w.mountOf(ref)
	if mounts, err := kernel.Mounts(mnt); err != nil || len(mounts) != 1 {
		t.Errorf("mounts %+v, %v", mounts, err)
	}
	f.Close()
	// Nothing is left that needs the gate, once the kernel has noticed that the
	// file is closed: a daemon that ends before leaves the keeper to the next one.
	eventually(t, "no keeper is left", func() error {
		w.signal(syscall.SIGTERM)
		<-w.done
		if pids := pidsOf(t, w.root, "keeper"); len(pids) > 0 {
			w = startWorker(t, w.root)
			return fmt.Errorf("keepers %v", pids)
		}
		return nil
	})
	if mounts, err := kernel.Mounts(filepath.Join(w.root, "run", "gate")); err != nil || len(mounts) > 0 {
		t.Errorf("the gate's filesystem is left: %+v, %v", mounts, err)
	}
	if diff := differs(t, img, mnt); diff != "" {
		t.Errorf("without any daemon:\n%s", diff)
	}
}
