package e2e

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Where images are proven first, containerd has a container when its image is complete and proven. If it gives up before,
// the log says what was waited for.
func TestContainerdWaitsForTheProof(t *testing.T) {
	needBusybox(t)
	s := startServer(t, t.TempDir())
	img := runnable(t, 200, 60_000)
	k := newLink(t, s.addr, 0)
	k.stallAfter(3 << 20)
	ref := k.via(s.push("app", "1", img))
	w := startWorker(t, workerRoot(t), "--policy", registryOf(ref)+"=proven")
	c := startContainerd(t, containerd2, w)
	c.pull(t, ref)
	logged := func(what ...string) {
		t.Helper()
		eventually(t, fmt.Sprintf("the log says %q", what), func() error {
			for line := range strings.Lines(w.log.String()) {
				all := true
				for _, part := range what {
					all = all && strings.Contains(line, part)
				}
				if all {
					return nil
				}
			}
			return fmt.Errorf("it does not")
		})
	}

	gives := exec.Command(c.ctrBin, "--address", c.socket(), "--namespace", c.namespace, "run", "--rm", "--snapshotter", "hydrofoil", ref, "impatient", "/bin/sh", "-c", "true")
	if err := gives.Start(); err != nil {
		t.Fatal(err)
	}
	logged("a container waits until its image is proven", "--policy says so")
	if err := gives.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = gives.Wait()
	logged("no container starts on an image that is not proven", " bytes here", "gave up")
	if strings.Contains(w.log.String(), "image proven") {
		t.Fatal("it is proven, and only a part of it is here")
	}

	k.open()
	if diff := cmp.Diff(wantData(t, img), c.run(t, ref, "c", dataSums)); diff != "" {
		t.Errorf("a container of it (-want +got):\n%s", diff)
	}
	logged("image proven")
	for _, image := range w.imageRefs() {
		if got := w.imageOf(image); got.Proof != "proven" || got.Policy != "proven" {
			t.Errorf("%s is %s, its policy %s", image, got.Proof, got.Policy)
		}
	}
}
