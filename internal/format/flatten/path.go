package flatten

import (
	"errors"
	"fmt"
	"path"
	"strings"

	"hydrofoil.dev/foil/internal/format/toc"
)

// Paths in a tree are clean and without a leading slash; "" is the root.

var (
	errNotDir = errors.New("a parent of it is not a directory")
	errLoop   = errors.New("too many symlinks on its way")
)

// maxLinks is how many symlinks containerd follows for one name.
const maxLinks = 255

// resolve returns where name lies once no element of it is a symlink; absolute
// targets and ".." stay inside the rootfs. What does not exist is taken as it
// stands.
//
// It goes like containerd's fs.RootPath, in passes: each pass looks at the
// elements from left to right and puts a symlink's target in its place, without
// looking at what the target leads through; the next pass does that. Targets
// are cleaned as text, so that "link/.." is the directory of the link.
func (t *tree) resolve(name string) (string, error) {
	if t.plain(name) {
		return name, nil
	}
	links := 0
	for at := name; ; {
		before := links
		next, err := t.pass(at, &links)
		if err != nil {
			return "", err
		}
		if links == before {
			return next, nil
		}
		at = next
	}
}

// plain reports whether name runs through existing directories only, up to its
// last element that exists: the common case, which needs no new string.
func (t *tree) plain(name string) bool {
	at := t.root
	for rest, more := name, true; more; {
		var element string
		element, rest, more = strings.Cut(rest, "/")
		if !isDir(at) {
			return false
		}
		next, ok := at.Children[element]
		if !ok {
			return true
		}
		at = next
	}
	return !isSymlink(at)
}

func (t *tree) pass(name string, links *int) (string, error) {
	at := ""
	for element := range strings.SplitSeq(name, "/") {
		if *links > maxLinks {
			return "", errLoop
		}
		full := join(at, element)
		f, err := t.lookup(full)
		if err != nil {
			return "", err
		}
		if f == nil || !isSymlink(f) {
			at = full
			continue
		}
		*links++
		if path.IsAbs(f.Target) {
			at = clean(f.Target)
		} else {
			at = clean(at + "/" + f.Target)
		}
	}
	return at, nil
}

func join(dir, element string) string {
	if dir == "" {
		return element
	}
	return dir + "/" + element
}

// clean takes ".." at the root for the root.
func clean(name string) string { return strings.TrimPrefix(path.Clean("/"+name), "/") }

// lookup is lstat inside the rootfs: it follows symlinks on the way to the last
// element. It returns nil for what does not exist.
func (t *tree) lookup(name string) (*toc.File, error) {
	links := 0
	return t.lookupFrom([]*toc.File{t.root}, name, &links)
}

// lookupFrom walks from the last of dirs, whose parents are those before it.
func (t *tree) lookupFrom(dirs []*toc.File, name string, links *int) (*toc.File, error) {
	if name == "" {
		return dirs[len(dirs)-1], nil
	}
	for {
		element, rest, more := strings.Cut(name, "/")
		at := dirs[len(dirs)-1]
		if !isDir(at) {
			return nil, errNotDir
		}
		switch element {
		case "", ".":
			if !more {
				return at, nil
			}
			name = rest
			continue
		case "..":
			if len(dirs) > 1 {
				dirs = dirs[:len(dirs)-1]
			}
			if !more {
				return dirs[len(dirs)-1], nil
			}
			name = rest
			continue
		}
		f, ok := at.Children[element]
		if !ok {
			return nil, nil
		}
		if !more {
			return f, nil
		}
		if isSymlink(f) {
			if *links++; *links > maxLinks {
				return nil, errLoop
			}
			if path.IsAbs(f.Target) {
				dirs = dirs[:1]
			}
			name = f.Target + "/" + rest
			continue
		}
		dirs = append(dirs, f)
		name = rest
	}
}

// parent returns the directory at a resolved path, and makes it, and those
// above it, when they are missing.
func (t *tree) parent(dir string) (*toc.File, error) {
	at := t.root
	if dir == "" {
		return at, nil
	}
	for rest, more := dir, true; more; {
		var element string
		element, rest, more = strings.Cut(rest, "/")
		next, ok := at.Children[element]
		if !ok {
			if err := t.newFile(); err != nil {
				return nil, err
			}
			next = newDirectory(0o755)
			inheritGroup(at, next)
			at.Children[element] = next
		}
		if !isDir(next) {
			return nil, fmt.Errorf("%w: %q", errNotDir, element)
		}
		at = next
	}
	return at, nil
}
