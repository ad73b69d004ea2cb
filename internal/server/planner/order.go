package planner

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/columns"
)

// An order is kept as an object, because to guess it the server reads much of
// an image. Encoded it is the eight bytes "HFORDER\n", the version of Guess that
// made it (uvarint), and two columns: the text of the digests of the config and of the
// encoded TOC that it was guessed for, blocks; and per segment, varint, its rank
// less that of the one before (the first: less 0).
const (
	orderMagic = "HFORDER\n"
	// guessVersion changes when Guess does: what it guessed before is guessed anew.
	guessVersion = 2
)

// OrderKey is where the order of a config and an encoded TOC rests.
func OrderKey(config, toc digest.Digest) string {
	return fmt.Sprintf("orders/%s/%s-%s", toc.Algorithm(), toc.Encoded(), config.Encoded())
}

// Encode returns the object of an order.
func (o Order) Encode(config, toc digest.Digest) []byte {
	b := binary.AppendUvarint([]byte(orderMagic), guessVersion)
	b = columns.Append(b, columns.AppendBlock(columns.AppendBlock(nil, config), toc), false)
	var ranks []byte
	before := int64(0)
	for _, rank := range o {
		ranks = binary.AppendVarint(ranks, int64(rank)-before)
		before = int64(rank)
	}
	return columns.Append(b, ranks, true)
}

// DecodeOrder reads the object of an order of n segments. Errors: ErrCorrupt,
// wrapped, also when it is of another version, config or TOC.
func DecodeOrder(b []byte, config, toc digest.Digest, n int) (Order, error) {
	corrupt := func(format string, args ...any) (Order, error) {
		return nil, fmt.Errorf("order of %s: %w: "+format, append([]any{toc, ErrCorrupt}, args...)...)
	}
	rest, ok := bytes.CutPrefix(b, []byte(orderMagic))
	c := columns.Reader{B: rest}
	if v := c.Uint(math.MaxUint32); !ok || c.Err != nil || v != guessVersion {
		return corrupt("it does not start like one of version %d", guessVersion)
	}
	head, rest, err := columns.Next(c.B, 1<<10)
	if err != nil {
		return corrupt("%w", err)
	}
	ranks, rest, err := columns.Next(rest, uint64(n)*binary.MaxVarintLen64)
	if err != nil {
		return corrupt("%w", err)
	}
	c = columns.Reader{B: head}
	if got, of := string(c.Block(256)), string(c.Block(256)); c.End() != nil || got != string(config) || of != string(toc) || len(rest) > 0 {
		return corrupt("it is of config %q and TOC %q", got, of)
	}
	if got := columns.Numbers(ranks); got != n {
		return corrupt("it has %d segments, want %d", got, n)
	}
	o := make(Order, n)
	c = columns.Reader{B: ranks}
	before := int64(0)
	for i := range o {
		before += c.Int()
		if before < 0 || before > math.MaxUint32 {
			return corrupt("segment %d has rank %d", i, before)
		}
		o[i] = uint32(before)
	}
	if err := c.End(); err != nil {
		return corrupt("%w", err)
	}
	return o, nil
}
