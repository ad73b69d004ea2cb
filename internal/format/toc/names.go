package toc

// Names finds paths of contents. It makes only those that are asked for: those of all files of a
// large image are megabytes, and a start would wait for them.
type Names struct {
	toc *TOC
	of  []int32 // by content: the number of a name of a file that has it; -1: none
	in  []int32 // by name: the directory that it is in
	dir []int32 // by directory: the number of its name
}

// NamesOf makes what finds the paths of t's contents.
func NamesOf(t *TOC) *Names {
	n := &Names{toc: t, of: make([]int32, len(t.Contents)), in: make([]int32, len(t.Dirents)), dir: make([]int32, len(t.Inodes))}
	for c := range n.of {
		n.of[c] = -1
	}
	for i := range t.Inodes {
		first := t.Inodes[i].FirstChild
		for k, d := range t.Children(i) {
			name := int32(first) + int32(k)
			n.in[name] = int32(i)
			if child := &t.Inodes[d.Inode]; child.IsDir() {
				n.dir[d.Inode] = name
			} else if c := child.Content; c >= 0 && n.of[c] < 0 {
				n.of[c] = name
			}
		}
	}
	return n
}

// Path returns an absolute path of a file that has content c. A content of several files
// has the same one each time. ok is false when no file has it.
func (n *Names) Path(c int32) (path string, ok bool) {
	name := n.of[c]
	if name < 0 {
		return "", false
	}
	path = "/" + n.toc.Dirents[name].Name
	for dir := n.in[name]; dir != 0; dir = n.in[n.dir[dir]] {
		path = "/" + n.toc.Dirents[n.dir[dir]].Name + path
	}
	return path, true
}
