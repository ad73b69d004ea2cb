// Package stream is what foil says to the program of an encoder, and hears from it, over two pipes.
//
// To the program go commands: a byte that says which, the length of what follows in four bytes,
// little-endian, and that.
//
//	S  level (one byte) and dictionary: a stream begins
//	W  plaintext
//	F  nothing: flush
//	A  nothing: end the block on a byte, as pigz does
//	E  nothing: end the stream
//	Z  nothing: all that was asked for is to be sent
//
// From it come bytes of streams: their length in the same way, not 0, and they. A length of 0
// answers Z. When its input ends the program ends. An encoder's error ends it as well, with a message
// on its standard error.
package stream

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
)

// MaxCommand is how long what follows a command may be.
const MaxCommand = 1 << 20

// Encoder makes streams, one after the other.
type Encoder interface {
	// Start begins one, whatever became of the one before.
	Start(w io.Writer, level int, dictionary []byte) error
	Write(plain []byte) (int, error)
	Flush() error
	// Align ends a block on a byte. Errors: errors.ErrUnsupported.
	Align() error
	Close() error
}

// Main serves an encoder on standard input and output, and ends the program.
func Main(e Encoder) {
	if err := serve(os.Stdin, os.Stdout, e); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serve(r io.Reader, w io.Writer, e Encoder) error {
	in, out := bufio.NewReaderSize(r, 256<<10), bufio.NewWriterSize(w, 256<<10)
	buf := make([]byte, MaxCommand)
	for {
		var head [5]byte
		if _, err := io.ReadFull(in, head[:]); err != nil {
			if err == io.EOF {
				return nil
			}
			return err
		}
		n := binary.LittleEndian.Uint32(head[1:])
		if n > MaxCommand {
			return fmt.Errorf("command %c with %d bytes", head[0], n)
		}
		b := buf[:n]
		if _, err := io.ReadFull(in, b); err != nil {
			return err
		}
		if err := command(out, e, head[0], b); err != nil {
			return fmt.Errorf("command %c with %d bytes: %w", head[0], n, err)
		}
	}
}

func command(out *bufio.Writer, e Encoder, kind byte, b []byte) error {
	switch kind {
	case 'S':
		if len(b) == 0 {
			return errors.New("it has no level")
		}
		return e.Start(frames{out}, int(b[0]), b[1:])
	case 'W':
		_, err := e.Write(b)
		return err
	case 'F':
		return e.Flush()
	case 'A':
		return e.Align()
	case 'E':
		return e.Close()
	case 'Z':
		if _, err := out.Write(make([]byte, 4)); err != nil {
			return err
		}
		return out.Flush()
	}
	return errors.New("it is unknown")
}

// frames sends each Write with its length.
type frames struct{ w *bufio.Writer }

func (f frames) Write(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	if _, err := f.w.Write(binary.LittleEndian.AppendUint32(nil, uint32(len(b)))); err != nil {
		return 0, err
	}
	return f.w.Write(b)
}
