package node

import (
	"context"
	"fmt"
	"path"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/changes"
	"hydrofoil.dev/foil/internal/worker/commit"
	"hydrofoil.dev/foil/internal/worker/containers"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/images"
	"hydrofoil.dev/foil/internal/worker/pull"
)

// Commit implements api.Service.
func (n *Node) Commit(ctx context.Context, id string, req api.CommitRequest) (_ *api.CommitReport, err error) {
	began := time.Now()
	ctx, leave, err := n.during(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	ref, err := api.NormalRef(req.Ref)
	if err != nil {
		return nil, err
	}
	c, r, tree, done, err := n.containers.Read(id)
	if err != nil {
		return nil, err
	}
	defer done()
	img, err := n.imageOf(c)
	if err != nil {
		return nil, err
	}
	if n.pulls.Running(ref) {
		return nil, api.Errorf(api.CodeConflict, "image %s is being pulled: choose another name, or wait", ref)
	}
	var paused float64
	resume := func() error { return nil }
	if req.Pause {
		goOn, err := n.containers.Pause(ctx, id)
		if err != nil {
			return nil, err
		}
		since := time.Now()
		resume = sync.OnceValue(func() error {
			stood, err := goOn()
			if stood {
				paused = time.Since(since).Seconds()
			}
			return err
		})
	}
	var resumed error
	o := commit.Options{Root: n.opts.Root, Store: n.store, Images: n.images, Groups: n.opts.Groups, At: n.opts.crash}
	report, err := commit.Commit(ctx, o, commit.Base{Image: img, Rootfs: r}, tree, req, func() { resumed = resume() })
	if rerr := resume(); rerr != nil {
		resumed = rerr
	}
	if err != nil {
		return nil, pull.AsError(fmt.Errorf("commit container %s: %w", id, err))
	}
	n.pulls.Forget(ref)
	n.completed(ref, credentials.Credential{}) // its proof needs nobody, but its base's
	if resumed != nil {
		return nil, fmt.Errorf("image %s is made, but container %s stands still: %w; `runc --root %s resume %s` has it go on", ref, id, resumed, n.opts.Root+"/run/runc", id)
	}
	report.Paused, report.Took = paused, time.Since(began).Seconds()
	n.log.Info("container committed", "id", id, "ref", ref, "digest", report.Digest, "entries", report.Entries, "bytes", report.FileBytes, "took", report.Took)
	return report, nil
}

// imageOf returns the image that a container was made of: its name may mean another one by now.
func (n *Node) imageOf(c containers.Container) (*images.Image, error) {
	for _, img := range n.images.Of(c.On) {
		if img.Digest.String() == c.Digest {
			return img, nil
		}
	}
	return nil, api.Errorf(api.CodeConflict, "the image that container %s was made of, %s, has another digest by now than %s: pull that one by its digest first", c.ID, c.Ref, c.Digest)
}

// Changes implements api.Service.
func (n *Node) Changes(ctx context.Context, id string, emit func(api.Change) error) error {
	ctx, leave, err := n.during(ctx)
	if err != nil {
		return err
	}
	defer leave()
	_, _, tree, done, err := n.containers.Read(id)
	if err != nil {
		return err
	}
	defer done()
	err = tree.Walk(ctx, func(c *changes.Change) error {
		v := api.Change{Kind: string(c.Kind), Path: path.Join("/", c.Path), Opaque: c.Opaque}
		if c.Kind != changes.Deleted {
			v.Type = api.TypeOf(c.Stat.Mode)
		}
		if c.Stat.Mode&unix.S_IFMT == unix.S_IFREG {
			v.Bytes = c.Stat.Size
		}
		return emit(v)
	})
	if err != nil {
		return fmt.Errorf("changes of container %s: %w", id, err)
	}
	return emit(api.Change{Done: true})
}
