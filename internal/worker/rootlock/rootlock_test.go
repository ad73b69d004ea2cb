package rootlock

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"hydrofoil.dev/foil/internal/worker/api"
)

// One daemon has a root, and the lock's file says which. Nobody takes it for one that hangs.
func TestTake(t *testing.T) {
	root := t.TempDir()
	l, err := Take(root, slog.Default())
	if err != nil {
		t.Fatal(err)
	}
	_, err = Take(root, slog.Default())
	if typed := (*api.Error)(nil); !errors.As(err, &typed) || typed.Code != api.CodeConflict {
		t.Errorf("taken twice: %v", err)
	}
	h, err := read(filepath.Join(root, name))
	if err != nil || h.PID != os.Getpid() || !h.lives() || h.hangs() || Hanging(root) != "" {
		t.Errorf("%+v, %v", h, err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if l, err = Take(root, slog.Default()); err != nil {
		t.Fatalf("given back: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

// What a file says of another boot, of a process that has another's number by now, or that nobody wrote, is nobody.
func TestNobody(t *testing.T) {
	root := t.TempDir()
	l, err := Take(root, slog.Default())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	path := filepath.Join(root, name)
	own, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func(h *holder){
		"another boot":    func(h *holder) { h.Boot = "00000000-0000-0000-0000-000000000000" },
		"another process": func(h *holder) { h.Start++ },
		"none":            func(h *holder) { h.PID = 0 },
	} {
		var h holder
		if err := json.Unmarshal(own, &h); err != nil {
			t.Fatal(err)
		}
		change(&h)
		if h.lives() || h.hangs() {
			t.Errorf("%s: lives %v, hangs %v", what, h.lives(), h.hangs())
		}
	}
	for _, b := range [][]byte{nil, own[:len(own)/2], []byte("[]"), bytes.Repeat([]byte("x"), 4096)} {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if why := Hanging(root); why != "" {
			t.Errorf("%q: %s", b, why)
		}
	}
}
