package picture

import (
	_ "embed"
	"encoding/json"
	"html/template"
	"io"
	"path"
	"slices"
	"strings"
	"time"

	"hydrofoil.dev/foil/internal/progress"
)

//go:embed page.html
var page string

var pageTemplate = template.Must(template.New("page").Parse(page))

// node is a directory or file in the page's treemap.
type node struct {
	Name    string  `json:"n"`
	Size    int64   `json:"s"`
	Touched int64   `json:"t,omitempty"`
	Nodes   []*node `json:"c,omitempty"`
}

// HTML writes one page that needs nothing else: a map of the image by directory,
// what is touched in its order, and a table of files.
func (s *Set) HTML(w io.Writer, now time.Time) error {
	root := s.tree()
	data := struct {
		Timed bool    `json:"timed"`
		Files []File  `json:"files"`
		Tree  *node   `json:"tree"`
		Runs  [][]any `json:"runs"` // time or order, file, first page, pages
	}{Timed: s.Timed, Files: s.files, Tree: root, Runs: make([][]any, len(s.runs))}
	if data.Files == nil {
		data.Files = []File{}
	}
	byContent := make(map[uint32]int)
	for i := range s.files {
		byContent[s.files[i].content] = i
	}
	for i, r := range s.runs {
		x := float64(i)
		if s.Timed {
			x = s.Touched[i].At
		}
		data.Runs[i] = []any{x, byContent[r.Content], r.First, r.Blocks}
	}
	encoded, err := json.Marshal(data) // escapes what HTML could mistake
	if err != nil {
		return err
	}
	pages, bytes := s.Pages()
	return pageTemplate.Execute(w, map[string]any{
		"Title": s.Title,
		"Args":  strings.Join(s.Args, " "),
		"Facts": s.Facts,
		"Pages": pages,
		"Bytes": progress.Bytes(bytes),
		"Image": progress.Bytes(s.img.bytes),
		"Share": share(bytes, s.img.bytes),
		"Files": len(s.files),
		"Timed": s.Timed,
		"Runs":  len(s.runs),
		"Made":  now.UTC().Format("2006-01-02 15:04 UTC"),
		"Data":  template.JS(encoded),
	})
}

// tree is the image by directory; what is too small to be seen is put together.
func (s *Set) tree() *node {
	touched := make(map[uint32]int64)
	for i := range s.files {
		touched[s.files[i].content] = s.files[i].Bytes
	}
	root := &node{Name: "/"}
	dirs := map[string]*node{"/": root}
	var dir func(p string) *node
	dir = func(p string) *node {
		if d := dirs[p]; d != nil {
			return d
		}
		d := &node{Name: path.Base(p)}
		dirs[p] = d
		up := dir(path.Dir(p))
		up.Nodes = append(up.Nodes, d)
		return d
	}
	for c, p := range s.img.paths {
		size := s.img.TOC.Contents[c].Size
		d := dir(path.Dir(p))
		d.Nodes = append(d.Nodes, &node{Name: path.Base(p), Size: size, Touched: touched[uint32(c)]})
	}
	root.sum()
	root.prune(s.img.bytes / 4000)
	return root
}

func (n *node) sum() {
	for _, c := range n.Nodes {
		c.sum()
		n.Size += c.Size
		n.Touched += c.Touched
	}
	slices.SortStableFunc(n.Nodes, func(a, b *node) int { return int(max(-1, min(1, b.Size-a.Size))) })
}

// prune puts together the children of n that are smaller than least bytes.
func (n *node) prune(least int64) {
	k := len(n.Nodes)
	for k > 0 && n.Nodes[k-1].Size < least {
		k--
	}
	if rest := n.Nodes[k:]; len(rest) > 1 {
		other := &node{Name: "small ones"}
		for _, c := range rest {
			other.Size += c.Size
			other.Touched += c.Touched
		}
		n.Nodes = append(n.Nodes[:k:k], other)
		if other.Size == 0 {
			n.Nodes = n.Nodes[:k]
		}
	}
	for _, c := range n.Nodes {
		c.prune(least)
	}
}
