package node

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
)

// Serve answers the API on <root>/run/foil.sock until ctx ends. Pulls that run
// when it ends are left where they are: the next daemon goes on with them.
func (n *Node) Serve(ctx context.Context) error {
	path := api.SocketPath(n.opts.Root)
	l, err := listenAt(path)
	if err != nil {
		return err
	}
	if n.opts.Listening != nil {
		n.opts.Listening()
	}
	srv := &http.Server{
		Handler:           api.Handler(n),
		ReadHeaderTimeout: 10 * time.Second,
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	// Event streams end with ctx; give them a moment to say so.
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	if err := srv.Shutdown(stop); err != nil {
		_ = srv.Close()
	}
	<-done
	return nil
}

// listenAt listens on a Unix socket, for root only. The lock on the root is held: a socket
// that is there is a dead daemon's.
func listenAt(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}
