package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// What rotates the audit log renames it and sends SIGHUP. No line is lost, and where no new file can be made the old one goes on.
func TestAuditRotates(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "audit.jsonl")
	failed := make(chan error, 1)
	a, err := openAudit(nil, path, func(err error) { failed <- err })
	if err != nil {
		t.Fatal(err)
	}
	line := func(n int) string { return fmt.Sprintf("{\"n\":%d}\n", n) }
	write := func(n int) {
		t.Helper()
		if _, err := a.Write([]byte(line(n))); err != nil {
			t.Fatal(err)
		}
	}
	hup := func() {
		t.Helper()
		if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
	}
	write(1)
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	write(2) // before the signal: to the file that it has
	hup()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(path); err == nil {
			break
		} else if !errors.Is(err, fs.ErrNotExist) || time.Now().After(deadline) {
			t.Fatalf("no new file: %v", err)
		}
	}
	write(3)
	if err := os.Rename(dir, dir+".gone"); err != nil {
		t.Fatal(err)
	}
	hup()
	select {
	case err := <-failed:
		if !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("nobody is told that there is no new file")
	}
	write(4)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	first, _ := os.ReadFile(filepath.Join(dir+".gone", "audit.jsonl.1"))
	second, _ := os.ReadFile(filepath.Join(dir+".gone", "audit.jsonl"))
	if got, want := string(first)+string(second), line(1)+line(2)+line(3)+line(4); got != want {
		t.Errorf("all files have %q, want %q", got, want)
	}
	if !bytes.Contains(second, []byte(line(4))) {
		t.Errorf("the new file has %q", second)
	}
}

// - is standard output.
func TestAuditToStandardOutput(t *testing.T) {
	var out bytes.Buffer
	a, err := openAudit(&out, "-", nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Write([]byte("{}\n")); err != nil || out.String() != "{}\n" {
		t.Errorf("%q, %v", out.String(), err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
}
