package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/snapshotter"
)

// shifted is where the user namespaces of these tests begin on the host.
const shifted = 100_000

// owned is runnable with files of other owners in /owned.
func owned(t testing.TB) image {
	t.Helper()
	file := func(name string, mode int64, id int) layertest.Entry {
		e := layertest.File(name, mode, name)
		e.Header.Uid, e.Header.Gid = id, id+1
		return e
	}
	img := runnable(t, 100, 30_000)
	return newImage(t, ocispec.ImageConfig{Cmd: []string{"/bin/sh"}}, append(img.layers,
		layertest.Layer{layertest.Dir("owned", 0o755), file("owned/daemon", 0o600, 1), file("owned/user", 0o640, 1000)}.Gzip(t))...)
}

// ownersScript shows what a container in a user namespace sees of owned, writes
// to it, and shows that.
const (
	ownersScript = "ids() { ls -lnd $* | while read m l u g rest; do echo $m $u $g; done; }; " +
		"ids / /owned /owned/daemon /owned/user; cat /owned/daemon; echo; " +
		"echo $ID >/owned/new && echo more >>/owned/daemon; ids /owned/new /owned/daemon; " + dataSums
	ownersSeen = "drwxr-xr-x 0 0\ndrwxr-xr-x 0 0\n-rw------- 1 2\n-rw-r----- 1000 1001\nowned/daemon\n" +
		"-rw------- 1 2\n-rw-r--r-- 0 0\n"
)

// runMapped runs ownersScript in a container in a user namespace, compares what
// it prints, and returns the owners that the files it wrote have on the host.
func runMapped(t *testing.T, c *containerd, w *worker, ref, id, data string, flags ...string) (owners []string) {
	t.Helper()
	mapping := fmt.Sprintf("0:%d:65536", shifted)
	args := slices.Concat([]string{"run", "--snapshotter", "hydrofoil", "--uidmap", mapping, "--gidmap", mapping, "--env", "ID=" + id}, flags,
		[]string{ref, id, "/bin/sh", "-c", ownersScript})
	if diff := cmp.Diff(ownersSeen+data, c.ctr(t, args...)); diff != "" {
		t.Errorf("container %s in a user namespace (-want +got):\n%s", id, diff)
	}
	owners = ownersOf(t, w, id)
	c.ctr(t, "containers", "rm", id)
	return owners
}

// ownersOf returns the owners on the host of what ownersScript wrote, with this ID
// in its environment.
func ownersOf(t *testing.T, w *worker, id string) (owners []string) {
	t.Helper()
	// Snapshots of containers before may be there still.
	written, err := filepath.Glob(filepath.Join(w.root, "snapshotter", "snapshots", "*", "fs", "owned", "new"))
	written = slices.DeleteFunc(written, func(path string) bool {
		b, err := os.ReadFile(path)
		return err != nil || string(b) != id+"\n"
	})
	if err != nil || len(written) != 1 {
		t.Fatalf("what container %s wrote is at %q, %v", id, written, err)
	}
	for _, name := range []string{"new", "daemon", ".", ".."} {
		var st syscall.Stat_t
		if err := syscall.Stat(filepath.Join(filepath.Dir(written[0]), name), &st); err != nil {
			t.Fatal(err)
		}
		owners = append(owners, fmt.Sprint(name, " ", st.Uid, " ", st.Gid))
	}
	return owners
}

var ownersShifted = []string{"new 100000 100000", "daemon 100001 100002", ". 100000 100000", ".. 100000 100000"}

// A container in a user namespace sees the owners that the image gives its
// files, and what it writes has the shifted IDs.
func TestContainerdMapsIDs(t *testing.T) {
	needBusybox(t)
	s := startServer(t, t.TempDir())
	img := owned(t)
	data := wantData(t, img)
	slow := newLink(t, s.addr, 256<<10)
	ref := slow.via(s.push("app", "1", img))
	other := newImage(t, ocispec.ImageConfig{Cmd: []string{"/bin/sh"}}, append(slices.Clone(img.layers),
		layertest.Layer{layertest.File("version", 0o644, "other")}.Gzip(t))...)
	refOther := s.push("app", "other", other)
	refOther = plainRegistry(t, s) + refOther[strings.IndexByte(refOther, '/'):]
	w := startWorker(t, workerRoot(t), "--origin-group", registryOf(ref)+" "+registryOf(refOther))
	c := startContainerd(t, containerd2, w)
	c.pull(t, ref)
	if got := w.imageOf(w.imageRefs()[0]); got.State != "pulling" {
		t.Fatalf("when ctr images pull has ended, the worker has %+v, want it on its way", got)
	}
	slow.setRate(0)
	mounts := func() (list []kernel.Mount) {
		list, err := kernel.Mounts(w.root)
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
	before := mounts()
	if diff := cmp.Diff(ownersShifted, runMapped(t, c, w, ref, "on-its-way", data, "--remap-labels")); diff != "" {
		t.Errorf("owners on the host:\n%s", diff)
	}
	if diff := cmp.Diff(ownersShifted, runMapped(t, c, w, ref, "copied", data)); diff != "" {
		t.Errorf("owners on the host, of a copy whose owners containerd changed:\n%s", diff)
	}

	// A layer that came the plain way on the rootfs of one that did not.
	c.pull(t, refOther)
	if diff := cmp.Diff(ownersShifted, runMapped(t, c, w, refOther, "mixed", wantData(t, other), "--remap-labels")); diff != "" {
		t.Errorf("owners on the host, on two kinds of layers:\n%s", diff)
	}
	if diff := cmp.Diff(before, mounts()); diff != "" {
		t.Errorf("mounts below the worker's directory (-before +after):\n%s", diff)
	}
	// The same where containerd cannot map all mounts: nothing is made.
	blocker := filepath.Join(w.root, "overlay")
	if err := os.Mkdir(blocker, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = kernel.Unmount(blocker, true) })
	if err := syscall.Mount("overlay", blocker, "overlay", 0, "lowerdir=/usr:/etc"); err != nil {
		t.Fatal(err)
	}
	mapping := fmt.Sprintf("0:%d:65536", shifted)
	_, err := c.tryCtr("run", "--snapshotter", "hydrofoil", "--remap-labels", "--uidmap", mapping, "--gidmap", mapping, refOther, "refused", "/bin/sh", "-c", "true")
	if err == nil || !strings.Contains(err.Error(), "a server that sends bundles") {
		t.Errorf("a container whose IDs cannot be mapped: %v", err)
	}
	if got := c.ctr(t, "snapshots", "--snapshotter", "hydrofoil", "ls"); strings.Contains(got, "refused") {
		t.Errorf("a snapshot stayed of a container that was not made:\n%s", got)
	}
}

// containerd 1.7, and 2.x without the capability, change the owners of a copy, but
// ask for the mapping as well: it must not come on top.
func TestContainerdChangesOwners(t *testing.T) {
	needBusybox(t)
	s := startServer(t, t.TempDir())
	img := owned(t)
	ref := s.push("app", "1", img)
	w := startWorker(t, workerRoot(t))
	pause := s.push("pause", "1", runnable(t, 0, 0))
	c := startContainerdCRI(t, containerd1, w, pause)
	conn, err := grpc.NewClient("unix:"+c.socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := cri.NewImageServiceClient(conn).PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref}}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(ownersShifted, runMapped(t, c, w, ref, "labels", wantData(t, img), "--remap-labels")); diff != "" {
		t.Errorf("owners on the host:\n%s", diff)
	}
}

// A pod with hostUsers: false, of an image that is on its way.
func TestCRIMapsIDs(t *testing.T) {
	for _, gate := range []string{kernel.GateFanotify, kernel.GateFUSE} {
		t.Run(gate, func(t *testing.T) {
			if os.Getenv(gateEnv) == "" {
				t.Setenv(gateEnv, gate)
			}
			testCRIMapsIDs(t)
		})
	}
}

func testCRIMapsIDs(t *testing.T) {
	needBusybox(t)
	if dir := os.Getenv("FOIL_TEST_RUNC"); dir != "" {
		t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	}
	out, err := exec.Command("runc", "--version").Output()
	var major, minor int
	if _, scanErr := fmt.Sscanf(string(out), "runc version %d.%d", &major, &minor); err != nil || scanErr != nil || major == 1 && minor < 2 {
		t.Skipf("skip: such pods take runc 1.2 or later, and FOIL_TEST_RUNC names no directory with it; here is %q", strings.SplitN(string(out), "\n", 2)[0])
	}
	s := startServer(t, t.TempDir())
	img := owned(t)
	slow := newLink(t, s.addr, 0)
	slow.stallAfter(2 << 20)
	ref := slow.via(s.push("app", "1", img))
	pause := s.push("pause", "1", pauseImage(t))
	w := startWorker(t, workerRoot(t), "--origin-group", registryOf(ref)+" "+registryOf(pause))
	c := startContainerdCRI(t, containerd2, w, pause)
	conn, err := grpc.NewClient("unix:"+c.socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	c.pull(t, ref)
	if got := w.imageOf(w.imageRefs()[0]); got.State != "pulling" {
		t.Fatalf("when the pull has ended, the worker has %+v, want it on its way", got)
	}
	slow.open()
	runtime := cri.NewRuntimeServiceClient(conn)
	ids := []*cri.IDMapping{{HostId: shifted, ContainerId: 0, Length: 65536}}
	id := startPod(t, c, runtime, ref, &cri.NamespaceOption{
		Network:       cri.NamespaceMode_NODE,
		UsernsOptions: &cri.UserNamespace{Mode: cri.NamespaceMode_POD, Uids: ids, Gids: ids},
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	mapped, err := runtime.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"/bin/cat", "/proc/self/uid_map"}})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"0", fmt.Sprint(shifted), "65536"}, strings.Fields(string(mapped.Stdout))); diff != "" {
		t.Errorf("user IDs of the pod:\n%s%s", diff, mapped.Stderr)
	}
	got, err := runtime.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"/bin/sh", "-c", "ID=pod; " + ownersScript}})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(ownersSeen+wantData(t, img), string(got.Stdout)); diff != "" {
		t.Errorf("a pod in a user namespace (-want +got):\n%s%s", diff, got.Stderr)
	}
	if diff := cmp.Diff(ownersShifted, ownersOf(t, w, "pod")); diff != "" {
		t.Errorf("owners on the host:\n%s", diff)
	}
	for _, n := range c.names(t) {
		if l := c.info(t, n).Labels; l[snapshotter.LabelPath] != snapshotter.PathLazy {
			t.Errorf("labels of snapshot %s: %q; a copy with other owners has none", n, l)
		}
	}
}
