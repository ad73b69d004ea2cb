// Klauspost is klauspost/compress/flate as an encoder of foil, in the version that the module file
// names with which it is built.
package main

import (
	"errors"
	"io"

	"github.com/klauspost/compress/flate"

	"hydrofoil.dev/foil/encoders/stream"
)

func main() { stream.Main(&encoder{}) }

type encoder struct {
	*flate.Writer
	level int
}

func (e *encoder) Start(w io.Writer, level int, dictionary []byte) (err error) {
	if e.Writer == nil || e.level != level {
		if e.Writer, err = flate.NewWriterDict(w, level, nil); err != nil {
			return err
		}
		e.level = level
	}
	// What it keeps of the dictionary is its own copy.
	e.ResetDict(w, dictionary)
	return nil
}

func (*encoder) Align() error { return errors.ErrUnsupported }
