package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"hydrofoil.dev/foil/internal/worker/snapshotter"
)

// TestCRIProxy pulls private images as a kubelet does, without a mirror: once at
// containerd itself, whose snapshotter then knows no credentials, and once by the
// proxy.
func TestCRIProxy(t *testing.T) {
	for _, v := range []containerdVersion{containerd2, containerd1} {
		t.Run(v.name, func(t *testing.T) {
			needBusybox(t)
			s := startServer(t, t.TempDir())
			f := newFront(t, s, false)
			dir := t.TempDir()
			// containerd 1.7 takes no file without a table of hosts.
			hosts := hostsDir(t, f, "registry.example", fmt.Sprintf("[host.%q]\nca = \"../ca.pem\"\n", f.URL))
			socket, endpoint := filepath.Join(dir, "proxy.sock"), filepath.Join(dir, "containerd.sock")
			w := startWorker(t, workerRoot(t), "--hosts-dir", hosts, "--docker-config", "", "--log-level", "debug",
				"--cri-proxy-socket", socket, "--cri-endpoint", "unix://"+endpoint)
			w.hosts = hosts
			c := startContainerdCRI(t, v, w, "registry.example/pause:1")
			// The daemon is there first, as it has to be.
			if err := os.Symlink(c.socket(), endpoint); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			auth := &cri.AuthConfig{Username: frontUser, Password: frontSecret}
			paths := make(map[string]bool)
			for name, images := range map[string]cri.ImageServiceClient{"direct": imageService(t, c.socket()), "proxied": imageService(t, socket)} {
				s.push(name, "1", runnable(t, 5, 5_000))
				spec := &cri.ImageSpec{Image: "registry.example/" + name + ":1"}
				if _, err := images.PullImage(ctx, &cri.PullImageRequest{Image: spec}); err == nil {
					t.Errorf("%s: pulled without credentials", name)
				}
				if _, err := images.PullImage(ctx, &cri.PullImageRequest{Image: spec, Auth: auth}); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				if got, err := images.ImageStatus(ctx, &cri.ImageStatusRequest{Image: spec}); err != nil || got.Image == nil {
					t.Errorf("%s: status %v, %v", name, got, err)
				}
			}
			for _, ref := range w.imageRefs() {
				repository, _, _ := strings.Cut(ref, "@")
				paths[repository] = true
			}
			if !paths["registry.example/proxied"] || len(paths) != 1 {
				t.Errorf("the worker has %v, want what came by the proxy", w.imageRefs())
			}
			for _, n := range c.names(t) {
				l := c.info(t, n).Labels
				lazy, proxied := l[snapshotter.LabelPath] == snapshotter.PathLazy, strings.Contains(l["containerd.io/snapshot/cri.image-ref"], "proxied")
				if lazy != proxied {
					t.Errorf("labels of snapshot %s: %q", n, l)
				}
			}
			images := imageService(t, socket)
			list, err := images.ListImages(ctx, &cri.ListImagesRequest{})
			if err != nil || len(list.Images) != 2 {
				t.Errorf("%v, %v", list, err)
			}
			if _, err := images.RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: "registry.example/proxied:1"}}); err != nil {
				t.Error(err)
			}
			for _, leak := range []string{frontSecret, "t0ken"} {
				if strings.Contains(w.log.String(), leak) {
					t.Errorf("the daemon's log has %q", leak)
				}
			}
		})
	}
}
