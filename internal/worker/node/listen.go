package node

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/worker/keeper"
)

// Listen listens on a Unix socket at which gRPC is spoken, for root only. The socket
// outlives the daemon: while none runs, the keeper answers who connects there, and what
// clients say waits for the next one. This one has what waits from the last. It is
// called once, when all is ready to be served.
//
// The keeper holds a socket only after somebody has connected to it: on a host without
// containerd a daemon that ends leaves nothing.
func (n *Node) Listen(ctx context.Context, path string) (net.Listener, error) {
	waiting, err := n.keeper.Take(ctx)
	if err != nil {
		// A keeper of an earlier version does not answer.
		n.log.Debug("nobody waits for this daemon", "error", err)
	}
	l := &listener{n: n, name: socketName(path)}
	for name, list := range waiting {
		for _, f := range list {
			if c, err := net.FileConn(f); err == nil && name == l.name {
				l.first = append(l.first, c)
			} else if err == nil {
				_ = c.Close()
			}
			_ = f.Close()
		}
	}
	if f := n.sockets[l.name]; f != nil {
		delete(n.sockets, l.name)
		if l.Listener, err = net.FileListener(f); err == nil {
			l.keep.Do(l.put)
		}
		_ = f.Close()
	} else {
		l.Listener, err = listenAt(path)
		l.name = socketName(path)
	}
	n.DropSockets(ctx)
	if err != nil {
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	return l, nil
}

// DropSockets forgets sockets at which nobody listens any more.
func (n *Node) DropSockets(ctx context.Context) {
	for name, f := range n.sockets {
		if err := n.holders().Drop(ctx, name); err != nil {
			n.log.Warn("take a socket from the keeper", "name", name, "error", err)
		}
		_ = f.Close()
	}
	n.sockets = nil
}

// keepListening takes the listening sockets from what an earlier daemon left, and has the
// keeper answer there until this one does.
func (n *Node) keepListening(ctx context.Context, held map[string]*os.File) {
	n.sockets = make(map[string]*os.File)
	for name, f := range held {
		if !strings.HasPrefix(name, keeper.ListenPrefix) {
			continue
		}
		delete(held, name)
		n.sockets[name] = f
		n.answered.Store(true)
		// If the service manager had it, this keeper has it not.
		if err := n.holders().Put(ctx, name, f); err != nil {
			n.log.Warn("containerd's calls fail until the daemon is ready", "error", err)
		}
	}
	if len(n.sockets) > 0 {
		if err := n.keeper.Mind(ctx); err != nil {
			n.log.Debug("nobody answers until the daemon is ready", "error", err)
		}
	}
}

// socketName is the name of a listening socket at the keeper. It names the file of the
// socket: one that was removed is another. Empty when there is none.
func socketName(path string) string {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return ""
	}
	return fmt.Sprintf("%s%x-%d", keeper.ListenPrefix, st.Dev, st.Ino)
}

// listener is one that the keeper has, too.
type listener struct {
	net.Listener
	n    *Node
	name string
	keep sync.Once

	mu    sync.Mutex
	first []net.Conn // accepted by the keeper; guarded by mu
}

// Accept returns what waited for this daemon first.
func (l *listener) Accept() (net.Conn, error) {
	l.mu.Lock()
	if len(l.first) > 0 {
		c := l.first[0]
		l.first = l.first[1:]
		l.mu.Unlock()
		return c, nil
	}
	l.mu.Unlock()
	c, err := l.Listener.Accept()
	if err == nil {
		l.keep.Do(l.put)
	}
	return c, err
}

// put gives the socket to the keeper, which answers when this daemon is gone.
func (l *listener) put() {
	f, err := l.Listener.(*net.UnixListener).File()
	if err == nil {
		l.n.answered.Store(true)
		err = l.n.holders().Put(l.n.ctx, l.name, f) // f is open until the daemon ends, to be put again
	}
	if err != nil {
		l.n.log.Warn("the daemon's socket ends with it: while it restarts, containerd's calls fail", "error", err)
	}
}

// Close has the keeper answer who connects from now on.
func (l *listener) Close() error {
	l.Listener.(*net.UnixListener).SetUnlinkOnClose(!l.n.answered.Load())
	if l.n.answered.Load() {
		if err := l.n.keeper.Mind(context.WithoutCancel(l.n.ctx)); err != nil {
			l.n.log.Debug("nobody answers until the next daemon is ready", "error", err)
		}
	}
	return l.Listener.Close()
}
