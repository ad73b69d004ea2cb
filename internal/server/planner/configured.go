package planner

import (
	"io"
	"path"
	"slices"
	"strings"
)

// A server loads modules that its configuration names: an absolute path, or the name of a file that
// lies in a directory of modules, as in "extension=curl.so". A directory that it names may hold what is
// served: see applications.
const (
	maxConfigs    = 500      // files of configuration that are looked into
	maxConfigText = 32 << 10 // bytes of one
	maxDepth      = 5        // directories below /etc/NAME
	maxServed     = 200      // paths that they name
)

// configured ranks the configuration of the programs and interpreters found, /etc/NAME, and the
// libraries that it names with what they are linked with.
func (g *guesser) configured() {
	var names []string
	for _, name := range g.names {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	c := configs{g: g}
	for i := 0; i < len(names); i++ {
		known := len(g.langs)
		c.dir("/etc/"+names[i], 0)
		for _, l := range g.langs[known:] { // a module that is an interpreter, as PHP in Apache
			if !slices.Contains(names, l.name) {
				names = append(names, l.name)
			}
		}
	}
}

type configs struct {
	g       *guesser
	files   int
	modules map[string]named // by base name
}

func (c *configs) dir(p string, depth int) {
	i, ok := c.g.t.Resolve(p)
	if !ok || depth > maxDepth {
		return
	}
	for _, d := range c.g.t.Children(i) {
		child := path.Join(p, d.Name)
		inode, ok := c.g.t.Resolve(child)
		if !ok {
			continue
		}
		switch n := &c.g.t.Inodes[inode]; {
		case n.IsDir() && !c.g.t.Inodes[d.Inode].IsSymlink():
			if !strings.HasSuffix(d.Name, "-available") { // what is enabled links to it
				c.dir(child, depth+1)
			}
		case n.Content >= 0 && n.Size <= maxConfigText && c.files < maxConfigs && c.g.ctx.Err() == nil:
			c.files++
			c.file(inode)
		}
	}
}

func (c *configs) file(inode int) {
	c.g.rank(inode)
	b := make([]byte, c.g.t.Inodes[inode].Size)
	if _, err := c.g.c.Open(c.g.ctx, inode).ReadAt(b, 0); err != nil && err != io.EOF {
		return
	}
	for _, word := range words(b) {
		if strings.HasPrefix(word, "/") && strings.Count(word, "/") > 1 && len(c.g.served) < maxServed {
			c.g.served = append(c.g.served, word)
		}
		if !strings.HasSuffix(word, ".so") {
			continue
		}
		p := word
		i, ok := -1, false
		if strings.HasPrefix(word, "/") {
			i, ok = c.g.file(p)
		} else if m, found := c.module(path.Base(word)); found {
			p, i, ok = m.path, m.inode, true
		}
		if ok {
			c.g.library(p, i)
		}
	}
}

// module finds a library by the last element of its path.
func (c *configs) module(base string) (named, bool) {
	if c.modules == nil {
		c.modules = map[string]named{}
		for _, f := range c.g.files() {
			if strings.HasSuffix(f.path, ".so") {
				c.modules[path.Base(f.path)] = f
			}
		}
	}
	m, ok := c.modules[base]
	return m, ok
}

// library ranks a library that is loaded by name: what it is linked with, and all of it if it is small.
func (g *guesser) library(p string, inode int) {
	if g.seen[inode] || len(g.seen) > maxPrograms {
		return
	}
	g.seen[inode] = true
	g.language(path.Base(p))
	g.elf(p, g.c.Open(g.ctx, inode), inode)
	if g.t.Inodes[inode].Size <= smallProgram {
		g.rank(inode)
	} else {
		g.code = append(g.code, inode)
	}
}
