// Package images is what the worker remembers of each reference: a record on the
// disk, <root>/images/<hex of the reference's SHA-256>.json.
package images

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/locks"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/records"
)

// Image is what is remembered of one reference. It is not changed once it is in a
// Set.
type Image struct {
	Version  int           `json:"version"`
	Ref      string        `json:"ref"` // canonical
	Platform string        `json:"platform,omitempty"`
	Plain    bool          `json:"plain_http,omitempty"`
	Digest   digest.Digest `json:"digest"` // of the manifest
	Manifest []byte        `json:"manifest"`
	Config   []byte        `json:"config"`
	ChainID  digest.Digest `json:"chain_id"`
	// Rootfs is the one that it is mounted from. Older versions note none: theirs has the chain ID's key.
	Rootfs  origin.Key `json:"rootfs,omitempty"`
	Created time.Time  `json:"created"`
	// Entrypoint, Args and NoStartup are those of the pull that brings it, so that
	// a new daemon asks for the same startup set. Records of before they were noted
	// have none: the image's own service.
	Entrypoint []string `json:"entrypoint,omitzero"`
	Args       []string `json:"args,omitzero"`
	NoStartup  bool     `json:"no_startup,omitempty"`
	// Made says that it was made on this worker, and may be nowhere else.
	Made bool `json:"made,omitempty"`
}

// Version is that of records that are written now.
const Version = 1

// Set is all that is remembered.
type Set struct {
	dir string
	log *slog.Logger

	mu  locks.Mutex[locks.Images]
	all map[string]*entry // by reference
}

type entry struct {
	*Image
	used time.Time // when it was used last: the record's time of change on the disk
	why  string    // the last failure of its pull; empty while it is well
}

// Load reads every record below a root. One that cannot be read harms only
// itself: warn tells of it, and it is set aside.
//
// Errors: api.CodeUnsupported when a newer foil wrote a record.
func Load(root string, log *slog.Logger, warn func(format string, args ...any)) (*Set, error) {
	s := &Set{dir: filepath.Join(root, "images"), log: log, all: make(map[string]*entry)}
	names, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, err
	}
	for _, e := range names {
		path := filepath.Join(s.dir, e.Name())
		if strings.HasPrefix(e.Name(), records.Prefix) {
			_ = os.Remove(path)
			continue
		}
		if !strings.HasSuffix(e.Name(), ".json") {
			continue
		}
		img, err := load(path)
		if err == nil && s.path(img.Ref) != path {
			err = fmt.Errorf("it is the record of %s", img.Ref)
		}
		if newer := (*records.NewerError)(nil); errors.As(err, &newer) {
			return nil, api.Errorf(api.CodeUnsupported, "%w", err)
		}
		if err != nil {
			warn("image record %s cannot be used (%v); it was set aside as %s.bad: pull the image again", path, err, e.Name())
			_ = os.Rename(path, path+".bad")
			continue
		}
		s.all[img.Ref] = img
	}
	return s, nil
}

func load(path string) (*entry, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	img := &entry{Image: new(Image)}
	if err := json.Unmarshal(b, img.Image); err != nil {
		return nil, err
	}
	if fi, err := os.Stat(path); err == nil {
		img.used = fi.ModTime()
	}
	if err := records.CheckVersion(path, img.Version, Version); err != nil {
		return nil, err
	}
	if img.Rootfs == "" {
		img.Rootfs = origin.Key(img.ChainID)
	}
	return img, errors.Join(img.Digest.Validate(), img.ChainID.Validate(), img.Rootfs.Validate())
}

func (s *Set) path(ref string) string {
	h := sha256.Sum256([]byte(ref))
	return filepath.Join(s.dir, hex.EncodeToString(h[:])+".json")
}

// SetAside lists records that could not be read.
func (s *Set) SetAside() []string {
	bad, _ := filepath.Glob(filepath.Join(s.dir, "*.bad"))
	return bad
}

// Get returns what is remembered of a reference, or nil.
func (s *Set) Get(ref string) *Image {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.all[ref]; e != nil {
		return e.Image
	}
	return nil
}

// Len is how many references there are.
func (s *Set) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.all)
}

// Listed is an image with what changes of it.
type Listed struct {
	*Image
	Used time.Time // when it was used last
	Why  string    // the last failure of its pull; empty while it is well
}

// List returns all images, by reference.
func (s *Set) List() []Listed {
	s.mu.Lock()
	list := make([]Listed, 0, len(s.all))
	for _, e := range s.all {
		list = append(list, Listed{e.Image, e.used, e.why})
	}
	s.mu.Unlock()
	slices.SortFunc(list, func(a, b Listed) int { return strings.Compare(a.Ref, b.Ref) })
	return list
}

// Of lists the images that name a rootfs, by reference.
func (s *Set) Of(key origin.Key) []*Image {
	var list []*Image
	for _, img := range s.List() {
		if img.Rootfs == key {
			list = append(list, img.Image)
		}
	}
	return list
}

// Stage brings an image's record to the disk, but not to its place.
func (s *Set) Stage(img *Image) (records.Staged, error) {
	b, err := json.Marshal(img)
	if err != nil {
		return records.Staged{}, err
	}
	return records.Stage(s.path(img.Ref), b)
}

// Put gives a staged record its place: from now on the reference names this image.
// That it is durable is Sync's to wait for.
func (s *Set) Put(img *Image, record records.Staged) error {
	if err := record.Put(); err != nil {
		return err
	}
	s.mu.Lock()
	s.all[img.Ref] = &entry{Image: img}
	s.mu.Unlock()
	s.Touch(img.Ref)
	return nil
}

// Sync makes the names of records durable.
func (s *Set) Sync() error { return durable.Sync(s.dir) }

// Remove forgets a reference, durably.
func (s *Set) Remove(ref string) error {
	if err := os.Remove(s.path(ref)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := s.Sync(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, ref)
	return nil
}

// SetWhy notes why the pull of an image has failed; empty: it is well.
func (s *Set) SetWhy(ref, why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.all[ref]; e != nil {
		e.why = why
	}
}

// Touch makes an image the one that was used last, on the disk by its record's time of
// change. The clock alone does not say which was: there are hosts whose clock is
// set after they have started containers, and clocks that were ahead.
func (s *Set) Touch(ref string) {
	used := time.Now().Round(0) // by the clock that the others on the disk have
	s.mu.Lock()
	e := s.all[ref]
	if e == nil {
		s.mu.Unlock()
		return
	}
	for _, other := range s.all {
		if other != e && !other.used.Before(used) {
			used = other.used.Add(time.Millisecond)
		}
	}
	e.used = used
	s.mu.Unlock()
	if err := os.Chtimes(s.path(ref), used, used); err != nil {
		s.log.Debug("note that an image is used", "ref", ref, "error", err)
	}
}
