package node

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/worker/api"
)

// points are where a daemon can die in a pull, in their order.
var points = []string{"toc", "arena", "guarded", "meta", "saved", "mounted", "committed", "synced", "recorded", "released"}

// dyingDaemon is a daemon that pulls, or removes, and is killed at a point.
func dyingDaemon(root string) int {
	self, err := os.Executable()
	if err != nil {
		return 1
	}
	point := os.Getenv(pointEnv)
	n, err := New(Options{Root: root, Binary: self, Gate: bestGate(), Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)), crash: func(p string) {
		if p == point {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
			select {}
		}
	}})
	if err != nil {
		slog.Error("start", "error", err)
		return 1
	}
	if ref, remove := strings.CutPrefix(os.Getenv(pullEnv), "-"); remove {
		err = n.RemoveImage(context.Background(), ref)
	} else {
		_, err = pullOf(n, ref)
	}
	slog.Error("still alive", "error", err)
	return 1
}

// dieAt runs a daemon on the host that dies at a point.
func (h *host) dieAt(point, pull string) {
	h.t.Helper()
	self, err := os.Executable()
	if err != nil {
		h.t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), daemonEnv+"="+h.root, pointEnv+"="+point, pullEnv+"="+pull)
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != -1 {
		h.t.Fatalf("the daemon did not die at %s: %v\n%s", point, err, out)
	}
}

// A daemon dies at each point of a pull. The next one finds what is there, and
// nothing else; after a reboot as well.
func TestADaemonDiesInAPull(t *testing.T) {
	for _, reboot := range []bool{false, true} {
		for _, point := range points {
			name := point
			if reboot {
				name += " and the host reboots"
			}
			t.Run(name, func(t *testing.T) {
				s := newFakeServer(t)
				// The second uses contents of the first in place.
				one, two := newFakeImage(t, some(1, 6, 5000)), newFakeImage(t, some(4, 6, 5000))
				ref1, ref2 := s.Serve("app:1", one), s.Serve("app:2", two)
				h := newHost(t)
				h.mustPull(ref1, api.Complete)
				h.stop()
				h.dieAt(point, ref2)
				if reboot {
					h.reboot()
				}
				s.SetHeader(false) // what is there, is there without the server
				h.start()
				h.same(one)
				known := h.image(ref2)
				switch {
				case point == "recorded" || point == "released":
					if known.State != "complete" {
						t.Errorf("recorded as complete, and now %+v", known)
					}
					h.same(two)
				case point == "committed" || point == "synced":
					if known.State != "pulling" {
						t.Errorf("the image was committed, and now is %+v", known)
					}
				case known.Ref != "":
					t.Errorf("an image that was not committed: %+v", known)
				default:
					// Not at once while another process holds a copy of its mount.
					eventually(t, "a rootfs that no image names goes", func() error {
						if _, err := os.Stat(h.dir(two)); err == nil {
							return errors.New("it was left")
						}
						return nil
					})
				}
				s.SetHeader(true)
				h.mustPull(ref2, api.Complete)
				h.same(two)
				h.remove(ref1)
				h.verified(ref2)
				h.remove(ref2)
				h.empty()
			})
		}
	}
}

func TestADaemonDiesInARemoval(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 6, 5000))
	ref := s.Serve("app:1", m)
	h := newHost(t)
	h.mustPull(ref, api.Complete)
	h.stop()
	h.dieAt("discarding", "-"+ref)
	h.start()
	h.empty()
}
