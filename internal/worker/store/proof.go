package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/mounts"
	"hydrofoil.dev/foil/internal/worker/proof"
	"hydrofoil.dev/foil/internal/worker/records"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

// Mounted reads the contents of a complete rootfs where its mount reads them: by its placement, in its own arena
// and in those of others. It is for one goroutine, and must be closed.
type Mounted struct {
	Files   *Files
	offsets []int64
	arenas  []*rootfs.Contents
	alone   []bool // nobody else reads by way of the arena's page cache
	read    int64  // since it was dropped
	leases  Leases
}

// Mounted returns what reads the contents of a rootfs, which the caller uses.
func (s *Store) Mounted(r *Rootfs) (_ *Mounted, err error) {
	if !r.Complete() {
		return nil, fmt.Errorf("rootfs %s is not complete", r.ChainID())
	}
	m := &Mounted{}
	defer func() {
		if err != nil {
			m.Close()
		}
	}()
	if m.Files, err = r.Read(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	for _, id := range r.Arenas() {
		if other := s.ownerLocked(id); other != nil {
			m.leases.Take(other)
		}
	}
	s.mu.Unlock()
	m.offsets, err = s.offsets(r, m.Files, nil, func(_ int, other *Rootfs) error {
		src := other.Contents()
		if src == nil {
			return fmt.Errorf("what the arena of rootfs %s holds is not known", other.ID())
		}
		m.arenas = append(m.arenas, src)
		m.alone = append(m.alone, other.State() == rootfs.Lending || other.Mount().Direct())
		return nil
	})
	return m, err
}

// ReadAt reads bytes of a content, by its number in the TOC.
func (m *Mounted) ReadAt(content int, b []byte, off int64) error {
	i := m.Files.Place[content]
	src, at := m.arenas[i], m.offsets[content]+off
	if !src.Holds(at, int64(len(b))) {
		return errors.New("bytes that lie in another arena are not there")
	}
	if _, err := src.ReadAt(b, at); err != nil {
		return err
	}
	if m.read += int64(len(b)); m.read >= 32<<20 {
		m.drop()
	}
	return nil
}

// drop has no pages stay in memory that nobody else wants.
func (m *Mounted) drop() {
	m.read = 0
	for i, src := range m.arenas {
		if !m.alone[i] {
			continue
		}
		if f, err := src.File(); err == nil {
			_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
		}
	}
}

// Close lets go of everything.
func (m *Mounted) Close() {
	m.drop()
	for _, src := range m.arenas {
		_ = src.Close()
	}
	m.leases.End()
}

// SameMeta reports whether the metadata image of a rootfs is the one that its TOC and its placement make.
func (s *Store) SameMeta(ctx context.Context, r *Rootfs, have *Files) (bool, error) {
	planned, err := s.planMeta(r, have, nil)
	if err != nil {
		return false, err
	}
	h := sha256.New()
	if err := planned.Write(h); err != nil {
		return false, err
	}
	got, err := records.Sum(r.Path(mounts.Image))
	if err != nil {
		return false, err
	}
	return got == hex.EncodeToString(h.Sum(nil)), context.Cause(ctx)
}

// Proven notes that a rootfs is what its image's layers make, for ever.
func (s *Store) Proven(r *Rootfs) error {
	rec := r.Record()
	rec.Proof = rootfs.Proven
	if err := r.Save(&rec, durable.Replace); err != nil {
		return fmt.Errorf("note that rootfs %s is proven: %w", r.ChainID(), err)
	}
	r.SetProven()
	return nil
}

// Lying notes that an image of a rootfs, by its manifest, has a config of other layers. named are the manifests of the
// images that name the rootfs; what is known of others is forgotten.
func (s *Store) Lying(r *Rootfs, manifest digest.Digest, why string, named []digest.Digest) error {
	rec := r.Record()
	lying := map[digest.Digest]string{manifest: why}
	for _, d := range named {
		if why, ok := rec.Lying[d]; ok {
			lying[d] = why
		}
	}
	r.SetLying(lying)
	rec.Lying = lying
	if err := r.Save(&rec, durable.Replace); err != nil {
		return fmt.Errorf("note that image %s of rootfs %s is not what it says: %w", manifest, r.ChainID(), err)
	}
	return nil
}

// FillWeakly notes, before the first byte, that a server sends of a rootfs though nothing shows that it is this server:
// pages of a startup set are what that one says they are. The rootfs is recorded, and only its filler calls this.
func (s *Store) FillWeakly(r *Rootfs, server string) error {
	if server == "" || r.Proof() == rootfs.Proven || !r.SetWeak(server) {
		return nil
	}
	rec := r.Record()
	if err := r.Save(&rec, durable.Replace); err != nil {
		return fmt.Errorf("note who sends rootfs %s: %w", r.ChainID(), err)
	}
	return nil
}

// ProofDir is where the proof of a rootfs keeps what is known of its layers.
func ProofDir(r *Rootfs) string { return r.Path(rootfs.ProofName) }

// KnownLayer returns the entry list of a layer that another rootfs of the same registry has proven, or "".
func (s *Store) KnownLayer(r *Rootfs, diffID digest.Digest) string {
	for _, other := range s.List() {
		if other == r || other.Origin() == "" || other.Origin() != r.Origin() || other.Unwalled() {
			continue
		}
		path := proof.ListPath(ProofDir(other), diffID)
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	return ""
}

// CountUnproven has the time begin in which rootfs must be proven that an older version left.
func (s *Store) CountUnproven(now time.Time) {
	for _, r := range s.List() {
		if rec := r.Record(); !rec.Since.IsZero() || rec.Proof == rootfs.Proven || r.Broken() != nil {
			continue
		}
		r.Unproven(now)
		rec := r.Record()
		if err := r.Save(&rec, durable.Replace); err != nil {
			s.log.Warn("note from when on a rootfs is to be proven", "rootfs", r.ChainID(), "error", err)
		}
	}
}

// MayStart returns an error if no container may start on a rootfs, since it has been unproven for longer than within.
func MayStart(r *Rootfs, image, why string, within time.Duration) error {
	rec := r.Record()
	if !rec.Overdue(within, time.Now()) {
		return nil
	}
	if why == "" {
		why = "nobody has tried yet"
	}
	return api.Errorf(api.CodeCorrupt, "image %s was not proven within %v (%s), and starts no new container: see that its registry can be reached, and try `foil verify --proof %s`; or remove it, and pull it again", image, within, why, image)
}
