package oci

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode"
)

// maxDepth is how deep the values of a document may be nested. Documents of images
// have seven levels.
const maxDepth = 100

// level is an object or array that is being read.
type level struct {
	keys  map[string]bool // that it has had; nil: it is an array
	key   bool            // a key is next
	named string          // the last key
	fixed bool            // its keys are fields, not names that people have given
}

// holders are the fields, as fold has them, whose values, or whose values' elements, have fields.
var holders = map[string]bool{
	"CONFIG": true, "LAYERS": true, "MANIFESTS": true, "BLOBS": true, "SUBJECT": true, "PLATFORM": true, "ROOTFS": true, "HISTORY": true,
}

// unambiguous reports what readers of JSON take differently: of two equal keys one
// reader takes the first, another one the last. Fields whose names differ in case are
// one to Go's reader, and two to others; keys of annotations and labels are two to all.
func unambiguous(b []byte) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	var open []level
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) && len(open) == 0 {
			return nil
		}
		if err != nil {
			return fmt.Errorf("no JSON: %w", err)
		}
		var top *level
		if n := len(open); n > 0 {
			top = &open[n-1]
		}
		if top != nil && top.key {
			if name, ok := token.(string); ok {
				if err := top.add(name); err != nil {
					return err
				}
				continue
			}
		}
		switch token {
		case json.Delim('{'), json.Delim('['):
			if len(open) == maxDepth {
				return fmt.Errorf("nested deeper than %d levels", maxDepth)
			}
			next := level{fixed: top == nil || top.fixed && (top.keys == nil || holders[fold(top.named)])}
			if token == json.Delim('{') {
				next.keys, next.key = make(map[string]bool), true
			}
			open = append(open, next)
			continue
		case json.Delim('}'), json.Delim(']'):
			open = open[:len(open)-1]
		}
		if n := len(open); n > 0 && open[n-1].keys != nil {
			open[n-1].key = true
		}
	}
}

// add notes a key of an object.
func (l *level) add(name string) error {
	as := name
	if l.fixed {
		as = fold(name)
	}
	if l.keys[as] {
		return fmt.Errorf("ambiguous: it has the key %q twice in one object", name)
	}
	l.keys[as], l.named, l.key = true, name, false
	return nil
}

// fold makes names equal that encoding/json takes for one field.
func fold(s string) string {
	return strings.Map(func(r rune) rune {
		for {
			next := unicode.SimpleFold(r)
			if next <= r { // the least of those that are equal comes after the greatest
				return next
			}
			r = next
		}
	}, s)
}
