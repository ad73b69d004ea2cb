package node

import (
	"bytes"
	"context"
	"os"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/gate"
)

// memoryStore is a DescriptorStore that outlives the daemons of a test.
type memoryStore struct {
	mu    sync.Mutex
	files map[string]*os.File
}

func duplicate(f *os.File) (*os.File, error) {
	rc, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	number := -1
	if cerr := rc.Control(func(fd uintptr) { number, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) }); cerr != nil {
		return nil, cerr
	}
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(number), f.Name()), nil
}

func (s *memoryStore) Inherited() map[string]*os.File {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make(map[string]*os.File)
	for name, f := range s.files {
		if d, err := duplicate(f); err == nil {
			all[name] = d
		}
	}
	return all
}

func (s *memoryStore) Put(_ context.Context, name string, f *os.File) error {
	d, err := duplicate(f)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.files[name]; old != nil {
		old.Close()
	}
	s.files[name] = d
	return nil
}

func (s *memoryStore) Drop(_ context.Context, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.files[name]; f != nil {
		f.Close()
		delete(s.files, name)
	}
	return nil
}

func (s *memoryStore) names() (list []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name := range s.files {
		list = append(list, name)
	}
	return list
}

// Without a keeper the next daemon goes on with what the store has; a part that
// the store lost is broken, and says so.
func TestDescriptorStore(t *testing.T) {
	for name, test := range map[string]struct {
		lose   bool // the arena's descriptor
		broken bool
	}{"whole": {}, "an arena is missing": {lose: true, broken: true}} {
		t.Run(name, func(t *testing.T) {
			s := newFakeServer(t)
			img := newFakeImage(t, some(1, 30, 100_000))
			ref := s.Serve("app:1", img)
			h := newHost(t)
			h.stop()
			store := &memoryStore{files: make(map[string]*os.File)}
			h.store = store
			t.Cleanup(func() {
				for _, f := range store.names() {
					_ = store.Drop(context.Background(), f)
				}
			})
			s.SetLimit(1)
			h.start()
			h.mustPull(ref, api.Mounted)
			h.stop()
			for _, pid := range h.keepers() {
				if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
			}
			h.endKeeper()
			if test.lose {
				for _, name := range store.names() {
					if name != gate.KeptGroup && name != gate.KeptJournal && name != gate.KeptFUSE {
						_ = store.Drop(t.Context(), name)
					}
				}
			}
			s.SetLimit(-1)
			h.start()
			if got := h.image(ref); (got.State == "broken") != test.broken {
				t.Errorf("after the death of both: %+v", got)
			}
			if test.broken {
				if !bytes.Contains([]byte(h.log.String()), []byte("FileDescriptorStoreMax")) {
					t.Error("the log does not say what to do")
				}
				return
			}
			if h.n.began != beganTakeover {
				t.Errorf("the daemon began: %s", h.n.began)
			}
			h.mustPull(ref, api.Complete)
			h.same(img)
			h.stop()
			if left := store.names(); len(left) > 0 {
				t.Errorf("left in the store: %q", left)
			}
			h.start()
		})
	}
}
