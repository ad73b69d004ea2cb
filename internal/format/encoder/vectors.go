package encoder

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"sync"

	"hydrofoil.dev/foil/internal/format/deflate"
)

// vectorPlain is what vectors are made of: text, copies of it from near and far, noise. It is
// the same everywhere.
var vectorPlain = sync.OnceValue(func() []byte {
	b := make([]byte, 80_000)
	state := uint64(7)
	next := func(n uint64) uint64 {
		state = state*6364136223846793005 + 1442695040888963407
		return state >> 33 % n
	}
	for i := 0; i < len(b); {
		kind, n := next(8), min(int(next(200))+1, len(b)-i)
		for range n {
			switch {
			case kind < 5 && i > 60_000:
				b[i] = b[i-int(40+next(2)*32_000)-int(kind)]
			case kind < 7:
				b[i] = byte('a' + next(next(26)+1))
			default:
				b[i] = byte(next(256))
			}
			i++
		}
	}
	return b
})

// vector is the sum of what an encoder makes of vectorPlain, at all its levels, one after the other, with blocks and
// without.
func vector(one func(w io.Writer, level int, blocks bool) error) (string, error) {
	hash := sha256.New()
	for level := deflate.MinLevel; level <= deflate.MaxLevel; level++ {
		for _, blocks := range []bool{false, true} {
			if err := one(hash, level, blocks); err != nil {
				return "", err
			}
		}
	}
	return hex.EncodeToString(hash.Sum(nil)), nil
}

// vectors are what they were when the encoders came into the world.
var vectors = map[string]string{
	Go:         "1175d38066427476d5baf602a6277aacbb42e5e85ab15d9881d57a1baf310309",
	KlauspostA: "175ac56f83c74966bad0a2b246ec3c0a6d6d7e88fcd59108f3a63a9ae30a28a0",
	KlauspostB: "850d252613f533a8500ea06fa521e1b8d3c5448ead2d2f212e286cbaf2c5a363",
	Zlib:       "8e0e58e043ea2bc390b1697506823db6bc17c8dcfe19ba82c649779c89330f41",
}

const otherVectors = "it makes other bytes here than it should; what was proven by it cannot be restored on this machine"

var checkGo = sync.OnceValue(func() error {
	got, err := goVector()
	if err == nil && got != vectors[Go] {
		err = unavailable(Go, otherVectors)
	}
	return err
})

func goVector() (string, error) {
	return vector(func(w io.Writer, level int, _ bool) error {
		e, err := deflate.NewEncoder(w, level)
		if err != nil {
			return err
		}
		if _, err := e.Write(vectorPlain()); err != nil {
			return err
		}
		return e.Close()
	})
}

// check compares the vectors, once. Errors: ErrUnavailable; that of ctx.
func (p *program) check(ctx context.Context) error {
	p.mu.Lock()
	checked, bad := p.checked, p.bad
	p.mu.Unlock()
	if checked {
		return bad
	}
	got, err := p.vector(ctx)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		err = unavailable(p.name, "%v", err)
	case got != vectors[p.name]:
		err = unavailable(p.name, otherVectors)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.checked, p.bad = true, err
	return err
}

func (p *program) vector(ctx context.Context) (string, error) {
	plain := vectorPlain()
	return vector(func(w io.Writer, level int, with bool) error {
		b := &blocks{program: p, level: level, end: int64(len(plain))}
		if with {
			b.size = 32 << 10
		}
		return b.part(ctx, w, bytes.NewReader(plain), 0, 0, b.end)
	})
}
