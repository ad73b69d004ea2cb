package install

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	namespacesapi "github.com/containerd/containerd/api/services/namespaces/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/pelletier/go-toml/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"hydrofoil.dev/foil/deploy"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/containerd"
)

// ErrInUse says that containers of before still have snapshots of the daemon's. New ones have not.
var ErrInUse = errors.New("containers still use it")

// Undo undoes Install, in two steps. Without the snapshotter by which a container was made
// containerd cannot remove it. So while there is one, containerd and the daemon keep knowing each
// other, no new container is made that way, and Undo returns ErrInUse: call it again when they have
// ended, as they do by `kubectl drain`. What images took stays in Root.
func Undo(ctx context.Context, o Options) error {
	_, ours, err := unit.ours()
	if err != nil {
		return err
	}
	if err := undoContainerd(ctx, o); err != nil {
		return err
	}
	if !ours {
		o.log().Info("nothing to undo of the daemon", "file", unit.path)
		return nil
	}
	if _, err := call(ctx, "systemctl", "disable", "--now", containerd.Unit); err != nil {
		return err
	}
	for _, f := range []file{unit, settings(nil)} {
		removed, err := f.remove()
		if err != nil {
			return err
		}
		if removed {
			o.log().Info("removed", "file", f.path)
		}
	}
	if err := os.Remove(program(nil).path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := daemonStamp.remove(); err != nil {
		return err
	}
	_, err = call(ctx, "systemctl", "daemon-reload")
	return err
}

// undoContainerd has containerd forget the daemon, or make nothing new by it.
func undoContainerd(ctx context.Context, o Options) error {
	_, there, err := dropIn.ours()
	if err != nil {
		return err
	}
	if there {
		if err := retire(ctx, o); err != nil {
			return err
		}
		config, err := os.ReadFile(containerdFile)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if without := dropImport(config, dropIn.path); len(without) != len(config) {
			if err := replace(containerdFile, without); err != nil {
				return err
			}
		}
		if err := os.Remove(dropIn.path); err != nil {
			return err
		}
		o.log().Info("removed", "file", dropIn.path)
	}
	if !containerdStamp.exists() {
		return nil
	}
	if err := restart(ctx); err != nil {
		return err
	}
	return containerdStamp.remove()
}

// retire has containerd make no new container by the daemon, and returns ErrInUse while old ones are there.
func retire(ctx context.Context, o Options) error {
	only, err := proxyOnly(deploy.Containerd2)
	if err != nil {
		return err
	}
	retired := file{path: dropIn.path, text: only, mode: dropIn.mode}
	if _, err := retired.put(); err != nil {
		return err
	}
	if err := reread(ctx, o, "containerd makes no new container by it", retired, false); err != nil {
		return err
	}
	// Their layers were never in containerd's store: a container of such an image could not be made by
	// another snapshotter. The kubelet pulls it again.
	if err := forgetImages(ctx, o); err != nil {
		return fmt.Errorf("have containerd forget images that came lazily: %w", err)
	}
	users, err := containers(ctx)
	if err != nil {
		return fmt.Errorf("ask containerd which containers use the daemon: %w", err)
	}
	if users > 0 {
		return fmt.Errorf("%w: %d snapshots; new ones do not. Drain this node, then undo again", ErrInUse, users)
	}
	return nil
}

// proxyOnly is a configuration of containerd's without all but the snapshotter itself: containers
// of before can be removed.
func proxyOnly(config string) ([]byte, error) {
	var all map[string]any
	if err := toml.Unmarshal([]byte(config), &all); err != nil {
		return nil, err
	}
	return toml.Marshal(map[string]any{"version": all["version"], "proxy_plugins": all["proxy_plugins"]})
}

// containers is how many snapshots of the daemon's are a container's, or are being made, by what
// containerd says: the daemon has those still that wait for containerd to collect its garbage.
func containers(ctx context.Context) (n int, err error) {
	conn, err := dial(ContainerdSocket)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	all, err := namespacesapi.NewNamespacesClient(conn).List(ctx, &namespacesapi.ListNamespacesRequest{})
	if err != nil {
		return 0, err
	}
	for _, ns := range all.Namespaces {
		list, err := snapshotsapi.NewSnapshotsClient(conn).List(namespaces.WithNamespace(ctx, ns.Name), &snapshotsapi.ListSnapshotsRequest{Snapshotter: "hydrofoil"})
		for err == nil {
			var page *snapshotsapi.ListSnapshotsResponse
			if page, err = list.Recv(); err == nil {
				for _, s := range page.Info {
					if s.Kind != snapshotsapi.Kind_COMMITTED {
						n++
					}
				}
			}
		}
		if !errors.Is(err, io.EOF) {
			return 0, err
		}
	}
	return n, nil
}

func dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// forgetImages has containerd remove the images that the worker has.
func forgetImages(ctx context.Context, o Options) error {
	c := api.Dial(Root)
	defer c.Close()
	list, err := c.Images(ctx)
	if err != nil {
		return err
	}
	conn, err := dial(ContainerdSocket)
	if err != nil {
		return err
	}
	defer conn.Close()
	images := cri.NewImageServiceClient(conn)
	for _, img := range list {
		names := []string{img.Ref}
		// Of a name with tag and digest, CRI knows the one and the other.
		if name, digest, ok := strings.Cut(img.Ref, "@"); ok && strings.LastIndexByte(name, ':') > strings.LastIndexByte(name, '/') {
			names = append(names, name, name[:strings.LastIndexByte(name, ':')]+"@"+digest)
		}
		for _, name := range slices.Backward(names) {
			if _, err := images.RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: name}}); err != nil {
				return err
			}
		}
		o.log().Info("containerd has forgotten an image that came lazily", "image", img.Ref)
	}
	return nil
}
