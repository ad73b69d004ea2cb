// Package segment holds what both sides agree on about the unit of transfer,
// verification and deduplication: how a content is split into segments, how a
// segment is named, and how segments travel and rest inside frames.
package segment

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
)

// IDLength is the length of an ID in bytes.
const IDLength = sha256.Size

// ID names a segment or a content: the SHA-256 of its bytes. The zero ID names
// a hole: a segment whose bytes are all zero. A hole is never stored and never
// sent; its length alone says what it is.
type ID [IDLength]byte

// Sum returns the ID of b. It never returns the zero ID for a hole: callers
// that split contents use Splitter, which does.
func Sum(b []byte) ID { return sha256.Sum256(b) }

// IsHole reports whether id names a run of zeros.
func (id ID) IsHole() bool { return id == ID{} }

// String returns the ID as an OCI digest, "sha256:" and 64 hexadecimal digits.
func (id ID) String() string { return "sha256:" + hex.EncodeToString(id[:]) }

// ParseID reads what String wrote.
func ParseID(s string) (ID, error) {
	var id ID
	h, ok := strings.CutPrefix(s, "sha256:")
	if !ok || len(h) != hex.EncodedLen(len(id)) {
		return id, fmt.Errorf("parse segment ID %q: want sha256: and 64 hexadecimal digits", s)
	}
	if _, err := hex.Decode(id[:], []byte(h)); err != nil {
		return id, fmt.Errorf("parse segment ID %q: %w", s, err)
	}
	return id, nil
}

// MarshalText returns what String does.
func (id ID) MarshalText() ([]byte, error) { return []byte(id.String()), nil }

// UnmarshalText reads what ParseID does.
func (id *ID) UnmarshalText(b []byte) error {
	v, err := ParseID(string(b))
	if err == nil {
		*id = v
	}
	return err
}
