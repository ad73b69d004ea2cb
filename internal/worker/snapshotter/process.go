package snapshotter

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/node"
	"hydrofoil.dev/foil/internal/worker/origin"
)

// askWithin bounds how long containerd may take to say what runs in a container, which is
// not started meanwhile.
const askWithin = time.Second

// dial returns a connection to containerd's own socket, which is made when it is needed; nil:
// containerd is not asked.
func dial(socket string) (*grpc.ClientConn, error) {
	if socket == "" {
		return nil, nil
	}
	return grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// made tells the node of a snapshot that was made on a rootfs: from now on what is read
// there may be read by what runs in it.
func (s *Snapshotter) made(key, parent string) {
	if rootfs, ok := s.rootfsBelow(parent); ok {
		s.opts.Node.ContainerMade(rootfs, key)
	}
}

// starts tells the node what is about to run on a snapshot. containerd asks for the mounts
// of a container's snapshot when it makes the task: then the container is in its store,
// with all that its process is executed with. Before that, as when it reads the image's
// /etc/passwd, there is none, and nothing is told.
func (s *Snapshotter) starts(ctx context.Context, key string) {
	info, err := s.plain.Stat(ctx, key)
	if err != nil || info.Kind != snapshots.KindActive {
		return
	}
	if rootfs, ok := s.rootfsBelow(info.Parent); ok {
		s.opts.Node.ContainerStarts(rootfs, key, func() node.Process {
			runs, err := s.process(ctx, key)
			if err != nil {
				s.log.Debug("what runs on a snapshot is not known: nothing is learnt of it", "snapshot", key, "error", err)
			}
			return runs
		})
	}
}

// rootfsBelow returns the rootfs that a snapshot's parent is.
func (s *Snapshotter) rootfsBelow(parent string) (key origin.Key, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := s.named(parent); r != nil && r.Role == roleRootfs && r.held != nil {
		return r.held.Rootfs, true
	}
	return key, false
}

// process returns what will run in a snapshot's container, and which limit its memory has. The name of a snapshot is NAMESPACE/NUMBER/KEY, and its key the container's ID, as
// CRI, ctr and nerdctl have it.
func (s *Snapshotter) process(ctx context.Context, name string) (runs node.Process, err error) {
	parts := strings.SplitN(name, "/", 3)
	if s.containerd == nil || len(parts) != 3 {
		return runs, fmt.Errorf("containerd is not asked")
	}
	ctx, cancel := context.WithTimeout(namespaces.WithNamespace(ctx, parts[0]), askWithin)
	defer cancel()
	got, err := containersapi.NewContainersClient(s.containerd).Get(ctx, &containersapi.GetContainerRequest{ID: parts[2]})
	if err != nil {
		return runs, fmt.Errorf("ask containerd for container %s: %w", parts[2], err)
	}
	c := got.GetContainer()
	if c.GetSnapshotKey() != parts[2] {
		return runs, fmt.Errorf("container %s is on snapshot %s", parts[2], c.GetSnapshotKey())
	}
	var spec struct {
		Process struct {
			Args []string `json:"args"`
		} `json:"process"`
		Linux struct {
			CgroupsPath string `json:"cgroupsPath"`
			Resources   struct {
				Memory struct {
					Limit int64 `json:"limit"` // bytes; less than 1: none
				} `json:"memory"`
				Unified map[string]string `json:"unified"` // files of cgroup v2
			} `json:"resources"`
		} `json:"linux"`
	}
	if err := json.Unmarshal(c.GetSpec().GetValue(), &spec); err != nil {
		return runs, fmt.Errorf("the specification of container %s: %w", parts[2], err)
	}
	runs.Args = spec.Process.Args
	if l := spec.Linux; l.CgroupsPath != "" {
		runs.Cgroup, runs.Memory = kernel.CgroupOf(l.CgroupsPath), max(0, l.Resources.Memory.Limit)
		for _, file := range []string{"memory.high", "memory.max"} {
			if n, err := strconv.ParseInt(l.Resources.Unified[file], 10, 64); err == nil && n > 0 && (runs.Memory == 0 || n < runs.Memory) {
				runs.Memory = n
			}
		}
	}
	return runs, nil
}
