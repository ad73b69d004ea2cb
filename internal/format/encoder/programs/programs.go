// Package programs has the programs of encoders in it, as `make build` made them (encoders/). A foil
// that was built otherwise has none.
package programs

import (
	"bytes"
	"compress/gzip"
	"embed"
	"io"
)

//go:embed bin
var files embed.FS

// Program returns the program of an encoder, or nil if there is none.
func Program(name string) []byte {
	b, err := files.ReadFile("bin/" + name + ".gz")
	if err != nil {
		return nil
	}
	z, err := gzip.NewReader(bytes.NewReader(b))
	if err != nil {
		return nil
	}
	if b, err = io.ReadAll(z); err != nil {
		return nil
	}
	return b
}
