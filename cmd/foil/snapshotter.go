package main

import (
	"context"
	"errors"
	"path/filepath"

	"golang.org/x/sync/errgroup"

	"hydrofoil.dev/foil/internal/worker/node"
	"hydrofoil.dev/foil/internal/worker/snapshotter"
)

// serveNode answers foil's own commands, and containerd on a socket, until ctx
// ends. Without a socket given, a snapshotter that cannot be opened does not keep
// the daemon from its other work.
func serveNode(ctx context.Context, n *node.Node, opts node.Options, socket string) error {
	if socket == "off" {
		n.StartEviction()
		return n.Serve(ctx)
	}
	s, err := snapshotter.Open(ctx, snapshotter.Options{
		Dir:    filepath.Join(opts.Root, "snapshotter"),
		Node:   n,
		Logger: opts.Logger,
	})
	switch {
	case err != nil && socket == "default":
		opts.Logger.Error("containerd is not served, and nothing is evicted; --snapshotter-socket off says that it need not be", "error", err)
		return n.Serve(ctx)
	case err != nil:
		return err
	case socket == "default":
		socket = snapshotter.SocketPath(opts.Root)
	}
	// Not before the snapshots that are there have taken hold of their images.
	n.StartEviction()
	both, ctx := errgroup.WithContext(ctx)
	both.Go(func() error { return n.Serve(ctx) })
	both.Go(func() error { return s.Serve(ctx, socket) })
	return errors.Join(both.Wait(), s.Close())
}
