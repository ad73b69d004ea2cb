package startup

import (
	"context"
	"time"

	"hydrofoil.dev/foil/internal/server/catalog"
)

// A build leaves the store before it for the streams that read it. It would be kept until the build after the next one, which for
// most images never comes: as many bytes again as all sets. So it goes when the streams that began before have
// ended, or are old enough that making what they still lack from the packs harms nobody.

// retireAfter is how long a store that was replaced stays.
const retireAfter = 10 * time.Minute

// retireLater lets the store before the last one of an image go, in a while.
func (s *Sets) retireLater(row catalog.StartupImage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if row.Previous == "" || s.closed {
		return
	}
	s.work.Go(func() {
		timer := time.NewTimer(s.o.Retire)
		defer timer.Stop()
		select {
		case <-timer.C:
			s.retire(row)
		case <-s.ctx.Done(): // the next New does it
		}
	})
}

// retire lets it go now.
func (s *Sets) retire(row catalog.StartupImage) {
	select {
	case s.slot <- struct{}{}: // a build would overwrite what is written here
	case <-s.ctx.Done():
		return
	}
	defer func() { <-s.slot }()
	now, err := s.o.Catalog.StartupImage(s.ctx, row.Repository, row.ChainID)
	if err == nil && now.Previous == row.Previous && now.Previous != "" {
		now.Previous = ""
		if err = s.o.Catalog.PutBuilt(s.ctx, now); err == nil {
			err = s.sweepObjects(s.ctx, imageOf(now), now)
		}
	}
	if err != nil && s.ctx.Err() == nil {
		s.o.Log.Warn("startup sets: a store that was replaced stays until the server is started again", "object", row.Previous, "error", err)
	}
}

// retireAll lets all go that an earlier process has left: its streams have ended with it.
func (s *Sets) retireAll(ctx context.Context) error {
	const page = 100
	for after := ""; ; {
		names, err := s.o.Catalog.ListRepositories(ctx, after, page)
		if err != nil || len(names) == 0 {
			return err
		}
		for _, name := range names {
			after = name
			images, err := s.o.Catalog.StartupImages(ctx, name)
			if err != nil {
				return err
			}
			for _, m := range images {
				if m.Previous != "" {
					s.retire(m)
				}
			}
		}
	}
}
