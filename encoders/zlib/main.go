// Zlib is zlib 1.2.11 as an encoder of foil, in a translation to Go.
package main

import (
	"errors"
	"fmt"
	"io"
	"unsafe"

	"modernc.org/libc"
	"modernc.org/libc/sys/types"
	zlib "modernc.org/z/lib"

	"hydrofoil.dev/foil/encoders/stream"
)

func main() { stream.Main(&encoder{tls: libc.NewTLS()}) }

const (
	windowBits = -15 // no header
	memLevel   = 8
	bufferSize = 256 << 10
)

// encoder has its memory from zlib's allocator: what zlib points to must not move.
type encoder struct {
	tls     *libc.TLS
	strm    uintptr // *zlib.Z_stream
	in, out uintptr
	small   uintptr // two numbers
	version uintptr
	begun   bool
	level   int
	w       io.Writer
}

func (e *encoder) stream() *zlib.Z_stream { return (*zlib.Z_stream)(unsafe.Pointer(e.strm)) }

// bytes is memory that malloc gave.
func bytes(p uintptr, n int) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(p)), n) }

func (e *encoder) malloc(n int) (uintptr, error) {
	p := libc.Xcalloc(e.tls, 1, types.Size_t(n))
	if p == 0 {
		return 0, errors.New("no memory")
	}
	return p, nil
}

func (e *encoder) alloc() (err error) {
	for p, n := range map[*uintptr]int{
		&e.strm: int(unsafe.Sizeof(zlib.Z_stream{})), &e.in: stream.MaxCommand, &e.out: bufferSize, &e.small: 16,
	} {
		if *p, err = e.malloc(n); err != nil {
			return err
		}
	}
	e.version, err = libc.CString("1.2.11")
	return err
}

func (e *encoder) Start(w io.Writer, level int, dictionary []byte) error {
	e.w = w
	if e.strm == 0 {
		if err := e.alloc(); err != nil {
			return err
		}
	}
	if e.begun && e.level == level {
		if rc := zlib.XdeflateReset(e.tls, e.strm); rc != zlib.Z_OK {
			return failed("deflateReset", rc)
		}
	} else {
		if e.begun {
			zlib.XdeflateEnd(e.tls, e.strm)
		}
		rc := zlib.XdeflateInit2_(e.tls, e.strm, int32(level), zlib.Z_DEFLATED, windowBits, memLevel, zlib.Z_DEFAULT_STRATEGY, e.version,
			int32(unsafe.Sizeof(zlib.Z_stream{})))
		if rc != zlib.Z_OK {
			return failed("deflateInit2", rc)
		}
		e.begun, e.level = true, level
	}
	if len(dictionary) > 0 {
		copy(bytes(e.in, len(dictionary)), dictionary)
		if rc := zlib.XdeflateSetDictionary(e.tls, e.strm, e.in, zlib.UInt(len(dictionary))); rc != zlib.Z_OK {
			return failed("deflateSetDictionary", rc)
		}
	}
	return nil
}

func failed(what string, rc int32) error { return fmt.Errorf("%s returned %d", what, rc) }

// deflate works until zlib has taken all, and given all that the flush asks for.
func (e *encoder) deflate(plain []byte, flush int32) error {
	copy(bytes(e.in, len(plain)), plain)
	s := e.stream()
	s.Fnext_in, s.Favail_in = e.in, zlib.UInt(len(plain))
	for {
		s.Fnext_out, s.Favail_out = e.out, bufferSize
		rc := zlib.Xdeflate(e.tls, e.strm, flush)
		if rc != zlib.Z_OK && rc != zlib.Z_STREAM_END && rc != zlib.Z_BUF_ERROR {
			return failed("deflate", rc)
		}
		if _, err := e.w.Write(bytes(e.out, bufferSize-int(s.Favail_out))); err != nil {
			return err
		}
		if s.Favail_out > 0 {
			return nil
		}
	}
}

func (e *encoder) Write(plain []byte) (int, error) {
	return len(plain), e.deflate(plain, zlib.Z_NO_FLUSH)
}

func (e *encoder) Flush() error { return e.deflate(nil, zlib.Z_SYNC_FLUSH) }

func (e *encoder) Close() error { return e.deflate(nil, zlib.Z_FINISH) }

func (e *encoder) Align() error {
	if err := e.deflate(nil, zlib.Z_BLOCK); err != nil {
		return err
	}
	for {
		n, err := e.pending()
		switch {
		case err != nil:
			return err
		case n%2 == 1:
			return e.Flush()
		case n%8 == 0:
			return e.deflate(nil, zlib.Z_BLOCK)
		}
		// An empty block with fixed codes.
		if rc := zlib.XdeflatePrime(e.tls, e.strm, 10, 2); rc != zlib.Z_OK {
			return failed("deflatePrime", rc)
		}
	}
}

// pending is how many bits of a byte wait.
func (e *encoder) pending() (int32, error) {
	pending, bits := e.small, e.small+8
	if rc := zlib.XdeflatePending(e.tls, e.strm, pending, bits); rc != zlib.Z_OK {
		return 0, failed("deflatePending", rc)
	}
	return *(*int32)(unsafe.Pointer(bits)), nil
}
