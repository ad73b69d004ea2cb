package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/worker/snapshotter"
)

// TestCRI does what a kubelet does: pull an image, and run a container of it in
// a pod, while its bytes are on the way.
func TestCRI(t *testing.T) {
	sandboxes := containerd1
	sandboxes.name, sandboxes.env = "containerd 1 with sandboxes", []string{"ENABLE_CRI_SANDBOXES=1"}
	for _, v := range []containerdVersion{containerd2, containerd1, sandboxes} {
		t.Run(v.name, func(t *testing.T) {
			needBusybox(t)
			s := startServer(t, t.TempDir())
			img := runnable(t, 200, 30_000)
			pause := s.push("pause", "1", pauseImage(t))
			slow := newLink(t, s.addr, 0)
			slow.stallAfter(2 << 20)
			ref := slow.via(s.push("app", "1", img))
			w := startWorker(t, workerRoot(t), "--origin-group", registryOf(ref)+" "+registryOf(pause))
			c := startContainerdCRI(t, v, w, pause)

			images, runtime := imageService(t, c.socket()), runtimeService(t, c.socket())
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()

			if _, err := images.PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref}}); err != nil {
				t.Fatal(err)
			}
			if got := w.imageOf(w.imageRefs()[0]); got.State != "pulling" {
				t.Fatalf("when PullImage has ended, the worker has %+v, want it on its way", got)
			}
			slow.open()
			id := startPod(t, c, runtime, ref, &cri.NamespaceOption{Network: cri.NamespaceMode_NODE})
			out, err := runtime.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"/bin/sh", "-c", dataSums}})
			if err != nil {
				t.Fatal(err)
			}
			if want := wantData(t, img); string(out.Stdout) != want {
				t.Errorf("a container of a pod read\n%s%s\nwant\n%s", out.Stdout, out.Stderr, want)
			}
			if v.env != nil {
				// It reads no exports: deploy/containerd/containerd-1.7.toml says what to do.
				if err := os.Symlink(w.root, filepath.Join(c.dir, "root", "io.containerd.snapshotter.v1.hydrofoil")); err != nil {
					t.Fatal(err)
				}
			}
			checkImageFilesystem(t, images, w.root)
			for _, n := range c.names(t) {
				if l := c.info(t, n).Labels; l[snapshotter.LabelPath] != snapshotter.PathLazy {
					t.Errorf("labels of snapshot %s: %q", n, l)
				}
			}
		})
	}
}

// checkImageFilesystem does what a kubelet does with CRI's answer: it looks at the very path.
func checkImageFilesystem(t *testing.T, images cri.ImageServiceClient, root string) {
	t.Helper()
	stats, err := images.ImageFsInfo(t.Context(), &cri.ImageFsInfoRequest{})
	if err != nil || len(stats.ImageFilesystems) == 0 {
		t.Fatalf("usage of images: %v, %v", stats, err)
	}
	path := stats.ImageFilesystems[0].FsId.Mountpoint
	got, err := os.Stat(path)
	if err != nil {
		t.Fatalf("the filesystem of images: %v", err)
	}
	if want, err := os.Stat(root); err != nil || !os.SameFile(got, want) {
		t.Errorf("images are said to be in %s, want the worker's root, %s (%v)", path, root, err)
	}
}

// TestPodsServices: a pod with a command of its own is a service of its own. What an exec probe
// runs is none.
func TestPodsServices(t *testing.T) {
	for _, v := range []containerdVersion{containerd2, containerd1} {
		t.Run(v.name, func(t *testing.T) {
			needBusybox(t)
			s := startServer(t, t.TempDir())
			k := newLink(t, s.addr, 1<<20)
			pause := s.push("pause", "1", pauseImage(t))
			ref := k.via(s.push("app", "1", runnable(t, 200, 30_000)))
			w := startWorkerOf(t, "--origin-group", registryOf(ref)+" "+registryOf(pause), "--log-level", "debug")
			c := startContainerdCRI(t, v, w, pause)
			c.pull(t, ref)
			runtime := runtimeService(t, c.socket())
			command := []string{"/bin/sh", "-c", "cat /data/0001? > /dev/null; sleep 1000"}
			id := startPod(t, c, runtime, ref, &cri.NamespaceOption{Network: cri.NamespaceMode_NODE}, command...)
			if _, err := runtime.ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"/bin/cat", "/version"}}); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the server has the report", func() error {
				list := startupOf(t, w, ref)
				if len(list) == 0 || list[0].Reports == 0 {
					return fmt.Errorf("%+v", list)
				}
				if len(list) != 1 || !slices.Equal(list[0].Args, command) {
					t.Fatalf("services: %+v, want %q only", list, command)
				}
				return nil
			})
		})
	}
}

// pauseImage is an image of the process that every pod has, which only waits.
func pauseImage(t testing.TB) image {
	t.Helper()
	b, err := os.ReadFile(busybox)
	if err != nil {
		t.Fatal(err)
	}
	return newImage(t, ocispec.ImageConfig{Entrypoint: []string{"/sleep", "100000"}},
		layertest.Layer{layertest.File("sleep", 0o755, string(b))}.Gzip(t))
}

// startPod starts a pod with one container of an image, which waits, and returns
// the container's ID. The pod goes with the test.
func startPod(t testing.TB, c *containerd, runtime cri.RuntimeServiceClient, ref string, namespaces *cri.NamespaceOption, command ...string) (id string) {
	t.Helper()
	return startPodOf(t, "pod", c, runtime, ref, namespaces, command...)
}

// startPodOf is startPod for a pod with a name of its own.
func startPodOf(t testing.TB, name string, c *containerd, runtime cri.RuntimeServiceClient, ref string, namespaces *cri.NamespaceOption, command ...string) (id string) {
	t.Helper()
	p := startSandbox(t, name, c, runtime, namespaces)
	id, err := p.start(t.Context(), ref, command...)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// pod is one whose sandbox is there.
type pod struct {
	runtime cri.RuntimeServiceClient
	id      string // of its sandbox
	config  *cri.PodSandboxConfig
}

// startSandbox starts a pod that has no container yet. It goes with the test.
func startSandbox(t testing.TB, name string, c *containerd, runtime cri.RuntimeServiceClient, namespaces *cri.NamespaceOption) *pod {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	p := &pod{runtime: runtime, config: &cri.PodSandboxConfig{
		Metadata:     &cri.PodSandboxMetadata{Name: name, Namespace: "default", Uid: name},
		LogDirectory: filepath.Join(c.dir, "logs"),
		Linux:        &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{NamespaceOptions: namespaces}},
	}}
	sandbox, err := runtime.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: p.config})
	if err != nil {
		t.Fatal(err)
	}
	p.id = sandbox.PodSandboxId
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if _, err := runtime.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.id}); err != nil {
			t.Error(err)
		}
		if _, err := runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.id}); err != nil {
			t.Error(err)
		}
	})
	return p
}

// start starts a container in the pod, which waits unless a command is named.
func (p *pod) start(ctx context.Context, ref string, command ...string) (id string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	if command == nil {
		command = []string{"/bin/sleep", "100000"}
	}
	made, err := p.runtime.CreateContainer(ctx, &cri.CreateContainerRequest{
		PodSandboxId: p.id,
		Config: &cri.ContainerConfig{
			Metadata: &cri.ContainerMetadata{Name: "app"},
			Image:    &cri.ImageSpec{Image: ref},
			Command:  command,
			LogPath:  "app.log",
			Linux:    &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{NamespaceOptions: p.config.Linux.SecurityContext.NamespaceOptions}},
		},
		SandboxConfig: p.config,
	})
	if err != nil {
		return "", err
	}
	_, err = p.runtime.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: made.ContainerId})
	return made.ContainerId, err
}

// runtimeService connects to CRI on a socket.
func runtimeService(t testing.TB, socket string) cri.RuntimeServiceClient {
	t.Helper()
	return cri.NewRuntimeServiceClient(connect(t, socket))
}

// imageService is runtimeService for images.
func imageService(t testing.TB, socket string) cri.ImageServiceClient {
	t.Helper()
	return cri.NewImageServiceClient(connect(t, socket))
}

func connect(t testing.TB, socket string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}
