package mounts

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"sync"

	"hydrofoil.dev/foil/internal/kernel"
)

// mostReadAhead is the longest read-ahead of a mount, KiB.
const mostReadAhead = 2048

// Started says that a service is about to be started: the mount is made without
// read-ahead, until end is called. Package start says why.
func (m *Mount) Started() (end func()) {
	m.mu.Lock()
	m.starts++
	first := m.starts == 1
	m.mu.Unlock()
	if first {
		if err := m.setReadAhead(); err != nil {
			m.log.Debug("take a mount's read-ahead", "error", err)
		}
	}
	return sync.OnceFunc(func() {
		m.mu.Lock()
		m.starts--
		last := m.starts == 0
		m.mu.Unlock()
		if last {
			m.giveBack()
		}
	})
}

// RestoreReadAhead gives the mount the read-ahead back that an earlier daemon took,
// unless a service is being started.
func (m *Mount) RestoreReadAhead() {
	if _, err := os.Stat(m.path(readAheadName)); errors.Is(err, fs.ErrNotExist) {
		return
	}
	m.giveBack()
}

// giveBack does not look for the file that notes that there is no read-ahead: while
// starts come and go side by side, another one may just have removed it.
func (m *Mount) giveBack() {
	if err := m.setReadAhead(); err != nil && !errors.Is(err, fs.ErrNotExist) { // it is not mounted any more
		m.log.Warn("give a mount its read-ahead back: large files are read slowly", "error", err)
	}
}

// setReadAhead gives the mount the read-ahead that it should have now. What
// that is may change while it is written: whoever writes looks again afterwards, so
// that what was written last is right.
func (m *Mount) setReadAhead() error {
	for {
		file, kib := m.wantedReadAhead()
		if file == "" {
			return nil
		}
		if err := m.writeReadAhead(file, kib); err != nil {
			return err
		}
		if f, k := m.wantedReadAhead(); f == file && k == kib {
			return nil
		}
	}
}

func (m *Mount) writeReadAhead(file string, kib int) error {
	if kib == 0 {
		// Before, so that it is never forgotten.
		if err := os.WriteFile(m.path(readAheadName), []byte(file), 0o600); err != nil {
			return err
		}
		return kernel.SetReadAhead(file, kib)
	}
	if err := kernel.SetReadAhead(file, kib); err != nil {
		return err
	}
	if err := os.Remove(m.path(readAheadName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// wantedReadAhead returns the file that sets the read-ahead of the mount, and what it
// should be, KiB; no file: it cannot be set.
func (m *Mount) wantedReadAhead() (file string, kib int) {
	m.mu.Lock()
	direct, starts := m.direct, m.starts > 0
	if m.mounted {
		file = m.readAhead
	}
	m.mu.Unlock()
	switch {
	case file == "" || starts:
		return file, 0
	case !direct:
		return file, kernel.DefaultReadAhead
	}
	disk, err := kernel.DiskReadAhead(m.opts.Root)
	if err != nil {
		m.log.Debug("give a mount the read-ahead of its disk", "error", err)
	}
	return file, min(max(kernel.DefaultReadAhead, disk), mostReadAhead)
}

// foundReadAhead finds the file that sets the read-ahead of a mount that an earlier
// daemon made. One of an older version left it only while there was none.
func (m *Mount) foundReadAhead() string {
	for _, name := range []string{bdiName, readAheadName} {
		if file, err := os.ReadFile(m.path(name)); err == nil {
			return strings.TrimSpace(string(file))
		}
	}
	return ""
}
