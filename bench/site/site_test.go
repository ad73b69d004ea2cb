package site

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"
)

// A second run beside a first one leaves it alone, and removes what dead ones
// left, whatever the collector of garbage has done meanwhile.
func TestScratch(t *testing.T) {
	parent := t.TempDir()
	dead := filepath.Join(parent, "run-dead")
	if err := os.MkdirAll(filepath.Join(dead, "worker"), 0o755); err != nil {
		t.Fatal(err)
	}
	first, err := Scratch(parent, "run-")
	if err != nil {
		t.Fatal(err)
	}
	runtime.GC()
	runtime.GC()
	second, err := Scratch(parent, "run-")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{first, second} {
		if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o711 {
			t.Errorf("%s: %v, %v", dir, info, err)
		}
	}
	if _, err := os.Stat(dead); !os.IsNotExist(err) {
		t.Errorf("what a dead run left is there: %v", err)
	}
}

func TestDiskBytes(t *testing.T) {
	dir := t.TempDir()
	data := make([]byte, 1<<20)
	for i := range data {
		data[i] = byte(i * i)
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), data, 0o644); err != nil {
		t.Fatal(err)
	}
	one, err := DiskBytes(dir)
	if err != nil || one < 1<<20 || one > 2<<20 {
		t.Errorf("a file of 1 MiB takes %d bytes, %v", one, err)
	}
	if err := os.Link(filepath.Join(dir, "file"), filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(dir, "file"), 1<<30); err != nil { // a hole
		t.Fatal(err)
	}
	if two, err := DiskBytes(dir); err != nil || two > one+64<<10 {
		t.Errorf("with a link and a hole %d bytes instead of %d, %v", two, one, err)
	}
	if _, err := DiskBytes(filepath.Join(dir, "absent")); err == nil {
		t.Error("what is not there has a size")
	}
}
