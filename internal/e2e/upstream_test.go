package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/worker/api"
)

// startDebianRegistry starts docker-registry, the distribution program of
// Debian, over an empty directory. It can be pushed to like a server.
func startDebianRegistry(t *testing.T) *server {
	t.Helper()
	program, err := exec.LookPath("docker-registry")
	if err != nil {
		t.Skipf("skip: docker-registry is not installed: %v", err)
	}
	s := &server{root: t.TempDir(), addr: freeAddr(t)}
	config := filepath.Join(s.root, "config.yml")
	text := fmt.Sprintf("version: 0.1\nlog: {level: warn}\nstorage: {filesystem: {rootdirectory: %s/data}}\nhttp: {addr: %s}\n", s.root, s.addr)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s.process = startProgram(t, program, "serve", config)
	answers(t, s)
	return s
}

func answers(t *testing.T, s *server) {
	t.Helper()
	eventually(t, "the registry answers", func() error {
		select {
		case <-s.done:
			t.Fatalf("it ended: %v\n%s", s.err, s.log)
		default:
		}
		resp, err := http.Get("http://" + s.addr + "/v2/")
		if err != nil {
			return err
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return errors.New(resp.Status)
		}
		return nil
	})
}

func startAccelerator(t *testing.T, root, upstream string) *server {
	t.Helper()
	s := &server{root: root, addr: freeAddr(t)}
	s.process = start(t, "serve", "--root", root, "--listen", s.addr, "--upstream", "http://"+upstream)
	answers(t, s)
	return s
}

// A worker and containerd pull from the accelerator of a registry that others
// made, lazily, also when that registry has gone.
func TestAcceleratedRegistry(t *testing.T) {
	needBusybox(t)
	up := startDebianRegistry(t)
	img := runnable(t, 50, 20_000)
	up.push("team/app", "1", img)
	acc := startAccelerator(t, t.TempDir(), up.addr)
	ref := acc.addr + "/team/app:1"

	w := startWorker(t, workerRoot(t), "--give-up", "1s")
	w.mustPull(ref, api.Complete)
	if d := differs(t, img, w.mountOf(ref)); d != "" {
		t.Errorf("what is mounted differs:\n%s", d)
	}
	if err := acc.tryPush("team/new", "1", img); err == nil || !strings.Contains(err.Error(), "405") {
		t.Errorf("a push to the accelerator: %v", err)
	}

	// The upstream goes; another worker, and containerd on it, get the image.
	up.signal(syscall.SIGKILL)
	<-up.done
	other := startWorker(t, workerRoot(t))
	c := startContainerd(t, containerd2, other)
	c.pull(t, ref)
	if got, want := c.run(t, ref, "one", dataSums), wantData(t, img); got != want {
		t.Errorf("a container read\n%s\nwant\n%s", got, want)
	}
	for _, l := range img.layers {
		if out := c.ctr(t, "content", "ls", "-q"); strings.Contains(out, l.Descriptor().Digest.String()) {
			t.Errorf("containerd fetched layer %s", l.Descriptor().Digest)
		}
	}
	// What is nowhere is told with the reason.
	if _, err := w.pull(acc.addr+"/team/app:2", api.Complete); err == nil || !strings.Contains(err.Error(), "upstream http://"+up.addr) {
		t.Errorf("an image that is not here, and the upstream neither: %v", err)
	}
}

// A full disk fails the pull that needs room, says so, and harms nothing else.
func TestAcceleratorDiskFull(t *testing.T) {
	up := startServer(t, t.TempDir())
	small := manyFiles(t, 20, 50_000, 9, 0)
	large := newImage(t, ocispec.ImageConfig{}, layertest.Layer{layertest.File("big", 0o644, noise(60<<20))}.Gzip(t))
	up.push("small", "1", small)
	up.push("large", "1", large)
	acc := startAccelerator(t, filepath.Join(smallDisk(t, 40), "accelerator"), up.addr)
	w := startWorker(t, workerRoot(t), "--give-up", "1s")
	w.mustPull(acc.addr+"/small:1", api.Complete)
	for range 2 {
		_, err := w.pull(acc.addr+"/large:1", api.Complete)
		if err == nil || !strings.Contains(err.Error(), "disk is full") {
			t.Errorf("a pull that fills the accelerator's disk: %v, want an error that says so", err)
		}
	}
	// Whoever pulls may be told before the download has been given up.
	eventually(t, "what cannot be finished takes no room", func() error {
		left, err := os.ReadDir(filepath.Join(acc.root, "fetching"))
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("%v is left", left)
		}
		return err
	})
	intact(t, startWorker(t, workerRoot(t)), acc.addr+"/small:1", small)
}
