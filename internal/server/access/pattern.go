package access

import (
	"fmt"
	"strings"
)

// Pattern matches names of repositories.
type Pattern struct {
	text     string
	segments []string
}

// maxPattern bounds a pattern, bytes, and maxDeep its segments **: matching takes the
// length of the name to that power, at most.
const (
	maxPattern = 256
	maxDeep    = 2
)

// ParsePattern reads a pattern.
func ParsePattern(s string) (Pattern, error) {
	wrong := func(why string) (Pattern, error) {
		return Pattern{}, fmt.Errorf("repository pattern %q: %s", s, why)
	}
	if s == "" || len(s) > maxPattern {
		return wrong(fmt.Sprintf("want 1 to %d bytes", maxPattern))
	}
	p := Pattern{text: s, segments: strings.Split(s, "/")}
	deep := 0
	for _, segment := range p.segments {
		switch {
		case segment == "":
			return wrong("a segment is empty: no repository has such a name")
		case segment == "**":
			deep++
		case strings.Contains(segment, "**"):
			return wrong("** is a segment of its own: team/**")
		}
		for _, c := range segment {
			if !('a' <= c && c <= 'z' || '0' <= c && c <= '9' || strings.ContainsRune("._-*", c)) {
				return wrong(fmt.Sprintf("no repository has %q in its name", c))
			}
		}
	}
	if deep > maxDeep {
		return wrong(fmt.Sprintf("at most %d segments may be **", maxDeep))
	}
	return p, nil
}

func (p Pattern) String() string { return p.text }

// Match reports whether the pattern is one of a repository; "" is the server itself.
func (p Pattern) Match(name string) bool {
	var segments []string
	if name != "" {
		segments = strings.Split(name, "/")
	}
	return matchSegments(p.segments, segments)
}

func matchSegments(pattern, name []string) bool {
	for len(pattern) > 0 {
		if pattern[0] == "**" {
			for n := 0; n <= len(name); n++ {
				if matchSegments(pattern[1:], name[n:]) {
					return true
				}
			}
			return false
		}
		if len(name) == 0 || !Glob(pattern[0], name[0]) {
			return false
		}
		pattern, name = pattern[1:], name[1:]
	}
	return len(name) == 0
}

// Glob reports whether a pattern matches in which * stands for any number of any characters. What it takes is
// the product of both lengths, at most.
func Glob(pattern, s string) bool {
	star, mark := -1, 0
	i := 0
	for n := 0; n < len(s); {
		switch {
		case i < len(pattern) && pattern[i] == '*':
			star, mark = i, n
			i++
		case i < len(pattern) && pattern[i] == s[n]:
			i, n = i+1, n+1
		case star >= 0:
			mark++
			i, n = star+1, mark
		default:
			return false
		}
	}
	return strings.Trim(pattern[i:], "*") == ""
}
