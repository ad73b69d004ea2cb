// Package picture shows which pages of an image a service touches: as JSON, as
// tables and maps on a terminal, and as a page of HTML.
package picture

import (
	"fmt"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
)

// Image is an image whose contents have names.
type Image struct {
	Ref string
	TOC *toc.TOC
	// Digest is that of the encoded TOC.
	Digest digest.Digest

	paths []string // by content: the first path that has it
	bytes int64    // of all contents
}

// NewImage decodes the TOC of an image.
func NewImage(ref string, encoded []byte) (*Image, error) {
	t, err := toc.Decode(encoded)
	if err != nil {
		return nil, fmt.Errorf("table of contents of %s: %w", ref, err)
	}
	img := &Image{Ref: ref, TOC: t, Digest: digest.FromBytes(encoded), paths: make([]string, len(t.Contents))}
	t.Walk(func(path string, inode int) {
		if c := t.Inodes[inode].Content; c >= 0 && img.paths[c] == "" {
			img.paths[c] = path
		}
	})
	for i := range t.Contents {
		img.bytes += t.Contents[i].Size
	}
	return img, nil
}

// Touched is the first read of some pages of a file.
type Touched struct {
	Path   string  `json:"path"`
	First  uint32  `json:"first"` // page of 4 KiB
	Pages  uint32  `json:"pages"`
	At     float64 `json:"at"` // seconds since the start of the process
	Waited bool    `json:"waited,omitempty"`
}

// Trace is a trace as people and programs read it.
type Trace struct {
	Ref     string        `json:"ref"`
	ChainID digest.Digest `json:"chain_id"`
	TOC     digest.Digest `json:"toc"`
	Service string        `json:"service"`
	Args    []string      `json:"args"`
	Ready   float64       `json:"ready"` // seconds from the start of the process
	// Files and Pages count what was touched, Bytes those of the pages.
	Files      int       `json:"files"`
	Pages      int64     `json:"pages"`
	Bytes      int64     `json:"bytes"`
	ImageBytes int64     `json:"image_bytes"`
	Touched    []Touched `json:"touched"`
}

// Trace names what a trace touched. Errors: trace.ErrCorrupt, when it is not of
// this image.
func (img *Image) Trace(t *trace.Trace) (*Trace, error) {
	if t.TOC != img.Digest {
		return nil, fmt.Errorf("trace of TOC %s, not %s of %s: pull the image again", t.TOC, img.Digest, img.Ref)
	}
	runs := make([]trace.Run, len(t.Touched))
	for i, touch := range t.Touched {
		runs[i] = touch.Run
	}
	if err := trace.Check(runs, img.TOC); err != nil {
		return nil, err
	}
	v := &Trace{
		Ref: img.Ref, ChainID: t.ChainID, TOC: t.TOC, Service: trace.Service(t.Args), Args: t.Args,
		Ready: t.Ready.Seconds(), ImageBytes: img.bytes, Touched: make([]Touched, len(runs)),
	}
	files := make(map[uint32]bool)
	for i, r := range runs {
		files[r.Content] = true
		v.Pages += int64(r.Blocks)
		_, n := r.Range(img.TOC.Contents[r.Content].Size)
		v.Bytes += n
		v.Touched[i] = Touched{Path: img.paths[r.Content], First: r.First, Pages: r.Blocks,
			At: t.Touched[i].At.Round(time.Microsecond).Seconds(), Waited: t.Touched[i].Waited}
	}
	v.Files = len(files)
	return v, nil
}
