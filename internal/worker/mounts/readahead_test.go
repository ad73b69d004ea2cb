package mounts

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/worker/api"
)

// found returns a mount that an earlier daemon made, whose directory has these files.
// Each names the file that sets its read-ahead, which is returned as well. It is a
// plain file: what is written to it is what the kernel would be told.
func found(t *testing.T, files ...string) (m *Mount, bdi string) {
	t.Helper()
	dir := t.TempDir()
	bdi = filepath.Join(t.TempDir(), "read_ahead_kb")
	if err := os.WriteFile(bdi, []byte("128"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(bdi+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m = New(Options{Root: dir, Logger: slog.New(slog.DiscardHandler)}, dir)
	m.Found()
	return m, bdi
}

// wantReadAhead checks what the kernel was told, and what the next daemon is.
func wantReadAhead(t *testing.T, when string, m *Mount, bdi, want string) {
	t.Helper()
	b, err := os.ReadFile(bdi)
	if err != nil || string(b) != want {
		t.Errorf("%s: read-ahead %q, %v; want %q", when, b, err, want)
	}
	_, err = os.Stat(m.path(readAheadName))
	if noted := !errors.Is(err, fs.ErrNotExist); noted != (want == "0") {
		t.Errorf("%s: that there is none is noted: %v", when, noted)
	}
}

func TestReadAheadComesBackAfterTheLastStart(t *testing.T) {
	m, bdi := found(t, bdiName)
	wantReadAhead(t, "at first", m, bdi, "128")
	one := m.Started()
	wantReadAhead(t, "one start", m, bdi, "0")
	other := m.Started()
	wantReadAhead(t, "two starts", m, bdi, "0")
	one()
	one() // once more says nothing
	wantReadAhead(t, "one has ended", m, bdi, "0")
	m.RestoreReadAhead()
	wantReadAhead(t, "one goes on", m, bdi, "0")
	other()
	wantReadAhead(t, "both have ended", m, bdi, "128")
}

func TestReadAheadOfStartsSideBySide(t *testing.T) {
	m, bdi := found(t, bdiName)
	var starts sync.WaitGroup
	for range 16 {
		starts.Go(func() {
			for range 20 {
				m.Started()()
			}
		})
	}
	starts.Wait()
	wantReadAhead(t, "all have ended", m, bdi, "128")
}

// A daemon that dies during a start leaves the mount without read-ahead; the next one
// gives it back.
func TestReadAheadAfterACrash(t *testing.T) {
	for _, c := range []struct {
		name  string
		files []string
	}{
		{"bdi and readahead", []string{bdiName, readAheadName}},
		{"readahead only, of an older version", []string{readAheadName}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, bdi := found(t, c.files...)
			if err := os.WriteFile(bdi, []byte("0"), 0o600); err != nil {
				t.Fatal(err)
			}
			m.RestoreReadAhead()
			wantReadAhead(t, "restored", m, bdi, "128")
		})
	}
}

// What has no file for its read-ahead, or is not mounted, is left alone.
func TestReadAheadThatCannotBeSet(t *testing.T) {
	m, bdi := found(t)
	m.Started()()
	wantReadAhead(t, "no file is known", m, bdi, "128")

	m, bdi = found(t, bdiName)
	m.mounted = false
	end := m.Started()
	wantReadAhead(t, "not mounted", m, bdi, "128")
	end()
	wantReadAhead(t, "not mounted, ended", m, bdi, "128")
}

func TestFound(t *testing.T) {
	for _, c := range []struct {
		files []string
		gated bool
	}{
		{nil, false},
		{[]string{gatedName}, true},
		{[]string{gatedName, bdiName}, true},
	} {
		m, _ := found(t, c.files...)
		if !m.Mounted() || m.Gated() != c.gated || m.Direct() {
			t.Errorf("with %q: mounted %v, gated %v, direct %v", c.files, m.Mounted(), m.Gated(), m.Direct())
		}
	}
}

func TestExplain(t *testing.T) {
	if e, ok := errors.AsType[*api.Error](Explain(unix.ENODEV)); !ok || e.Code != api.CodeUnsupported {
		t.Errorf("a kernel without EROFS: %v", e)
	}
	if err := Explain(unix.EIO); err != unix.EIO {
		t.Errorf("another error: %v", err)
	}
}
