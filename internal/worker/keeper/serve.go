package keeper

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ErrRunning is returned by Serve when another keeper has the socket.
var ErrRunning = errors.New("another keeper runs on this socket")

// lookEvery is how often a keeper looks whether anybody can reach it.
const lookEvery = 30 * time.Second

// Serve is the keeper: it listens on socket, calls ready, and holds
// descriptors until it is told to stop (by a client, or by the end of ctx) and holds nothing. An end
// of ctx while something is held is remembered until nothing is.
//
// It also ends when nobody can reach it any more, because its socket is gone, with the root that it was for, and no
// file that it holds is open anywhere else: no mount depends on it.
func Serve(ctx context.Context, socket string, ready func()) error {
	return serve(ctx, socket, ready, lookEvery)
}

func serve(ctx context.Context, socket string, ready func(), every time.Duration) error {
	lock, err := os.OpenFile(socket+".lock", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("start keeper: %w", err)
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("start keeper on %s: %w", socket, ErrRunning)
		}
		return fmt.Errorf("start keeper: lock %s: %w", lock.Name(), err)
	}
	l, err := listen(socket)
	if err != nil {
		return fmt.Errorf("start keeper: %w", err)
	}
	s := &store{fds: map[string]int{}, conns: map[*net.UnixConn]bool{}, l: l, socket: socket, patience: 2 * every}
	if s.file, err = os.Lstat(socket); err != nil {
		return errors.Join(fmt.Errorf("start keeper: %w", err), l.Close())
	}
	stop := context.AfterFunc(ctx, s.finish)
	defer stop()
	look := time.NewTicker(every)
	defer look.Stop()
	over := make(chan struct{})
	defer close(over)
	go func() {
		for {
			select {
			case <-look.C:
				s.endIfLost()
			case <-over:
				return
			}
		}
	}()
	if ready != nil {
		ready()
	}
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			s.mu.Lock()
			done := s.done
			for c := range s.conns {
				c.Close()
			}
			s.mu.Unlock()
			s.wg.Wait()
			if done {
				return nil
			}
			s.closeFDs()
			return fmt.Errorf("keeper on %s: %w", socket, err)
		}
		s.mu.Lock()
		s.conns[c] = true
		s.mu.Unlock()
		s.wg.Go(func() {
			s.talk(c)
			s.mu.Lock()
			delete(s.conns, c)
			s.mu.Unlock()
			c.Close()
		})
	}
}

// listen binds the socket under another name first, so that it never exists
// with other permissions than its own.
func listen(socket string) (*net.UnixListener, error) {
	tmp := socket + ".new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Net: "unixpacket", Name: tmp})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	if err = os.Chmod(tmp, 0o600); err == nil {
		err = os.Rename(tmp, socket)
	}
	if err != nil {
		l.Close()
		return nil, errors.Join(err, os.Remove(tmp))
	}
	return l, nil
}

// store is what a keeper holds.
type store struct {
	l      *net.UnixListener
	socket string
	file   os.FileInfo    // of the socket
	wg     sync.WaitGroup // connections
	// patience is how long listening sockets are minded.
	patience time.Duration

	mu    sync.Mutex
	fds   map[string]int
	conns map[*net.UnixConn]bool
	owner *net.UnixConn // nil: nobody
	told  bool          // to stop
	done  bool          // the listener was closed on purpose
	// minder is nil while a daemon listens itself.
	minder *minder
}

// finish stops the keeper as soon as it holds nothing.
func (s *store) finish() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.told = true
	s.maybeStopLocked()
}

func (s *store) maybeStopLocked() {
	if s.told && !s.done && len(s.fds) == 0 {
		s.done = true
		os.Remove(s.socket)
		s.l.Close()
	}
}

// endIfLost stops a keeper that nobody can reach and nothing depends on.
func (s *store) endIfLost() {
	now, err := os.Lstat(s.socket)
	if err == nil && os.SameFile(now, s.file) || err != nil && !errors.Is(err, os.ErrNotExist) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.done || len(s.conns) > 0 {
		return
	}
	for _, fd := range s.fds {
		if openElsewhere(fd) {
			return
		}
	}
	s.done = true // the name may be another keeper's
	s.l.Close()
}

// openElsewhere reports whether a regular file is open other than by fd: a lease on it says so.
func openElsewhere(fd int) bool {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return false
	}
	_, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_WRLCK)
	if err == nil {
		unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_UNLCK) //nolint:errcheck // it is closed next
	}
	return errors.Is(err, unix.EAGAIN)
}

func (s *store) closeFDs() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, fd := range s.fds {
		unix.Close(fd)
	}
	clear(s.fds)
}

// talk serves one connection until it ends.
func (s *store) talk(c *net.UnixConn) {
	cred, err := peer(c)
	if err != nil || cred.Uid != 0 && int(cred.Uid) != os.Geteuid() {
		return
	}
	p := newPackets(c)
	defer func() {
		s.mu.Lock()
		if s.owner == c {
			s.owner = nil
			s.mindLocked()
		}
		s.mu.Unlock()
	}()
	for {
		m, fds, err := p.receive()
		var unknown unknownKind
		switch {
		case err == nil:
			err = s.serve(p, m, fds)
		case errors.As(err, &unknown):
			err = p.send(failure(codeUnknown, err))
		case errors.Is(err, errTruncated):
			err = p.send(failure(codeFull, err))
		default:
			// Gone, or not a client of ours: an answer may still reach it.
			p.send(failure(codeInvalid, err))
			return
		}
		if err != nil {
			return
		}
	}
}

func failure(c code, err error) message {
	return message{kind: kindError, code: c, text: err.Error()}
}

// serve answers one request. It owns fds. An error ends the connection.
func (s *store) serve(p *packets, m message, fds []int) error {
	defer func() { closeAll(fds) }()
	s.mu.Lock()
	defer s.mu.Unlock()
	if m.kind != kindHello && s.owner != p.c {
		return p.send(failure(codeInvalid, errors.New("the first message must be Hello")))
	}
	if want := map[kind]int{kindPut: 1}[m.kind]; len(fds) != want {
		return p.send(failure(codeInvalid, fmt.Errorf("message of type %d with %d descriptors, want %d", m.kind, len(fds), want)))
	}
	switch m.kind {
	case kindHello:
		if m.highest < minVersion || m.lowest > Version {
			return p.send(failure(codeVersion, fmt.Errorf("keeper speaks versions %d to %d, asked for %d to %d", minVersion, Version, m.lowest, m.highest)))
		}
		if s.owner != nil && s.owner != p.c {
			return p.send(failure(codeBusy, errors.New("another daemon uses this keeper")))
		}
		s.owner = p.c
		return p.send(message{kind: kindWelcome, version: min(m.highest, Version), pid: uint32(os.Getpid()), held: uint32(len(s.fds))})
	case kindPut:
		if old, ok := s.fds[m.name]; ok {
			unix.Close(old)
		}
		s.fds[m.name] = fds[0]
		fds = nil
		return p.send(message{kind: kindOK})
	case kindDrop:
		if fd, ok := s.fds[m.name]; ok {
			unix.Close(fd)
			delete(s.fds, m.name)
		}
		// The end comes before the answer: who has it finds no socket. The
		// connection is closed only after s.mu is free again.
		s.maybeStopLocked()
		return p.send(message{kind: kindOK})
	case kindAll:
		return s.sendAllLocked(p)
	case kindMind:
		s.mindLocked()
		return p.send(message{kind: kindOK})
	case kindTake:
		return s.takeLocked(p)
	case kindStop:
		if n := len(s.fds); n > 0 {
			return p.send(failure(codeNotEmpty, fmt.Errorf("the keeper holds %d descriptors", n)))
		}
		s.told = true
		s.maybeStopLocked()
		return p.send(message{kind: kindOK})
	default:
		return p.send(failure(codeInvalid, fmt.Errorf("message of type %d is not a request", m.kind)))
	}
}

func (s *store) sendAllLocked(p *packets) error {
	names := make([]string, 0, len(s.fds))
	for n := range s.fds {
		names = append(names, n)
	}
	slices.Sort(names)
	for {
		// 253 names of 255 bytes just fit in one message.
		now := names[:min(len(names), maxFDs)]
		names = names[len(now):]
		fds := make([]int, len(now))
		for i, n := range now {
			fds[i] = s.fds[n]
		}
		if err := p.send(message{kind: kindItems, more: len(names) > 0, names: now}, fds...); err != nil {
			return err
		}
		if len(names) == 0 {
			return nil
		}
	}
}

// Detach makes this process what a keeper should be: no file, terminal,
// directory or log of anybody's, the last one that the kernel kills when memory runs out,
// and small. The session is the starter's to make (setsid before exec).
func Detach() error {
	null, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("detach keeper: open %s: %w", os.DevNull, err)
	}
	defer unix.Close(null)
	for fd := range 3 {
		if err := unix.Dup3(null, fd, 0); err != nil {
			return fmt.Errorf("detach keeper: %w", err)
		}
	}
	if err := unix.Chdir("/"); err != nil {
		return fmt.Errorf("detach keeper: %w", err)
	}
	// Not allowed in every container; then it is as mortal as the daemon.
	os.WriteFile("/proc/self/oom_score_adj", []byte("-999"), 0)
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(20)
	debug.FreeOSMemory()
	return nil
}
