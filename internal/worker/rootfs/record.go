package rootfs

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/contents"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/records"
)

// Files of a rootfs's directory.
const (
	RecordName    = "rootfs.json"
	TOCName       = "toc"
	PlacementName = "placement"
	ContentsName  = "contents"
	OldMetaName   = "meta.erofs.old"
	// ProofName is a directory: the entry lists of layers that were proven (package proof).
	ProofName = "proof"
	// LayerPrefix begins the names of layers that were made on this worker (package commit).
	LayerPrefix = "layer-"
)

// Record is rootfs.json.
type Record struct {
	Version int `json:"version"`
	// Origin is the registry for whose images it came; empty: not known, so that it is nobody's but the images'
	// that name it.
	Origin  string        `json:"origin,omitempty"`
	ChainID digest.Digest `json:"chain_id"`
	TOC     digest.Digest `json:"toc"` // of the file toc
	// Arenas are the IDs of the rootfs whose arenas hold its contents, in the
	// order of the EROFS devices. Its own is among them unless it is empty.
	Arenas []digest.Digest `json:"arenas"`
	// Placement is the SHA-256 of the file placement.
	Placement string `json:"placement"`
	// Meta is the SHA-256 of meta.erofs.
	Meta     string    `json:"meta"`
	Files    int       `json:"files"`
	Contents int64     `json:"contents"` // bytes
	Complete bool      `json:"complete"` // all of its own arena is here, and durable
	Created  time.Time `json:"created"`
	// Hashed: all contents of its own arena that are not one segment with the content's ID were hashed whole,
	// here, and are their IDs. Only then may they be lent.
	Hashed bool `json:"hashed,omitempty"`
	// Proof says what is known of where its TOC came from.
	Proof Proof `json:"proof,omitempty"`
	// Unwalled: a version that knew no origins laid it out. It may have contents of any origin, and lends none.
	Unwalled bool `json:"unwalled,omitempty"`
	// Weak names the first server that described it, or sent of its contents, though nothing showed that it was this
	// server, and says why; empty: none did, or a version that noted none laid it out.
	Weak string `json:"weak,omitempty"`
	// Since is from when on it has been here unproven; a version that proved nothing noted none.
	Since time.Time `json:"since,omitzero"`
	// Made says that it was made on this worker, of a container: no server knows it.
	Made bool `json:"made,omitempty"`
	// Wrong says which content was hashed whole, and is not what its ID says, or why it is not what its image's
	// layers make; empty: nothing. Nothing is served from it.
	Wrong string `json:"wrong,omitempty"`
	// Lying are images, by their manifests, of which the config names other layers than the manifest, and says which:
	// none starts. Other images of this rootfs do.
	Lying map[digest.Digest]string `json:"lying,omitempty"`
}

// RecordVersion is that of records that are written now. Those of version 1 have no origin.
const RecordVersion = 2

// Proof is what is known of where the TOC of a rootfs came from.
type Proof string

const (
	// Served, which "" is as well: a server said so, and nobody has compared it with the image's layers.
	Served Proof = "served"
	// Proven: all layers were hashed here, are those that the image's config names, and make this TOC.
	Proven Proof = "proven"
)

// Overdue reports whether a rootfs has been here unproven for longer than within; 0: for ever is not too long.
func (rec *Record) Overdue(within time.Duration, now time.Time) bool {
	return within > 0 && rec.Proof != Proven && !rec.Since.IsZero() && now.Sub(rec.Since) > within
}

// key is the one that a record's directory should have.
func (rec *Record) key() origin.Key {
	if rec.Unwalled {
		return origin.Key(rec.ChainID)
	}
	return origin.KeyOf(rec.Origin, rec.ChainID, rec.TOC)
}

// Save replaces the record on the disk, by durable.Replace or records.Replace.
func (r *Rootfs) Save(rec *Record, write func(path string, data []byte) error) error {
	b, err := json.MarshalIndent(rec, "", "\t")
	if err != nil {
		return err
	}
	return write(r.Path(RecordName), b)
}

// readRecord reads a rootfs's record from a file of its directory.
func (r *Rootfs) readRecord(name string) error {
	path := r.Path(name)
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, &r.rec); err != nil {
		return fmt.Errorf("%s: it is damaged: %w", path, err)
	}
	if err := records.CheckVersion(path, r.rec.Version, RecordVersion); err != nil {
		return err
	}
	if err := errors.Join(r.rec.ChainID.Validate(), r.rec.TOC.Validate()); err != nil {
		return err
	}
	if r.rec.Version == 1 {
		r.rec.Origin, r.rec.Unwalled = "", true
	}
	if key := r.rec.key(); key != r.Key() {
		return fmt.Errorf("it is the record of rootfs %s, by chain ID %s", key, r.rec.ChainID)
	}
	return nil
}

// KeyOf is the key in the name of a directory.
func KeyOf(dir string) origin.Key {
	hex, _, _ := strings.Cut(filepath.Base(dir), ".")
	return origin.KeyOfName(hex)
}

// Load reads a rootfs's record, and maps its contents file.
func (r *Rootfs) Load() error {
	if err := r.readRecord(RecordName); err != nil {
		return err
	}
	var err error
	if r.contents, err = contents.Open(r.Path(ContentsName)); err == nil && !r.contents.Old() {
		return nil
	}
	r.contents.Close()
	r.contents = nil
	// It is derived: make it again.
	have, err := r.Read()
	if err != nil {
		return err
	}
	l, err := r.Layout(have)
	if err != nil {
		return err
	}
	if err := contents.Write(r.Path(ContentsName), have.TOC, l); err != nil {
		return err
	}
	r.contents, err = contents.Open(r.Path(ContentsName))
	return err
}

// Files is what is on the disk of how a rootfs is made up.
type Files struct {
	TOC   *toc.TOC
	Place Placement
}

// Read reads and verifies TOC and placement.
func (r *Rootfs) Read() (*Files, error) {
	b, err := os.ReadFile(r.Path(TOCName))
	if err != nil {
		return nil, err
	}
	if got := digest.FromBytes(b); got != r.rec.TOC {
		return nil, fmt.Errorf("TOC of rootfs %s has digest %s, not %s: the file was damaged", r.rec.ChainID, got, r.rec.TOC)
	}
	t, err := toc.Decode(b)
	if err != nil {
		return nil, err
	}
	if b, err = os.ReadFile(r.Path(PlacementName)); err != nil {
		return nil, err
	}
	if Sum(b) != r.rec.Placement {
		return nil, fmt.Errorf("placement of rootfs %s: the file was damaged", r.rec.ChainID)
	}
	place, err := decodePlacement(b, t, len(r.rec.Arenas))
	return &Files{t, place}, err
}

// EncodedTOC reads the TOC as the server sent it.
func (r *Rootfs) EncodedTOC() ([]byte, error) { return os.ReadFile(r.Path(TOCName)) }

// Layout returns the layout of the rootfs's own arena.
func (r *Rootfs) Layout(have *Files) (*arena.Layout, error) {
	own := r.Own()
	return arena.NewLayout(have.TOC, func(c int) bool { return own >= 0 && int(have.Place[c]) == own })
}

// Placement says for every content of a TOC which arena holds it: an index into
// the arenas of the record. On disk: 2 bytes a content, little-endian.
type Placement []uint16

// In lists the contents in one arena.
func (p Placement) In(arena int) []int32 {
	var list []int32
	for c, d := range p {
		if int(d) == arena {
			list = append(list, int32(c))
		}
	}
	return list
}

// Encode returns what is on the disk.
func (p Placement) Encode() []byte {
	b := make([]byte, 0, 2*len(p))
	for _, d := range p {
		b = binary.LittleEndian.AppendUint16(b, d)
	}
	return b
}

func decodePlacement(b []byte, t *toc.TOC, arenas int) (Placement, error) {
	if len(b) != 2*len(t.Contents) {
		return nil, fmt.Errorf("placement of %d bytes for %d contents", len(b), len(t.Contents))
	}
	p := make(Placement, len(t.Contents))
	for i := range p {
		p[i] = binary.LittleEndian.Uint16(b[2*i:])
		if int(p[i]) >= arenas {
			return nil, fmt.Errorf("placement of content %d in arena %d of %d", i, p[i], arenas)
		}
	}
	return p, nil
}

// Sum returns a SHA-256 in hex.
func Sum(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}
