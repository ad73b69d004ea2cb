package e2e

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/snapshotter"
)

var (
	containerd2 = containerdVersion{
		name: "containerd 2", variable: "FOIL_TEST_CONTAINERD2", config: "containerd-2.toml", number: 3, transfer: true,
		sandbox: "[plugins.'io.containerd.cri.v1.images'.pinned_images]\nsandbox = %q\n[plugins.'io.containerd.cri.v1.runtime']\nrestrict_oom_score_adj = true\n",
	}
	containerd1 = containerdVersion{
		name: "containerd 1", variable: "FOIL_TEST_CONTAINERD1", config: "containerd-1.7.toml", number: 2,
		sandbox: "[plugins.'io.containerd.grpc.v1.cri']\nsandbox_image = %q\nrestrict_oom_score_adj = true\n",
	}
)

// crossEnv, if it is set, has the tests that use ctr run under both containerds
// and on both gates, not only where each is sure to add something.
const crossEnv = "FOIL_TEST_CROSS"

// dataSums is a script that prints the digests of an image's data, and what they
// are, from containerd's own unpacker.
const dataSums = "cd /data && for f in *; do sha256sum $f; done; cat /version"

// containerdVersion is a containerd that the tests run. variable names the
// directory with its containerd and containerd-shim-runc-v2, and ctr, which
// may be 2.x's.
type containerdVersion struct {
	name, variable, config string
	number                 int // of the configuration's format
	// transfer: ctr's pulls say of which image a layer is. Those of 1.7 do not, and
	// every image comes the plain way: there users pull by CRI.
	transfer bool
	// env is added to its environment.
	env []string
	// sandbox is what a pod needs on this host besides: its image, and no rights
	// that a test may not have.
	sandbox string
}

// host is a containerd, and the gate of its worker; an empty one is the best that
// this machine has.
type host struct {
	containerdVersion
	gate string
}

// onHosts runs a test on the hosts, or on all that there are.
func onHosts(t *testing.T, hosts []host, test func(*testing.T, containerdVersion)) {
	if os.Getenv(crossEnv) != "" {
		hosts = nil
		for _, v := range []containerdVersion{containerd2, containerd1} {
			for _, gate := range []string{kernel.GateFanotify, kernel.GateFUSE} {
				hosts = append(hosts, host{v, gate})
			}
		}
	}
	for _, h := range hosts {
		t.Run(strings.TrimSpace(h.name+" "+h.gate), func(t *testing.T) {
			if os.Getenv(gateEnv) == "" {
				t.Setenv(gateEnv, h.gate)
			}
			test(t, h.containerdVersion)
		})
	}
}

// dir is where the programs are: those of the variable, or what is installed if
// that is of the same number before the dot.
func (v containerdVersion) dir() string {
	if dir := os.Getenv(v.variable); dir != "" {
		return dir
	}
	path, err := exec.LookPath("containerd")
	if err != nil {
		return ""
	}
	out, err := exec.Command(path, "--version").Output()
	_, major, _ := strings.Cut(v.name, " ")
	if err != nil || !regexp.MustCompile(`\sv?`+major[:1]+`\.`).Match(out) {
		return ""
	}
	return filepath.Dir(path)
}

// containerd is a containerd of the test's own, with the worker's snapshotter.
type containerd struct {
	*process
	v                containerdVersion
	dir, bin, ctrBin string
	namespace        string
}

// startContainerd starts containerd for tests that use ctr: without CRI, unless
// its pulls need that.
func startContainerd(t testing.TB, v containerdVersion, w *worker) *containerd {
	t.Helper()
	if !v.transfer {
		return startContainerdCRI(t, v, w, "registry.example/pause:1")
	}
	return launchContainerd(t, v, w, "default",
		"disabled_plugins = ['io.containerd.grpc.v1.cri', 'io.containerd.cri.v1.images', 'io.containerd.cri.v1.runtime', 'io.containerd.nri.v1.nri', 'io.containerd.podsandbox.controller.v1.podsandbox']\n", "")
}

// startContainerdCRI starts containerd as a node of Kubernetes has it.
func startContainerdCRI(t testing.TB, v containerdVersion, w *worker, pause string) *containerd {
	t.Helper()
	return launchContainerd(t, v, w, "k8s.io", "disabled_plugins = ['io.containerd.nri.v1.nri']\n", fmt.Sprintf(v.sandbox, pause))
}

// launchContainerd starts containerd with the configuration of
// deploy/containerd, but for the paths.
func launchContainerd(t testing.TB, v containerdVersion, w *worker, namespace, first, last string) *containerd {
	t.Helper()
	bin := v.dir()
	if bin == "" {
		t.Skipf("skip: %s names no directory with %s", v.variable, v.name)
	}
	config, err := os.ReadFile("../../deploy/containerd/" + v.config)
	if err != nil {
		t.Fatal(err)
	}
	dir := cmp.Or(w.containerd, containerdDir(t))
	c := &containerd{v: v, dir: dir, bin: bin, ctrBin: filepath.Join(bin, "ctr"), namespace: namespace}
	if _, err := os.Stat(c.ctrBin); err != nil {
		c.ctrBin = filepath.Join(containerd2.dir(), "ctr")
	}
	own := fmt.Sprintf("root = %q\nstate = %q\n", filepath.Join(dir, "root"), filepath.Join(dir, "state")) + first +
		fmt.Sprintf("[grpc]\naddress = %q\n[ttrpc]\naddress = %q\n[debug]\nlevel = 'debug'\n", c.socket(), c.socket()+".ttrpc")
	number := fmt.Sprintf("version = %d\n", v.number)
	text := strings.Replace(string(config), number, number+own, 1) + last
	text = strings.ReplaceAll(text, "/var/lib/foil/run/snapshotter.sock", snapshotter.SocketPath(w.root))
	text = strings.ReplaceAll(text, `root = "/var/lib/foil"`, fmt.Sprintf("root = %q", w.root))
	text = strings.ReplaceAll(text, "/etc/containerd/certs.d", cmp.Or(w.hosts, filepath.Join(dir, "nothing")))
	if err := os.WriteFile(filepath.Join(dir, "config.toml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		mounts, err := kernel.Mounts(dir)
		if err != nil {
			t.Error(err)
		}
		for i := len(mounts) - 1; i >= 0; i-- {
			if err := kernel.Unmount(mounts[i].Target, true); err != nil {
				t.Error(err)
			}
		}
	})
	c.start(t)
	return c
}

// containerdDir makes the directory of a containerd.
func containerdDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "foil-containerd-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	// As of /run/containerd: root of a user namespace has to get to its files.
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	return dir
}

// startWorkerOf starts a worker that knows the containerd which is started for it next.
func startWorkerOf(t testing.TB, flags ...string) *worker {
	t.Helper()
	dir := containerdDir(t)
	w := startWorker(t, workerRoot(t), append(flags, "--cri-endpoint", socketIn(dir))...)
	w.containerd = dir
	return w
}

func socketIn(dir string) string { return filepath.Join(dir, "c.sock") }

func (c *containerd) socket() string { return socketIn(c.dir) }

func (c *containerd) start(t testing.TB) {
	t.Helper()
	cmd := exec.Command(filepath.Join(c.bin, "containerd"), "--config", filepath.Join(c.dir, "config.toml"))
	cmd.Env = append(append(os.Environ(), "PATH="+c.bin+":"+os.Getenv("PATH")), c.v.env...)
	c.process = startCommand(t, cmd)
	eventually(t, "containerd answers", func() error {
		select {
		case <-c.done:
			t.Fatalf("containerd ended: %v\n%s", c.err, c.log)
		default:
		}
		if _, err := c.tryCtr("version"); err != nil || c.v.transfer {
			return err
		}
		return c.cri(func(ctx context.Context, images cri.ImageServiceClient) error {
			_, err := images.ListImages(ctx, &cri.ListImagesRequest{})
			return err
		})
	})
}

func (c *containerd) tryCtr(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.ctrBin, append([]string{"--address", c.socket(), "--namespace", c.namespace}, args...)...)
	cmd.WaitDelay = time.Second
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("ctr %s: %w\n%s%s", strings.Join(args, " "), err, out.String(), errs.String())
	}
	return out.String(), nil
}

func (c *containerd) ctr(t testing.TB, args ...string) string {
	t.Helper()
	out, err := c.tryCtr(args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (c *containerd) pull(t testing.TB, ref string) {
	t.Helper()
	if err := c.tryPull(ref); err != nil {
		t.Fatal(err)
	}
}

// registryOf is the origin of an image.
func registryOf(ref string) string { return ref[:strings.IndexByte(ref, '/')] }

// tryPull pulls an image as users of this version do.
func (c *containerd) tryPull(ref string) error {
	if c.v.transfer {
		_, err := c.tryCtr("images", "pull", "--plain-http", "--snapshotter", "hydrofoil", ref)
		return err
	}
	return c.cri(func(ctx context.Context, images cri.ImageServiceClient) error {
		_, err := images.PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref}})
		return err
	})
}

// tryRemove removes an image; its containers go on.
func (c *containerd) tryRemove(ref string) error {
	if c.v.transfer {
		_, err := c.tryCtr("images", "rm", "--sync", ref)
		return err
	}
	return c.cri(func(ctx context.Context, images cri.ImageServiceClient) error {
		_, err := images.RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: ref}})
		return err
	})
}

// cri makes one call of the image service.
func (c *containerd) cri(call func(context.Context, cri.ImageServiceClient) error) error {
	conn, err := grpc.NewClient("unix:"+c.socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return call(ctx, cri.NewImageServiceClient(conn))
}

// run is `ctr run` of one command in a new container. All containerds of a host
// name their containers to one runc: the process ID tells tests apart. The output
// goes to a file, since ctr may lose that of a short command.
func (c *containerd) run(t testing.TB, ref, id, script string) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "foil-said-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	c.ctr(t, "run", "--rm", "--snapshotter", "hydrofoil", "--mount", "type=bind,src="+dir+",dst=/said,options=rbind:rw",
		ref, fmt.Sprint(id, "-", os.Getpid()), "/bin/sh", "-c", "{ "+script+"\n} >/said/out")
	out, err := os.ReadFile(filepath.Join(dir, "out"))
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// snapshot is what containerd says of one.
type snapshotInfo struct {
	Name, Parent string
	Labels       map[string]string
}

func (c *containerd) info(t testing.TB, name string) snapshotInfo {
	t.Helper()
	var s snapshotInfo
	if err := json.Unmarshal([]byte(c.ctr(t, "snapshots", "--snapshotter", "hydrofoil", "info", name)), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// names lists the committed snapshots.
func (c *containerd) names(t testing.TB) []string {
	t.Helper()
	var names []string
	for line := range strings.Lines(c.ctr(t, "snapshots", "--snapshotter", "hydrofoil", "ls")) {
		if f := strings.Fields(line); len(f) > 1 && f[len(f)-1] == "Committed" {
			names = append(names, f[0])
		}
	}
	return names
}

func wantData(t testing.TB, img image) string {
	t.Helper()
	dir := unpack(t, img)
	cmd := exec.Command("/bin/sh", "-c", "cd "+dir+"/data && for f in *; do sha256sum $f; done; cat ../version")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// runnable is an image of a shell and n files in /data.
func runnable(t testing.TB, n, size int) image {
	t.Helper()
	return imageOf(t, shellLayers(t, n, size))
}

// imageOf is an image of layers that starts a shell.
func imageOf(t testing.TB, layers []layertest.Layer) image {
	t.Helper()
	var blobs []layertest.Blob
	for _, l := range layers {
		blobs = append(blobs, l.Gzip(t))
	}
	return newImage(t, ocispec.ImageConfig{Cmd: []string{"/bin/sh"}}, blobs...)
}

// shellLayers are the layers of runnable.
func shellLayers(t testing.TB, n, size int) []layertest.Layer {
	t.Helper()
	b, err := os.ReadFile(busybox)
	if err != nil {
		t.Fatal(err)
	}
	base := layertest.Layer{layertest.Dir("bin", 0o755), layertest.File("bin/busybox", 0o755, string(b)), layertest.Dir("data", 0o755)}
	for _, name := range []string{"sh", "cat", "sleep", "ls", "wc", "sha256sum"} {
		base = append(base, layertest.Symlink("bin/"+name, "busybox"))
	}
	for i := range n {
		base = append(base, layertest.File(fmt.Sprintf("data/%05d", i), 0o644, noise(size+i%97)))
	}
	return []layertest.Layer{base, {layertest.File("version", 0o644, "1")}}
}

func needBusybox(t testing.TB) {
	t.Helper()
	if busybox == "" {
		t.Skip("skip: no static busybox")
	}
}

// checkFigures compares what everybody says of the only image, of two layers, with
// what is there: containerd's usage, foil images, foil status, and df in a container.
func checkFigures(t testing.TB, c *containerd, w *worker, ref string, img image, complete bool) {
	t.Helper()
	var on syscall.Statfs_t
	if err := syscall.Statfs(w.root, &on); err != nil {
		t.Fatal(err)
	}
	// It also waits until what a shell starts with is here.
	df := strings.TrimSpace(c.run(t, ref, "df", "/bin/busybox stat -f -c '%b %S %c' /"))
	if want := fmt.Sprintf("%d %d %d", on.Blocks, on.Frsize, on.Files); df != want {
		t.Errorf("statfs in a container: blocks, their size and inodes are %s, want %s, of the filesystem that holds what the container writes", df, want)
	}

	var total int64
	err := filepath.WalkDir(unpack(t, img), func(_ string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			total += info.Size()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var shown api.Image
	out, errs, _ := command(t, "images", "--root", w.root, "--json")
	if err := json.Unmarshal([]byte(out), &shown); err != nil {
		t.Fatalf("foil images: %v\n%s%s", err, out, errs)
	}
	state := "pulling"
	if complete {
		state = "complete"
	}
	here := shown.ContentHere
	if shown.State != state || shown.ContentTotal != total || here <= 0 || (here == total) != complete {
		t.Errorf("foil images says %+v, want it %s with contents of %d bytes", shown, state, total)
	}
	var status api.Status
	out, errs, _ = command(t, "status", "--root", w.root, "--json")
	if err := json.Unmarshal([]byte(out), &status); err != nil {
		t.Fatalf("foil status: %v\n%s%s", err, out, errs)
	}
	for _, p := range status.Pulls {
		if p.Ref == shown.Ref && (p.ContentTotal != total || p.ContentHere < here || (p.ContentHere == total) != complete) {
			t.Errorf("foil status says %+v, want %d of %d bytes here, or more", p, here, total)
		}
	}
	if !complete && len(status.Pulls) != 1 {
		t.Errorf("foil status has the pulls %+v, want one", status.Pulls)
	}

	names := c.names(t)
	if len(names) != 2 {
		t.Fatalf("committed snapshots: %q, want one for each of the 2 layers", names)
	}
	eventually(t, "containerd's usage is what is on the disk", func() error {
		var disk, said int64
		rootfs, err := os.ReadDir(filepath.Dir(w.mountOf(shown.Ref)))
		if err != nil {
			return err
		}
		for _, e := range rootfs {
			info, err := e.Info()
			if err != nil {
				return err
			}
			if info.Mode().IsRegular() {
				disk += info.Sys().(*syscall.Stat_t).Blocks * 512
			}
		}
		out, err := c.tryCtr("snapshots", "--snapshotter", "hydrofoil", "usage", "-b", names[0], names[1])
		if err != nil {
			return err
		}
		for line := range strings.Lines(out) {
			if f := strings.Fields(line); len(f) == 3 && f[0] != "KEY" {
				n, err := strconv.ParseInt(f[1], 10, 64)
				if err != nil {
					return err
				}
				said += n
			}
		}
		if said != disk || said < here || !complete && said >= total {
			return fmt.Errorf("containerd says that the image takes %d bytes; its files take %d, and %d of %d bytes are here", said, disk, here, total)
		}
		return nil
	})
}

func (w *worker) imageRefs() (refs []string) {
	w.t.Helper()
	images, err := w.client.Images(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	for _, img := range images {
		refs = append(refs, img.Ref)
	}
	return refs
}

// plainRegistry is s as a registry that is no Hydrofoil server; it returns its
// address.
func plainRegistry(t testing.TB, s *server) string {
	t.Helper()
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: s.addr})
	srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/v2/") {
			proxy.ServeHTTP(rw, r)
			return
		}
		http.NotFound(rw, r)
	}))
	t.Cleanup(srv.Close)
	return srv.Listener.Addr().String()
}
