package journal

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/columns"
	"hydrofoil.dev/foil/internal/server/catalog"
)

const (
	magic      = "hfjrnl\x00\x02"
	oldest     = 1        // version of the format that is read; it had no deleted manifests and tags
	maxRecords = 64 << 20 // bytes of an object's records
	maxRecord  = 32 << 20
	maxText    = 1 << 20                 // bytes of what is no manifest
	maxObject  = maxRecords + 1<<20      // what does not compress is stored as it is
	target     = 4 << 20                 // bytes of records after which a merge begins another part
	least      = len(magic) + 3 + sumLen // bytes of an object without records
	sumLen     = sha256.Size
)

// ErrCorrupt is returned, wrapped, for an object that is none of a journal's, or is damaged.
var ErrCorrupt = errors.New("damaged object of the journal")

func corrupt(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrCorrupt}, args...)...)
}

// Encode returns the object of changes, which it sorts. There must be no two of one register and version.
func Encode(changes []catalog.Change) []byte {
	sortChanges(changes)
	var records []byte
	for i := range changes {
		records = appendRecord(records, &changes[i])
	}
	return encodeRecords(records)
}

// A push's few records are not compressed, which would take longer than all else; a merge does it later.
const compressed = 16 << 10 // bytes of records

func encodeRecords(records []byte) []byte {
	b := columns.Append([]byte(magic), records, len(records) >= compressed)
	sum := sha256.Sum256(b)
	return append(b, sum[:]...)
}

// Decode reads an object. Errors: ErrCorrupt.
func Decode(b []byte) ([]catalog.Change, error) {
	if len(b) < least || string(b[:len(magic)-1]) != magic[:len(magic)-1] {
		return nil, corrupt("it does not begin like one")
	}
	if v := b[len(magic)-1]; v < oldest || v > magic[len(magic)-1] {
		return nil, fmt.Errorf("an object of the journal has version %d of its format, and this foil knows %d to %d: use a newer foil", v, oldest, magic[len(magic)-1])
	}
	body := b[:len(b)-sumLen]
	if sum := sha256.Sum256(body); !bytes.Equal(sum[:], b[len(body):]) {
		return nil, corrupt("wrong checksum")
	}
	records, rest, err := columns.Next(body[len(magic):], maxRecords)
	if err != nil || len(rest) > 0 {
		return nil, corrupt("its records: %v, %d bytes too many", err, len(rest))
	}
	var changes []catalog.Change
	r := columns.Reader{B: records}
	for len(r.B) > 0 {
		c, err := readRecord(&r)
		if err != nil {
			return nil, corrupt("record %d: %v", len(changes), err)
		}
		if n := len(changes); n > 0 && compareChanges(&changes[n-1], &c) >= 0 {
			return nil, corrupt("record %d is out of order", n)
		}
		changes = append(changes, c)
	}
	return changes, nil
}

func compareChanges(a, b *catalog.Change) int {
	return cmp.Or(a.CompareRegisters(b), cmp.Compare(a.Version, b.Version))
}

func byVersion(a, b catalog.Change) int { return cmp.Compare(a.Version, b.Version) }

func sortChanges(changes []catalog.Change) {
	slices.SortFunc(changes, func(a, b catalog.Change) int { return compareChanges(&a, &b) })
}

func appendRecord(b []byte, c *catalog.Change) []byte {
	kind := 2 * uint64(c.Kind)
	if c.Gone {
		kind++
	}
	b = binary.AppendUvarint(b, kind)
	b = binary.AppendUvarint(b, c.Version)
	b = binary.AppendVarint(b, c.Time.UnixNano())
	b = columns.AppendBlock(b, c.Repo)
	b = columns.AppendBlock(b, c.Name)
	if c.Gone {
		return b
	}
	switch c.Kind {
	case catalog.ChangedBlob:
		b = binary.AppendUvarint(b, uint64(c.Blob.Size))
		b = columns.AppendBlock(b, c.Blob.MediaType)
	case catalog.ChangedManifest, catalog.ChangedDeletedManifest:
		m := &c.Manifest
		b = columns.AppendBlock(b, m.MediaType)
		b = columns.AppendBlock(b, m.ArtifactType)
		b = columns.AppendBlock(b, m.Subject)
		b = binary.AppendUvarint(b, uint64(len(m.Annotations)))
		for _, key := range slices.Sorted(maps.Keys(m.Annotations)) {
			b = columns.AppendBlock(b, key)
			b = columns.AppendBlock(b, m.Annotations[key])
		}
		b = binary.AppendVarint(b, m.Pushed.UnixNano())
		b = columns.AppendBlock(b, m.Bytes)
	case catalog.ChangedTag, catalog.ChangedDeletedTag:
		b = columns.AppendBlock(b, c.Target)
	case catalog.ChangedLayer:
		l := &c.Layer
		b = columns.AppendBlock(b, l.DiffID)
		b = columns.AppendBlock(b, l.Entries)
		b = columns.AppendBlock(b, l.Refused)
		b = binary.AppendUvarint(b, uint64(l.Size))
		b = binary.AppendUvarint(b, uint64(l.Files))
		b = columns.AppendBlock(b, l.Recipe.Key)
		b = columns.AppendBlock(b, l.Recipe.Digest)
		b = binary.AppendUvarint(b, uint64(l.Recipe.Size))
	case catalog.ChangedRootfs:
		b = columns.AppendBlock(b, c.Rootfs.TOC)
		b = columns.AppendBlock(b, c.Rootfs.Key)
		b = columns.AppendBlock(b, c.Rootfs.Index)
	}
	if isDeleted(c.Kind) {
		b = binary.AppendVarint(b, c.Deleted.UnixNano())
	}
	return b
}

// isDeleted reports whether changes of a kind are of what can be brought back.
func isDeleted(k catalog.ChangeKind) bool {
	return k == catalog.ChangedDeletedManifest || k == catalog.ChangedDeletedTag
}

const maxInt = 1<<63 - 1

func readRecord(r *columns.Reader) (c catalog.Change, err error) {
	kind := r.Uint(255)
	c.Kind, c.Gone = catalog.ChangeKind(kind/2), kind%2 == 1
	c.Version = r.Uint(maxInt)
	c.Time = time.Unix(0, r.Int())
	text := func() string { return string(r.Block(maxText)) }
	c.Repo, c.Name = text(), text()
	if c.Kind < catalog.ChangedRepository || c.Kind > catalog.ChangedDeletedTag {
		return c, fmt.Errorf("kind %d", c.Kind)
	}
	if c.Gone {
		return c, r.Err
	}
	switch c.Kind {
	case catalog.ChangedBlob:
		c.Blob = catalog.Blob{Digest: digest.Digest(c.Name), Size: int64(r.Uint(maxInt)), MediaType: text()}
	case catalog.ChangedManifest, catalog.ChangedDeletedManifest:
		m := &c.Manifest
		m.Digest, m.MediaType, m.ArtifactType, m.Subject = digest.Digest(c.Name), text(), text(), digest.Digest(text())
		last := ""
		for i := range r.Uint(uint64(len(r.B)) / 2) {
			key := text()
			if r.Err == nil && i > 0 && key <= last {
				return c, errors.New("annotations out of order")
			}
			if last = key; i == 0 {
				m.Annotations = make(map[string]string)
			}
			m.Annotations[key] = text()
			if r.Err != nil {
				break
			}
		}
		m.Pushed = time.Unix(0, r.Int())
		m.Bytes = slices.Clone(r.Block(maxRecord))
	case catalog.ChangedTag, catalog.ChangedDeletedTag:
		c.Target = digest.Digest(text())
	case catalog.ChangedLayer:
		c.Layer = catalog.Layer{
			Blob: digest.Digest(c.Name), DiffID: digest.Digest(text()), Entries: text(), Refused: text(),
			Size: int64(r.Uint(maxInt)), Files: int64(r.Uint(maxInt)),
			Recipe: catalog.Recipe{Key: text(), Digest: digest.Digest(text()), Size: int64(r.Uint(maxInt))},
		}
	case catalog.ChangedRootfs:
		c.Rootfs = catalog.Rootfs{ChainID: digest.Digest(c.Name), TOC: digest.Digest(text()), Key: text(), Index: text()}
	}
	if isDeleted(c.Kind) {
		c.Deleted = time.Unix(0, r.Int())
	}
	return c, r.Err
}
