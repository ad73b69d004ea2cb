// Package reread reads configuration files again when they have changed. A file that cannot be
// used keeps what was read before: an administrator who makes a mistake must neither lock all out nor
// let all in.
//
// A change counts with the next Get: when the file is written, replaced, moved or removed. Files are kept open, and it is
// the open file that is looked at: each of these changes its inode, and no path has to be walked, which takes five times as
// long. Only a directory above the file that becomes another one goes unseen so, for lookEvery at most. A path with
// symbolic links in it is walked each time.
package reread

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// lookEvery is how long a path is believed to lead where it did.
const lookEvery = time.Second

// File is a file that is read again. Its fields must not change.
type File[T any] struct {
	Path string
	// Parse makes of its bytes what Get returns.
	Parse func([]byte) (T, error)
	// Failed is called, once for each change, when the file has changed and cannot be used. It may
	// be nil.
	Failed func(error)
	// Changed is called when it has been read again. It may be nil.
	Changed func()

	mu      sync.Mutex
	loaded  bool      // guarded by mu: there is a value
	value   T         // guarded by mu
	version stamp     // guarded by mu: of the file that was looked at last, used or not
	missing bool      // guarded by mu: it was not there then
	open    *os.File  // guarded by mu: the file that was read last; nil: its path is walked each time
	walked  time.Time // guarded by mu: when that was done last
}

// stamp tells versions of a file apart. Files that are replaced have another inode, those that are
// written in place another time of change.
type stamp struct {
	inode   uint64
	size    int64
	changed syscall.Timespec
	written syscall.Timespec
}

// Get returns what the file says now, or, if it cannot be used, what it said before. The error
// is of a file that could never be used.
func (f *File[T]) Get() (T, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.loaded && f.open != nil && time.Since(f.walked) < lookEvery {
		if now, err := lookAt(f.open); err == nil && now == f.version {
			return f.value, nil
		}
	}
	now, err := look(f.Path)
	f.walked = time.Now()
	if f.loaded && err == nil && now == f.version {
		return f.value, nil
	}
	if f.loaded && err != nil && f.missing {
		return f.value, nil
	}
	f.missing = err != nil
	var v T
	if err == nil {
		v, err = f.read()
	}
	again := f.loaded
	f.version = now
	if err == nil {
		f.loaded, f.value = true, v
		if again && f.Changed != nil {
			f.Changed()
		}
		return f.value, nil
	}
	err = fmt.Errorf("%s: %w", f.Path, err)
	if !again {
		return v, err
	}
	if f.Failed != nil {
		f.Failed(err)
	}
	return f.value, nil
}

func (f *File[T]) read() (v T, err error) {
	if f.open != nil {
		_ = f.open.Close() // it was only read
		f.open = nil
	}
	file, err := os.Open(f.Path)
	if err != nil {
		return v, unwrap(err)
	}
	b, err := io.ReadAll(file)
	if direct, walk := filepath.EvalSymlinks(f.Path); err == nil && walk == nil && direct == filepath.Clean(f.Path) {
		f.open = file
	} else {
		_ = file.Close()
	}
	if err != nil {
		return v, unwrap(err)
	}
	return f.Parse(b)
}

// look is asked for requests of a server: os.Stat would take memory each time.
func look(path string) (stamp, error) {
	return stampOf(func(info *syscall.Stat_t) error { return syscall.Stat(path, info) })
}

// lookAt is look of an open file.
func lookAt(file *os.File) (stamp, error) {
	return stampOf(func(info *syscall.Stat_t) error { return syscall.Fstat(int(file.Fd()), info) })
}

func stampOf(stat func(*syscall.Stat_t) error) (stamp, error) {
	var info syscall.Stat_t
	for {
		err := stat(&info)
		if err == nil {
			return stamp{inode: info.Ino, size: info.Size, changed: info.Ctim, written: info.Mtim}, nil
		}
		if !errors.Is(err, syscall.EINTR) {
			return stamp{}, err
		}
	}
}

// unwrap takes the path from an error that will get it anyway.
func unwrap(err error) error {
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		return e.Err
	}
	return err
}
