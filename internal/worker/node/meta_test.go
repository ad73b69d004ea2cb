package node

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/api"
)

// inflated is an image of so many small files, each of which has the same extended attributes: they travel once,
// and take 88 kB of the metadata image for each file.
func inflated(t *testing.T, count int) *fakeImage {
	t.Helper()
	f := files{}
	for i := range count {
		f[fmt.Sprintf("f%04d", i)] = fmt.Sprint("file ", i)
	}
	var set []toc.Xattr
	for i := range 400 {
		set = append(set, toc.Xattr{Name: fmt.Sprintf("user.%03d", i), Value: make([]byte, 600)})
	}
	m := newFakeImage(t, f).Change(t, func(x *toc.TOC) {
		x.Xattrs = [][]toc.Xattr{nil, set}
		for i := range x.Inodes {
			x.Inodes[i].Xattrs = 1
		}
	})
	if len(m.TOC) > 200_000 {
		t.Fatalf("the TOC has %d bytes", len(m.TOC))
	}
	return m
}

// What the metadata of an image would take here is bounded by what its files hold.
func TestMetadataIsBounded(t *testing.T) {
	s := newFakeServer(t)
	h := newHost(t)
	m := inflated(t, 1000)
	_, err := h.pull(s.Serve("app:1", m), api.Complete)
	if codeOfErr(err) != api.CodeUnsupported || !strings.Contains(err.Error(), "names and attributes") {
		t.Errorf("pull: %v", err)
	}
	if _, err := os.Stat(h.dir(m)); err == nil {
		t.Error("it was begun")
	}
	h.mustPull(s.Serve("app:2", newFakeImage(t, some(1, 3, 1000))), api.Complete)
}

// An image whose server gives files attributes that overlayfs would follow is refused: no layer has them.
func TestTrustedAttributesAreRefused(t *testing.T) {
	s := newFakeServer(t)
	h := newHost(t)
	m := newFakeImage(t, some(1, 3, 1000)).Change(t, func(x *toc.TOC) {
		x.Xattrs = [][]toc.Xattr{nil, {{Name: "trusted.overlay.redirect", Value: []byte("/elsewhere")}}}
		for i := range x.Inodes {
			x.Inodes[i].Xattrs = 1
		}
	})
	_, err := h.pull(s.Serve("app:1", m), api.Complete)
	if codeOfErr(err) != api.CodeCorrupt || !strings.Contains(err.Error(), "trusted.overlay.redirect, which no layer gives") {
		t.Errorf("pull: %v", err)
	}
	if _, err := os.Stat(h.dir(m)); err == nil {
		t.Error("it was begun")
	}
}

// The metadata image counts against what is left of the disk, before it is written.
func TestMetadataNeedsRoom(t *testing.T) {
	s := newFakeServer(t)
	h := newHost(t)
	h.smallRoot(32)
	m := inflated(t, 500)
	_, err := h.pull(s.Serve("app:1", m), api.Complete)
	if codeOfErr(err) != api.CodeNoSpace || !strings.Contains(err.Error(), "more bytes") {
		t.Errorf("pull: %v", err)
	}
	if _, err := os.Stat(h.dir(m)); err == nil {
		t.Error("what does not fit was begun")
	}
}
