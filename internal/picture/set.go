package picture

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/trace"
)

// Set is the pages of an image that are to be shown: a startup set, or a trace.
type Set struct {
	Title string   // what it is
	Args  []string // of the service
	Facts []Fact   // what else there is to say
	// Timed says that At of the touches is known; else their order is.
	Timed   bool
	Touched []Touched

	img   *Image
	runs  []trace.Run
	files []File
}

// Fact is one thing to say about a set.
type Fact struct{ Name, Value string }

// File is one file of which pages are in a set.
type File struct {
	Path  string `json:"path"`
	Size  int64  `json:"size"`
	Pages int64  `json:"pages"` // in the set
	Bytes int64  `json:"bytes"` // of these
	// First is the order of its first touch, from 0; At when it was, seconds.
	First int     `json:"first"`
	At    float64 `json:"at,omitempty"`

	content uint32
	touched []bool // by page
}

// OfService makes a set of what a server has of a service. Errors: of the runs,
// when they are not of this image.
func (img *Image) OfService(r *bundle.ServiceReport) (*Set, error) {
	if r.TOC != img.Digest {
		return nil, fmt.Errorf("startup set of TOC %s, not %s of %s", r.TOC, img.Digest, img.Ref)
	}
	runs, rest, err := trace.NextRuns(r.Runs)
	if err != nil {
		return nil, fmt.Errorf("startup set of %s: %w", img.Ref, err)
	}
	if len(rest) > 0 {
		return nil, fmt.Errorf("startup set of %s: %w: %d bytes after its runs", img.Ref, trace.ErrCorrupt, len(rest))
	}
	if err := trace.Check(runs, img.TOC); err != nil {
		return nil, fmt.Errorf("startup set of %s: %w", img.Ref, err)
	}
	s := &Set{Title: "Startup set of " + img.Ref, Args: r.Args, img: img, runs: runs}
	for _, run := range runs {
		s.Touched = append(s.Touched, Touched{Path: img.paths[run.Content], First: run.First, Pages: run.Blocks})
	}
	s.count()
	return s, nil
}

// OfTrace makes a set of a trace.
func (img *Image) OfTrace(t *trace.Trace) (*Set, error) {
	v, err := img.Trace(t)
	if err != nil {
		return nil, err
	}
	s := &Set{Title: "Trace of " + img.Ref, Args: t.Args, Timed: true, Touched: v.Touched, img: img}
	for _, touch := range t.Touched {
		s.runs = append(s.runs, touch.Run)
	}
	s.Facts = []Fact{{"ready after", t.Ready.Round(time.Millisecond).String()}}
	s.count()
	return s, nil
}

// count fills in files, those with most pages first.
func (s *Set) count() {
	byContent := make(map[uint32]int)
	for i, r := range s.runs {
		size := s.img.TOC.Contents[r.Content].Size
		k, ok := byContent[r.Content]
		if !ok {
			k = len(s.files)
			byContent[r.Content] = k
			s.files = append(s.files, File{Path: s.img.paths[r.Content], Size: size, First: i, At: s.Touched[i].At,
				content: r.Content, touched: make([]bool, trace.Pages(size))})
		}
		f := &s.files[k]
		for p := r.First; p < r.End(); p++ {
			if !f.touched[p] {
				f.touched[p] = true
				f.Pages++
				f.Bytes += min(trace.BlockSize, size-int64(p)*trace.BlockSize)
			}
		}
	}
	slices.SortFunc(s.files, func(a, b File) int {
		return cmp.Or(cmp.Compare(b.Pages, a.Pages), cmp.Compare(a.Path, b.Path))
	})
}

// Pages and Bytes are those of the set, each page once.
func (s *Set) Pages() (pages, bytes int64) {
	for i := range s.files {
		pages += s.files[i].Pages
		bytes += s.files[i].Bytes
	}
	return pages, bytes
}

// Dir is a directory, with all that is below it.
type Dir struct {
	Path    string
	Size    int64 // of its contents, each in the directory of its first path
	Touched int64 // bytes
	Strip   []float64
}

// Dirs groups the image by directories of at most two levels, those with most
// touched bytes first. Strip has cells of equal shares of the directory's bytes in the
// order of their paths, each with the share of it that is touched.
func (s *Set) Dirs(cells int) []Dir {
	type file struct {
		path    string
		content uint32
	}
	groups := make(map[string][]file)
	for c, p := range s.img.paths {
		groups[group(p)] = append(groups[group(p)], file{p, uint32(c)})
	}
	touched := make(map[uint32][]bool)
	for i := range s.files {
		touched[s.files[i].content] = s.files[i].touched
	}
	var dirs []Dir
	for name, files := range groups {
		slices.SortFunc(files, func(a, b file) int { return strings.Compare(a.path, b.path) })
		d := Dir{Path: name, Strip: make([]float64, cells)}
		for _, f := range files {
			d.Size += s.img.TOC.Contents[f.content].Size
		}
		per := float64(d.Size) / float64(cells)
		at := int64(0)
		for _, f := range files {
			size := s.img.TOC.Contents[f.content].Size
			for p, in := range touched[f.content] {
				if !in {
					continue
				}
				from := at + int64(p)*trace.BlockSize
				to := min(from+trace.BlockSize, at+size)
				d.Touched += to - from
				spread(d.Strip, float64(from)/per, float64(to)/per)
			}
			at += size
		}
		dirs = append(dirs, d)
	}
	slices.SortFunc(dirs, func(a, b Dir) int {
		return cmp.Or(cmp.Compare(b.Touched, a.Touched), cmp.Compare(b.Size, a.Size), strings.Compare(a.Path, b.Path))
	})
	return dirs
}

// spread adds the range [from, to), in cells, to the cells that it is in.
func spread(cells []float64, from, to float64) {
	for i := int(from); i < len(cells) && float64(i) < to; i++ {
		cells[i] = min(1, cells[i]+min(to, float64(i+1))-max(from, float64(i)))
	}
}

// group is the directory of at most two levels that a file is shown in.
func group(p string) string {
	parts := strings.SplitN(strings.TrimPrefix(path.Dir(p), "/"), "/", 3)
	return "/" + strings.Join(parts[:min(2, len(parts))], "/")
}
