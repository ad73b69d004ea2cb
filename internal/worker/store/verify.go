package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/check"
	"hydrofoil.dev/foil/internal/worker/mounts"
	"hydrofoil.dev/foil/internal/worker/records"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

// Verify compares every local byte of a rootfs with its digest: the TOC and
// the metadata image, and of every content what is here, segment by segment.
// Bytes that have not arrived are counted, and are no error. The caller uses r.
func (s *Store) Verify(ctx context.Context, r *Rootfs, emit func(api.VerifyEvent) error) error {
	have, err := r.Read()
	if err != nil {
		return api.Errorf(api.CodeCorrupt, "%w: remove the image with `foil rm` and pull it again", err)
	}
	checker := check.New(have.TOC, r.ContentBytes(), emit)
	if meta := r.Record().Meta; meta != "" {
		got, err := records.Sum(r.Path(mounts.Image))
		if err != nil {
			return err
		}
		if got != meta {
			if err := checker.Bad("(metadata image)"); err != nil {
				return err
			}
		}
	}
	for i, id := range r.Arenas() {
		if err := s.verifyArena(ctx, checker, id, have.Place.In(i)); err != nil {
			return err
		}
	}
	return checker.End()
}

// verifyArena verifies the contents that lie in the arena of one rootfs.
func (s *Store) verifyArena(ctx context.Context, checker *check.Checker, id digest.Digest, here []int32) (failed error) {
	var leases Leases
	defer leases.End()
	s.mu.Lock()
	r := s.ownerLocked(id)
	if r != nil {
		leases.Take(r)
	}
	s.mu.Unlock()
	var src *rootfs.Contents
	if r != nil {
		src = r.Contents()
	}
	if src == nil {
		return api.Errorf(api.CodeCorrupt, "the arena of rootfs %s is gone: remove the image with `foil rm` and pull it again", id)
	}
	defer func() { failed = errors.Join(failed, src.Close()) }()
	found, err := checker.Arena(ctx, src, here)
	if err == nil && found != len(here) {
		err = api.Errorf(api.CodeCorrupt, "the arena of rootfs %s holds %d of the %d contents placed in it: remove the image with `foil rm` and pull it again", id, found, len(here))
	}
	return err
}

// hash hashes whole what lies in r's own arena, see check.Whole. A content that is not what its ID says has r
// quarantined.
func (s *Store) hash(ctx context.Context, r *Rootfs) (hashed bool, err error) {
	src := r.Contents()
	if src == nil || r.Own() < 0 {
		return src != nil, nil
	}
	defer func() { _ = src.Close() }()
	have, err := r.Read()
	if err != nil {
		return false, err
	}
	l, err := r.Layout(have)
	if err != nil {
		return false, err
	}
	hashed, err = check.Whole(ctx, src, have.TOC, have.Place.In(r.Own()), l.Offset)
	if wrong, ok := errors.AsType[*api.Error](err); ok && wrong.Code == api.CodeCorrupt {
		return false, s.Quarantine(r, err)
	}
	return hashed, err
}

// Quarantine has nothing served from r any more, now and by a new daemon. It returns why, or what it failed of as
// well.
func (s *Store) Quarantine(r *Rootfs, why error) error {
	r.Quarantine(why)
	rec := r.Record()
	if err := r.Save(&rec, durable.Replace); err != nil {
		return fmt.Errorf("%w; and that cannot be noted: %w", why, err)
	}
	return why
}
