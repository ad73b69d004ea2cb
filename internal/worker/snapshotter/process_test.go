package snapshotter

import (
	"context"
	"net"
	"path/filepath"
	"testing"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"
)

// containers is containerd's store of them, by NAMESPACE/ID.
type containers struct {
	containersapi.UnimplementedContainersServer
	all map[string]*containersapi.Container
}

func (c *containers) Get(ctx context.Context, r *containersapi.GetContainerRequest) (*containersapi.GetContainerResponse, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	ns := md.Get(namespaces.GRPCHeader)
	if len(ns) != 1 || c.all[ns[0]+"/"+r.ID] == nil {
		return nil, status.Errorf(codes.NotFound, "no container %s in %q", r.ID, ns)
	}
	return &containersapi.GetContainerResponse{Container: c.all[ns[0]+"/"+r.ID]}, nil
}

// What runs in a container is told when its task is made, as containerd will execute it;
// before that, and of what containerd has no container for, it is not known.
func TestWhatRunsIsTold(t *testing.T) {
	f := newFake()
	img := f.add(t, "a", "b")
	store := &containers{all: make(map[string]*containersapi.Container)}
	socket := filepath.Join(t.TempDir(), "containerd.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	containersapi.RegisterContainersServer(srv, store)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l)
	}()
	t.Cleanup(func() {
		srv.Stop()
		<-done
	})
	s, err := Open(t.Context(), Options{Dir: t.TempDir(), Node: f, Containerd: socket})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	names := pullBy(t, s, img, 0, "")
	top := names[len(names)-1]
	container := func(key, spec string) *containersapi.Container {
		return &containersapi.Container{ID: key, SnapshotKey: key, Spec: &anypb.Any{Value: []byte(spec)}}
	}
	const sleeps = `{"ociVersion":"1.2.0","process":{"args":["sleep","1000"],"env":["A=1"]}}`
	for _, key := range []string{"k8s.io/7/early", "k8s.io/8/pod", "default/9/pod", "k8s.io/10/other", "k8s.io/11/broken", "plain"} {
		if _, err := s.Prepare(t.Context(), key, top); err != nil {
			t.Fatal(err)
		}
		switch key {
		case "k8s.io/8/pod":
			store.all["k8s.io/pod"] = container("pod", sleeps)
		case "default/9/pod":
			store.all["default/pod"] = container("pod", `{"process":{"args":["/app"]},"linux":{"cgroupsPath":"kubepods-pod1.slice:cri:pod","resources":{"memory":{"limit":9000},"unified":{"memory.high":"8000","memory.max":"9000"}}}}`)
		case "k8s.io/10/other":
			store.all["k8s.io/other"] = container("another", sleeps)
		case "k8s.io/11/broken":
			store.all["k8s.io/broken"] = container("broken", "sleep")
		}
		if _, err := s.Mounts(t.Context(), key); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.View(t.Context(), "k8s.io/12/pod", top); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Mounts(t.Context(), "k8s.io/12/pod"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Prepare(t.Context(), "k8s.io/13/pod", ""); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Mounts(t.Context(), "k8s.io/13/pod"); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"made k8s.io/7/early", `starts k8s.io/7/early []`,
		"made k8s.io/8/pod", `starts k8s.io/8/pod ["sleep" "1000"]`,
		"made default/9/pod", `starts default/9/pod ["/app"] in /kubepods.slice/kubepods-pod1.slice/cri-pod.scope with 8000 bytes`,
		"made k8s.io/10/other", `starts k8s.io/10/other []`,
		"made k8s.io/11/broken", `starts k8s.io/11/broken []`,
		"made plain", `starts plain []`,
		"made k8s.io/12/pod",
	}
	if diff := cmp.Diff(want, f.told); diff != "" {
		t.Errorf("the node is told (-want +got):\n%s", diff)
	}
}
