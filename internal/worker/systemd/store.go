package systemd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Store is the manager's store of descriptors for this service
// (FileDescriptorStoreMax, and FDSTORE in the environment, which systemd sets from
// version 254 on): what is put there is open for as long as the service is
// started again, however it ended, and the next process gets it at its start. The
// manager does not say whether it took a descriptor: beyond the unit's limit it
// does not, and its log says so.
//
// Names are those that sd_pid_notify_with_fds(3) allows: at most 255 printable
// ASCII characters, without ':'.
type Store struct {
	inherited map[string]*os.File

	mu   sync.Mutex
	held map[string]bool // guarded by mu: what the manager was given and not told to drop
}

// aboveNumbers is where descriptors go that the manager passed. It passes them
// from 3 on, where the gate's events would have their numbers. With a lower limit
// of open files it is the half of that.
const aboveNumbers = 32768

// OpenStore returns the store and takes from the environment what the manager
// passed to this process. Nil: there is no store. It is called once, before other
// processes are started.
func OpenStore() (*Store, error) {
	pid, count, names := os.Getenv("LISTEN_PID"), os.Getenv("LISTEN_FDS"), os.Getenv("LISTEN_FDNAMES")
	room, notify := os.Getenv("FDSTORE"), os.Getenv("NOTIFY_SOCKET")
	// They are for this process alone.
	for _, name := range []string{"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID"} {
		if err := os.Unsetenv(name); err != nil {
			return nil, err
		}
	}
	if pid != strconv.Itoa(os.Getpid()) {
		count = ""
	}
	if notify == "" || room == "" && count == "" {
		return nil, nil
	}
	s := &Store{inherited: make(map[string]*os.File), held: make(map[string]bool)}
	if count == "" {
		return s, nil
	}
	n, err := strconv.Atoi(count)
	list := strings.Split(names, ":")
	if err != nil || n < 0 || n > 1<<20 || n > 0 && len(list) != n {
		return nil, fmt.Errorf("take descriptors from the service manager: LISTEN_FDS is %q, with %d names", count, len(list))
	}
	const first = 3
	above := aboveNumbers
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err == nil && limit.Cur/2 < aboveNumbers {
		above = int(limit.Cur / 2)
	}
	for i := range n {
		fd := first + i
		moved, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, above)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("take descriptor %d (%s) from the service manager: %w", fd, list[i], err), s.Close())
		}
		_ = unix.Close(fd)
		if old := s.inherited[list[i]]; old != nil {
			_ = old.Close() // the later one replaced it
		}
		s.inherited[list[i]] = os.NewFile(uintptr(moved), list[i])
		s.held[list[i]] = true
	}
	return s, nil
}

// Inherited returns what the store held when this process started, by name. The
// files belong to the caller.
func (s *Store) Inherited() map[string]*os.File {
	if s == nil {
		return nil
	}
	files := s.inherited
	s.inherited = nil
	return files
}

// Close closes what was inherited and not asked for. The manager keeps its own.
func (s *Store) Close() error {
	if s == nil {
		return nil
	}
	var errs []error
	for _, f := range s.inherited {
		errs = append(errs, f.Close())
	}
	s.inherited = nil
	return errors.Join(errs...)
}

// Put gives the manager a duplicate of f's descriptor under a name, in place of
// what had the name, and returns when the manager has read the message.
func (s *Store) Put(ctx context.Context, name string, f *os.File) error {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held[name] {
		// Two of one name would both be passed on.
		if err := s.removeLocked(name); err != nil {
			return err
		}
	}
	s.held[name] = true
	// The manager is not to drop one that polls as hung up: what it is good for is
	// for the next process to say.
	err := withFD(f, func(fd int) error { return send([]byte("FDSTORE=1\nFDPOLL=0\nFDNAME="+name), fd) })
	if err == nil {
		err = barrier(ctx)
	}
	if err != nil {
		return fmt.Errorf("put %s into the service manager's store: %w", name, err)
	}
	return nil
}

// Drop takes a name from the store; one that is not there is no error.
func (s *Store) Drop(_ context.Context, name string) error {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.held[name] {
		return nil
	}
	return s.removeLocked(name)
}

func (s *Store) removeLocked(name string) error {
	if err := send([]byte("FDSTOREREMOVE=1\nFDNAME=" + name)); err != nil {
		return fmt.Errorf("take %s from the service manager's store: %w", name, err)
	}
	delete(s.held, name)
	return nil
}

func withFD(f *os.File, fn func(fd int) error) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var ferr error
	if err := rc.Control(func(fd uintptr) { ferr = fn(int(fd)) }); err != nil {
		return err
	}
	return ferr
}

// send sends one message with descriptors.
func send(message []byte, fds ...int) error {
	path, err := address()
	if err != nil {
		return err
	}
	// Package net has no way to send descriptors from a connected datagram socket.
	c, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(c)
	if err := unix.SetsockoptTimeval(c, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Sec: int64(patience / time.Second)}); err != nil {
		return err
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	return unix.Sendmsg(c, message, rights, &unix.SockaddrUnix{Name: path}, unix.MSG_NOSIGNAL)
}

// patience is how long the manager may take to read its messages. It takes far
// less than a millisecond unless it is stopped.
const patience = 5 * time.Second

// barrier returns when the manager has read what was sent before: it closes the
// descriptor that comes with a message when it has handled it.
func barrier(ctx context.Context) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	err = withFD(w, func(fd int) error { return send([]byte("BARRIER=1"), fd) })
	if err := errors.Join(err, w.Close()); err != nil {
		return err
	}
	if err := r.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = r.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := r.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
		return errors.New("the service manager does not read its messages")
	}
	return ctx.Err()
}
