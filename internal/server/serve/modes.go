package serve

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/convert"
	"hydrofoil.dev/foil/internal/server/modes"
	"hydrofoil.dev/foil/internal/server/popularity"
	"hydrofoil.dev/foil/internal/server/reread"
	"hydrofoil.dev/foil/internal/server/restore"
	"hydrofoil.dev/foil/internal/server/stores"
)

// DefaultMode is that of repositories, unless somebody says otherwise.
const DefaultMode = "selective"

// saveEach is how often popularity is written down: what was pulled since is forgotten if the server is killed.
const saveEach = time.Minute

// modesOf is where the server's blobs rest: by which rules, and who sees to it.
type modesOf struct {
	rules      func() *modes.Rules
	popularity *popularity.Table
	pins       restore.Pins
	catalog    catalog.Repositories
	stores     *stores.Set
	converter  *convert.Converter // set by openConverter
}

// readModes reads the rules, and what is known of popularity.
func (s *Server) readModes(p *parts) (*modesOf, error) {
	name := s.opts.Mode
	if name == "" {
		name = DefaultMode
	}
	mode, err := modes.Parse(name)
	if err != nil {
		return nil, fmt.Errorf("mode: %w", err)
	}
	m := &modesOf{catalog: p.local, stores: p.here}
	fixed := modes.Default(mode)
	m.rules = func() *modes.Rules { return fixed }
	if s.opts.Modes != "" {
		file := &reread.File[*modes.Rules]{Path: s.opts.Modes, Parse: func(b []byte) (*modes.Rules, error) { return modes.ParseRules(b, mode) },
			Failed:  func(err error) { s.log.Error("modes are as they were: the file cannot be used", "error", err) },
			Changed: func() { s.log.Info("modes have changed: blobs are converted") }}
		if fixed, err = file.Get(); err != nil {
			return nil, fmt.Errorf("modes: %w", err)
		}
		m.rules = func() *modes.Rules {
			r, _ := file.Get() // what was read before counts
			return r
		}
	}
	if most := fixed.Most(); most > p.here.Len() {
		s.log.Warn("a mode wants more intact copies than there are stores: each store has one (foil serve --store adds some)", "wanted", most, "stores", p.here.Len())
	}
	for _, o := range p.here.Others() {
		if stores.SameDisk(o.Dir, s.opts.Root) {
			s.log.Warn("a store is on the disk of the root: its copies do not survive it", "store", o.Dir)
		}
		if err := o.Err(); err != nil {
			s.log.Error("a store is away", "error", err)
		}
	}
	file := filepath.Join(s.opts.Root, "popularity")
	m.popularity, err = popularity.Open(file, time.Now())
	if errors.Is(err, popularity.ErrCorrupt) {
		s.log.Warn("it is not known any more which blobs are pulled often: all stay for a while", "error", err)
		m.popularity, err = popularity.New(time.Now()), nil
	}
	if err != nil {
		return nil, err
	}
	save := func() {
		if err := m.popularity.Save(file, time.Now()); err != nil {
			s.log.Warn("which blobs are pulled often is not written down", "error", err)
		}
	}
	save() // when it began
	s.closers = append(s.closers, func() error { save(); return nil }, background(func(ctx context.Context) {
		tick := time.NewTicker(saveEach)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				save()
			}
		}
	}))
	return m, nil
}

// openConverter begins to convert.
func (s *Server) openConverter(p *parts) {
	if p.modes == nil {
		return
	}
	o := convert.Options{
		Catalog: p.local, Stores: p.here, Blobs: p.blobs, Pins: &p.modes.pins, Popularity: p.modes.popularity, Rules: p.modes.rules,
		Exclude: p.registry.Exclude, RemoveUnheld: p.registry.RemoveUnheld, Readers: p.readers, Room: p.space.full,
		Interval: s.opts.Convert.Interval, At: s.opts.Convert.At, Log: s.log,
	}
	p.modes.converter = convert.New(o)
	s.closers = append(s.closers, p.modes.converter.Close)
}

// wanted says whether a blob without an intact copy is to have one.
func (m *modesOf) wanted(ctx context.Context, d digest.Digest) bool {
	repos, err := m.catalog.Holders(ctx, d)
	if err != nil {
		return false
	}
	now := time.Now()
	score, pushed := m.popularity.Get(d, now)
	n, _ := m.rules().Want(repos, modes.State{Score: score, Age: now.Sub(pushed)}, m.stores.Len())
	return n > 0
}

func (m *modesOf) pushed(d digest.Digest) { m.popularity.Pushed(d, time.Now()) }

// intact makes a blob an object that rests in packs alone, and keeps it one until release. A blob that is nowhere is left to who
// reads it.
func (p *parts) intact(ctx context.Context, d digest.Digest) (release func(), err error) {
	defer p.registry.Exclude(d)()
	release = p.modes.pins.Pin(d)
	_, err = p.here.Stat(ctx, catalog.BlobKey(d))
	if stores.Absent(err) {
		err = p.blobs.Heal(ctx, d)
		if restore.Damage(err) && p.blobs.Repair(ctx, d) == nil {
			err = p.blobs.Heal(ctx, d)
		}
		if errors.Is(err, restore.ErrUnproven) {
			err = nil
		}
	}
	if err != nil {
		release()
		return nil, err
	}
	return release, nil
}
