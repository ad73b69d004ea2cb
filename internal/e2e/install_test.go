package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"hydrofoil.dev/foil/internal/worker/api"
)

// systemdHost is a host of the test's own: systemd with containerd as a unit, in directories of its
// own in place of /etc, /var/lib and /usr/local/bin.
type systemdHost struct {
	*systemd
	dir  string // where those are
	path string // of its programs
}

// adminConfig is what an administrator has written for containerd.
const adminConfig = `# Nobody but us.
version = 2
[debug]
  level = "debug"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = %q
`

// startSystemdHost starts a host. more is what its administrator has written for containerd besides.
func startSystemdHost(t *testing.T, pause, more string) *systemdHost {
	t.Helper()
	bin := containerd2.dir()
	if bin == "" {
		t.Skipf("skip: %s names no directory with %s", containerd2.variable, containerd2.name)
	}
	h := &systemdHost{dir: workerRoot(t), path: bin + ":" + os.Getenv("PATH")}
	units := filepath.Join(h.dir, "units")
	files := map[string]string{
		"units/containerd.service":         fmt.Sprintf("[Unit]\nDefaultDependencies=no\n[Service]\nType=notify\nEnvironment=PATH=%s\nExecStart=%s/containerd\nKillMode=process\nDelegate=yes\n", h.path, bin),
		"etc/upper/containerd/config.toml": fmt.Sprintf(adminConfig, pause) + more,
	}
	for _, dir := range []string{"etc/scratch", "lib", "bin"} { // scratch is the overlay's, and must be empty
		if err := os.MkdirAll(filepath.Join(h.dir, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"sysinit", "basic", "shutdown", "local-fs", "multi-user"} {
		files["units/"+name+".target"] = "[Unit]\nDefaultDependencies=no\n"
	}
	for name, text := range files {
		path := filepath.Join(h.dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	// Where a process finds it that has only the host's mounts.
	if err := os.Symlink(filepath.Join(bin, "containerd"), filepath.Join(h.dir, "bin", "containerd")); err != nil {
		t.Fatal(err)
	}
	h.systemd = startSystemd(t, units)
	h.inside(t, "sh", "-c", fmt.Sprintf("set -e; cd %s; mount -t overlay -o lowerdir=/etc,upperdir=$PWD/etc/upper,workdir=$PWD/etc/scratch overlay /etc; "+
		"mkdir -p /etc/systemd/system; mount --bind units /etc/systemd/system; mount --bind lib /var/lib; mount --bind bin /usr/local/bin", h.dir))
	h.must(t, "start", "containerd")
	t.Cleanup(func() {
		// They would not end with their units.
		(&containerd{dir: "/run/containerd"}).killShims(t)
	})
	return h
}

// tryInside runs a program in all namespaces of the host.
func (h *systemdHost) tryInside(args ...string) (string, int, error) {
	return h.nsenter("-m", args...)
}

func (h *systemdHost) nsenter(mounts string, args ...string) (string, int, error) {
	cmd := exec.Command("nsenter", append([]string{"-t", fmt.Sprint(h.pid), "-p", "-C", mounts}, args...)...)
	cmd.Env = append(os.Environ(), "PATH="+h.path)
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, out)
	}
	return string(out), cmd.ProcessState.ExitCode(), err
}

func (h *systemdHost) inside(t *testing.T, args ...string) string {
	t.Helper()
	out, _, err := h.tryInside(args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// install runs foil install as in a pod with the host's processes: with mounts of its own.
func (h *systemdHost) install(args ...string) (string, int, error) {
	script := "mount -t proc proc /proc && exec " + foil + " install --enter 1 " + strings.Join(args, " ")
	return h.nsenter("-i", "unshare", "--mount", "/bin/sh", "-c", script)
}

// at is the path of a file of the host.
func (h *systemdHost) at(path string) string {
	return filepath.Join(fmt.Sprintf("/proc/%d/root", h.pid), path)
}

// pids are the processes of the daemon and of containerd.
func (h *systemdHost) pids(t *testing.T) [2]string {
	return [2]string{h.must(t, "show", "--property=MainPID", "--value", "foil-node"), h.must(t, "show", "--property=MainPID", "--value", "containerd")}
}

// tree is what the files are that an administrator of the host sees, by path.
func (h *systemdHost) tree(t *testing.T) map[string]string {
	t.Helper()
	files := make(map[string]string)
	for _, dir := range []string{"/etc/containerd", "/etc/foil", "/etc/systemd/system", "/usr/local/bin"} {
		err := filepath.WalkDir(h.at(dir), func(path string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				if errors.Is(err, os.ErrNotExist) {
					err = nil
				}
				return err
			}
			b, err := os.ReadFile(path)
			if len(b) > 1<<20 {
				b = fmt.Appendf(nil, "%d bytes", len(b)) // a program
			}
			files[strings.TrimPrefix(path, h.at("/"))] = string(b)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return files
}

// TestInstall sets a host up as a pod of Kubernetes does, and undoes it.
func TestInstall(t *testing.T) {
	needBusybox(t)
	s := startServer(t, t.TempDir())
	pause := s.push("pause", "1", pauseImage(t))
	h := startSystemdHost(t, pause, "")
	before := h.tree(t)
	settings := filepath.Join(t.TempDir(), "foil.toml")
	text := fmt.Sprintf("[node]\nlog-level = \"debug\"\ngate = %q\n", bestGate())
	if err := os.WriteFile(settings, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, _, err := h.install("--settings", settings); err != nil {
		t.Fatal(err)
	} else if !strings.Contains(out, "this host is set up") {
		t.Errorf("install says %s", out)
	}
	if got, err := os.ReadFile(h.at("/etc/foil/foil.toml")); err != nil || !strings.HasSuffix(string(got), text) {
		t.Errorf("the settings are %q, %v", got, err)
	}
	if _, _, err := h.install("--check"); err != nil {
		t.Error(err)
	}
	pids := h.pids(t)
	if out, _, err := h.install("--settings", settings); err != nil {
		t.Error(err)
	} else if got := h.pids(t); got != pids {
		t.Errorf("what was set up was restarted: processes %q, before %q\n%s", got, pids, out)
	}
	// An install that was broken off: the files are there, and nobody has read them.
	stamps, err := filepath.Glob(h.at("/var/lib/foil/installed-*"))
	if err != nil || len(stamps) != 2 {
		t.Fatalf("stamps: %q, %v", stamps, err)
	}
	for _, path := range stamps {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	if out, _, err := h.install("--settings", settings); err != nil {
		t.Error(err)
	} else if got := h.pids(t); got[0] == pids[0] || got[1] == pids[1] {
		t.Errorf("what nobody has read was not: processes %q, before %q\n%s", got, pids, out)
	}

	conn, err := grpc.NewClient("unix:"+h.at("/run/containerd/containerd.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	images, runtime := cri.NewImageServiceClient(conn), cri.NewRuntimeServiceClient(conn)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	ref := s.push("app", "1", runnable(t, 20, 5_000))
	lazily := func() int {
		t.Helper()
		c := api.Dial(h.at("/var/lib/foil"))
		defer c.Close()
		list, err := c.Images(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	pull := func(ref string) {
		t.Helper()
		if _, err := images.PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref}}); err != nil {
			t.Fatal(err)
		}
	}
	pull(ref)
	if n := lazily(); n != 1 {
		t.Errorf("of one image that containerd has pulled, %d came lazily", n)
	}

	// Not while a container needs it; but new ones do without.
	t.Run("in use", func(t *testing.T) {
		startPod(t, &containerd{dir: t.TempDir()}, runtime, ref, &cri.NamespaceOption{Network: cri.NamespaceMode_NODE})
		for range 2 {
			if out, code, err := h.install("--undo"); code != 3 || !strings.Contains(out, "containers still use it") {
				t.Errorf("undone below a container: code %d, %v", code, err)
			}
		}
		// What containers use stays. Others of the same images come as before.
		n := lazily()
		pull(ref)
		other := s.push("other", "1", runnable(t, 20, 5_000))
		pull(other)
		if now := lazily(); now != n {
			t.Errorf("when install was undone, %d images came lazily", now-n)
		}
		startPodOf(t, "again", &containerd{dir: t.TempDir()}, runtime, ref, &cri.NamespaceOption{Network: cri.NamespaceMode_NODE})
		startPodOf(t, "other", &containerd{dir: t.TempDir()}, runtime, other, &cri.NamespaceOption{Network: cri.NamespaceMode_NODE})
	})
	for range 2 {
		if out, code, err := h.install("--undo"); err != nil {
			t.Fatalf("undo: code %d, %v\n%s", code, err, out)
		}
	}
	if diff := cmp.Diff(before, h.tree(t)); diff != "" {
		t.Errorf("undone (-before +after):\n%s", diff)
	}
	if left, err := filepath.Glob(h.at("/var/lib/foil/installed-*")); err != nil || len(left) > 0 {
		t.Errorf("undone, and there are %q, %v", left, err)
	}
	if _, err := h.ctl("is-active", "foil-node"); err == nil {
		t.Error("undone, and the daemon runs")
	}
}

// What an administrator has set up is left alone, and nothing is half done.
func TestInstallRefuses(t *testing.T) {
	h := startSystemdHost(t, "registry.example/pause:1", "")
	for name, text := range map[string]string{
		"/etc/systemd/system/foil-node.service":  "[Service]\nExecStart=/opt/foil node\n",
		"/etc/containerd/conf.d/foil.toml":       "version = 2\n",
		"/etc/containerd/conf.d/zz-ours.toml":    "version = 2\n[plugins.\"io.containerd.cri.v1.images\"]\n  snapshotter = \"native\"\n",
		"/etc/containerd/conf.d/zz-invalid.toml": "version = [\n",
	} {
		t.Run(name, func(t *testing.T) {
			config := "imports = ['/etc/containerd/conf.d/*.toml']\nversion = 3\n"
			files := map[string]string{"/etc/containerd/config.toml": config, name: text}
			for path, text := range files {
				if err := errors.Join(os.MkdirAll(filepath.Dir(h.at(path)), 0o755), os.WriteFile(h.at(path), []byte(text), 0o644)); err != nil {
					t.Fatal(err)
				}
			}
			containerd := h.must(t, "show", "--property=MainPID", "--value", "containerd")
			out, code, err := h.install()
			if err == nil || code != 1 {
				t.Errorf("code %d: %s", code, out)
			}
			t.Log(out)
			for path, want := range files {
				if got, err := os.ReadFile(h.at(path)); err != nil || string(got) != want {
					t.Errorf("%s is %q, %v, want what it was", path, got, err)
				}
			}
			if now := h.must(t, "show", "--property=MainPID", "--value", "containerd"); now != containerd {
				t.Error("containerd was restarted")
			}
			if _, err := os.Stat(h.at("/etc/containerd/conf.d/foil.toml")); err == nil && !strings.HasSuffix(name, "/foil.toml") {
				t.Error("what containerd did not take is there")
			}
			_ = os.Remove(h.at(name))
			if out, _, err := h.install("--undo"); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
