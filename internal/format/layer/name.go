package layer

import (
	"errors"
	"fmt"
	"path"
	"strings"
)

// WhiteoutPrefix marks entries that remove a name of a lower layer; OpaqueName
// is the one that hides all a directory had before.
const (
	WhiteoutPrefix = ".wh."
	OpaqueName     = ".wh..wh..opq"
)

// cleanName turns the name of a tar entry into Entry.Name; "." is the root.
func cleanName(name string) (string, error) {
	if hasDotDot(name) {
		return "", errors.New(`".." in its name`)
	}
	clean := path.Clean(name)
	if clean == "." || clean == "/" {
		return ".", nil
	}
	if clean[0] == '/' {
		return "", errors.New("absolute name")
	}
	return clean, checkLengths(clean)
}

// cleanLink turns the target of a hard link into Entry.Link.
func cleanLink(target string) (string, error) {
	if hasDotDot(target) {
		return "", fmt.Errorf(`hard link out of the tree: ".." in its target %q`, shorten(target))
	}
	clean := strings.TrimPrefix(path.Clean("/"+target), "/")
	if clean == "" {
		return "", fmt.Errorf("hard link to %q, which is the root", target)
	}
	return clean, checkLengths(clean)
}

// cleanGlobal makes a name of that of a PAX global header, which is a label:
// GNU tar writes absolute ones.
func cleanGlobal(name string) (string, error) {
	clean := strings.TrimPrefix(path.Clean("/"+name), "/")
	if clean == "" {
		return ".", nil
	}
	return clean, checkLengths(clean)
}

func hasDotDot(name string) bool {
	if !strings.Contains(name, "..") {
		return false
	}
	for element := range strings.SplitSeq(name, "/") {
		if element == ".." {
			return true
		}
	}
	return false
}

func checkLengths(clean string) error {
	if len(clean) > maxPath {
		return fmt.Errorf("path of %d bytes, at most %d are possible", len(clean), maxPath)
	}
	rest, more := clean, true
	for more {
		var element string
		element, rest, more = strings.Cut(rest, "/")
		if !more {
			// What a whiteout removes may have a name of full length.
			element = strings.TrimPrefix(element, WhiteoutPrefix)
		}
		if len(element) > maxName {
			return fmt.Errorf("name of %d bytes, at most %d are possible", len(element), maxName)
		}
	}
	return nil
}

// checkClean holds for names and hard link targets in an entry list.
func checkClean(name string) error {
	if name == "" || name == "." || path.Clean(name) != name || name[0] == '/' || hasDotDot(name) {
		return fmt.Errorf("name %q is not a clean relative path", shorten(name))
	}
	if strings.IndexByte(name, 0) >= 0 {
		return fmt.Errorf("name %q holds NUL", shorten(name))
	}
	return checkLengths(name)
}
