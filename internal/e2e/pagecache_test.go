package e2e

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/picture"
)

// cached returns the pages of each content of an image that are in the page cache of
// its mount.
func cached(t *testing.T, img *picture.Image, mnt string) map[string]bool {
	t.Helper()
	pages := map[string]bool{}
	first := map[int32]string{} // of each content, the first path that has it
	byPath := map[string]int32{}
	img.TOC.Walk(func(path string, inode int) {
		c := img.TOC.Inodes[inode].Content
		byPath[path] = c
		if first[c] == "" {
			first[c] = path
		}
	})
	err := filepath.WalkDir(mnt, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		st, err := f.Stat()
		if err != nil || st.Size() == 0 {
			return err
		}
		m, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Munmap(m) }()
		in := make([]byte, trace.Pages(st.Size()))
		if err := mincore(m, in); err != nil {
			return err
		}
		content := byPath[strings.TrimPrefix(path, mnt)]
		for i, b := range in {
			if b&1 != 0 {
				pages[fmt.Sprintf("%s %d", first[content], i)] = true
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return pages
}

// dropped is how often the page cache of this machine was dropped.
func dropped(t *testing.T) (times int) {
	t.Helper()
	b, err := os.ReadFile("/proc/vmstat")
	if err != nil {
		t.Fatal(err)
	}
	_, after, ok := strings.Cut(string(b), "\ndrop_pagecache ")
	if _, err := fmt.Sscan(after, &times); !ok || err != nil {
		t.Skipf("skip: the kernel does not say whether somebody drops the page cache: %v", err)
	}
	return times
}

// withDropped returns the pages that are in the page cache. If some of those that a trace has are
// not, and somebody has dropped the page cache since it was so many times, they were.
func withDropped(t *testing.T, times int, cached, traced map[string]bool) map[string]bool {
	t.Helper()
	lacks := func() bool {
		for p := range traced {
			if !cached[p] {
				return true
			}
		}
		return false
	}
	if !lacks() {
		return cached
	}
	// The kernel counts when it is done.
	for range 100 {
		if dropped(t) != times {
			t.Log("somebody has dropped the page cache: whether pages were read that the trace has, is not seen")
			all := maps.Clone(cached)
			maps.Copy(all, traced)
			return all
		}
		time.Sleep(50 * time.Millisecond)
	}
	return cached
}
