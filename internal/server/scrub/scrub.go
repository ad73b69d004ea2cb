// Package scrub reads everything that rests below a server's root, compares it with its digests, and mends from
// one place what another one lost.
//
// A pass goes through these phases, each in the order of its names:
//
//	blobs     every blob that a repository holds, against its digest
//	packs     the pack's own table; every frame, against its segments' IDs
//	layers    entry lists, recipes (against their digests), and that every segment that a list names rests somewhere
//	rootfs    TOCs (against their digests), frame indices, orders
//	startup   every frame of the stores of startup pages, against their checksums and digests
//	manifests their bytes in the catalog, against their digests
//	journal   every object; and that the catalog could be rebuilt from them as it is
//
// # What is mended from what
//
//	a blob           its recipe and packs, if its tar stream is the blob (package recipe, Plain)
//	a pack           its sound frames move to a new pack, under a new name; the layers that need the others, or all of a pack
//	                 whose table is lost, are ingested again from their blobs
//	a list, a recipe its layer's blob
//	a TOC            the entry lists of its layers
//	an index, order  the packs' tables, and the image; an order by the next pull
//	startup pages    the packs, by the server
//	the journal      the catalog
//
// Nothing takes the place of what is damaged before its digest was compared. A blob that cannot be mended is moved out of
// the way, to damaged/ below the root: the registry asks for it to be pushed again then, instead of sending wrong bytes.
//
// # Being interrupted
//
// How far a pass is rests in scrub.json below the root, and the next one goes on there. What a
// mending that was cut short leaves behind is found by a later phase of the same pass: a segment that was forgotten is missing
// in a list, an index that names a pack which is gone is another one than the catalog's.
package scrub

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/ingest"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/readers"
)

// Options of a Scrubber.
type Options struct {
	// Root is the server's root, Catalog and Objects what is below it. Required.
	Root    string
	Catalog *sqlcat.Catalog
	Objects objects.Store
	// Ingester mends what is made of blobs. Required unless Check is set.
	Ingester *ingest.Ingester
	// Rate bounds what is read, bytes a second; 0: nothing does. What a mending reads is not counted.
	Rate int64
	// Every is the least time from the beginning of one pass of Always to that of the next; 0: a day.
	Every time.Duration
	// Check changes nothing, neither below the root nor in the catalog.
	Check bool
	// Elsewhere says that a blob that is not here is no loss: an upstream has it.
	Elsewhere bool

	// Exclude keeps others from writing or removing a blob until unlock is called; nil: there are no others.
	Exclude func(digest.Digest) (unlock func())
	// Readers are told who reads objects; nil: nobody is.
	Readers *readers.Readers
	// Remade is told of a rootfs whose frame index is another one now; nil: nobody is.
	Remade func(toc digest.Digest)
	// LostSet has the startup pages of an image built anew; nil: the server does it when it starts.
	LostSet func(ctx context.Context, m catalog.StartupImage, why error)

	Progress func(Progress)     // is called now and then; nil: it is not
	Metrics  *Metrics           // nil: nobody counts
	Log      *slog.Logger       // nil: slog.Default
	At       func(point string) // is called at named points, for tests; nil: it is not
}

// Progress is how far a pass is.
type Progress struct {
	Phase   string
	Objects int64 // that were read, of all phases
	Bytes   int64
	Damaged int
}

// Count is what was read of one kind.
type Count struct {
	Objects int64 `json:"objects"`
	Bytes   int64 `json:"bytes"`
}

// Finding is something that is lost or damaged.
type Finding struct {
	Kind string `json:"kind"` // its phase
	Key  string `json:"key"`  // of the object, or name in the catalog
	Why  string `json:"why"`
	// Of is the blob, the layer, the manifest or the chain ID that it is of; empty for packs and the journal.
	Of digest.Digest `json:"of,omitempty"`
	// Mended says how; empty: it is not.
	Mended string `json:"mended,omitempty"`
	// Images are those that need it, REPOSITORY:TAG or REPOSITORY@DIGEST.
	Images []string `json:"images,omitempty"`
}

// Report is what a pass has found.
type Report struct {
	Began    time.Time        `json:"began"`
	Ended    time.Time        `json:"ended,omitzero"` // of a pass that was not cut short
	Took     time.Duration    `json:"took"`           // without interruptions
	Resumed  int              `json:"resumed"`        // how often it was
	Checked  map[string]Count `json:"checked"`
	Findings []Finding        `json:"findings,omitempty"`
	Mended   int              `json:"mended"`
	Unmended int              `json:"unmended"`
	// Unlisted counts findings beyond those listed.
	Unlisted int `json:"unlisted,omitempty"`
	// Remade counts indices and orders that were not those of today, and were made anew without having been damaged.
	Remade int `json:"remade"`
}

const (
	maxFindings = 10_000
	maxImages   = 20 // named by a finding
	maxMissing  = 1 << 20
	saveEach    = 5 * time.Second
	pageSize    = 500
)

// saved is a pass that is not at its end, in scrub.json.
type saved struct {
	Report Report `json:"report"`
	Phase  int    `json:"phase"`
	After  string `json:"after"` // the last name of the phase that is done
}

// Scrubber makes one pass after the other. It is for one goroutine.
type Scrubber struct {
	o     Options
	store *paced
	packs *dedup.Store
	s     saved
	last  time.Time // when s was saved
	since time.Time // when Took was brought up to date
	// missing are segments that a check has found to be lost, and that a pass that mends would have forgotten.
	missing map[segment.ID]bool
}

// New returns a Scrubber.
func New(o Options) *Scrubber {
	if o.Progress == nil {
		o.Progress = func(Progress) {}
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.At == nil {
		o.At = func(string) {}
	}
	if o.Exclude == nil {
		o.Exclude = func(digest.Digest) func() { return func() {} }
	}
	if o.Remade == nil {
		o.Remade = func(digest.Digest) {}
	}
	store := newPaced(o.Objects, o.Rate)
	return &Scrubber{o: o, store: store, packs: &dedup.Store{Objects: store, Catalog: o.Catalog}}
}

// phases are in this order.
var phases = []string{"blobs", "packs", "layers", "rootfs", "startup", "manifests", "journal"}

// run goes through the names of a phase after the given one.
func (s *Scrubber) run(ctx context.Context, name, after string) error {
	switch name {
	case "blobs":
		return s.blobs(ctx, after)
	case "packs":
		return s.everyPack(ctx, after)
	case "layers":
		return s.layers(ctx, after)
	case "rootfs":
		return s.rootfs(ctx, after)
	case "startup":
		return s.startup(ctx, after)
	case "manifests":
		return s.manifests(ctx)
	default:
		return s.journal(ctx)
	}
}

// Pass goes on with the pass that was interrupted, or begins one, and returns what it found when it is at its end. Errors, with what was
// found so far: those of reading and writing that are no damage; ctx's.
func (s *Scrubber) Pass(ctx context.Context) (*Report, error) {
	if err := s.load(); err != nil {
		return nil, err
	}
	s.since, s.last, s.missing = time.Now(), time.Now(), map[segment.ID]bool{}
	for ; s.s.Phase < len(phases); s.s.Phase, s.s.After = s.s.Phase+1, "" {
		name := phases[s.s.Phase]
		if err := s.run(ctx, name, s.s.After); err != nil {
			if ctx.Err() != nil {
				err = ctx.Err()
			}
			return s.report(), errors.Join(fmt.Errorf("scrub %s: %w", name, err), s.save())
		}
		s.o.At(name)
	}
	if err := s.nameImages(ctx); err != nil {
		return s.report(), fmt.Errorf("scrub: name images: %w", err)
	}
	r := s.report()
	r.Ended = time.Now().UTC()
	s.o.Metrics.passed(r)
	return r, s.finish(r)
}

func (s *Scrubber) report() *Report {
	r := &s.s.Report
	r.Took += time.Since(s.since)
	s.since = time.Now()
	r.Mended = 0
	for _, f := range r.Findings {
		if f.Mended != "" {
			r.Mended++
		}
	}
	r.Unmended = len(r.Findings) - r.Mended + r.Unlisted
	return r
}

// done says that a name of the phase was looked at: so many bytes, of so many objects.
func (s *Scrubber) done(kind, name string, n, bytes int64) error {
	s.s.After = name
	c := s.s.Report.Checked[kind]
	c.Objects, c.Bytes = c.Objects+n, c.Bytes+bytes
	s.s.Report.Checked[kind] = c
	s.o.Metrics.read(kind, bytes)
	s.progress()
	if time.Since(s.last) < saveEach {
		return nil
	}
	return s.save()
}

func (s *Scrubber) progress() {
	p := Progress{Phase: phases[s.s.Phase], Damaged: len(s.s.Report.Findings)}
	for _, c := range s.s.Report.Checked {
		p.Objects, p.Bytes = p.Objects+c.Objects, p.Bytes+c.Bytes
	}
	s.o.Progress(p)
}

// found records something that is lost or damaged, and says it in the log.
func (s *Scrubber) found(f Finding) error {
	f.Kind = phases[s.s.Phase]
	r := &s.s.Report
	// A name is looked at again after an interruption.
	for i := range r.Findings {
		if r.Findings[i].Kind == f.Kind && r.Findings[i].Key == f.Key {
			r.Findings = append(r.Findings[:i], r.Findings[i+1:]...)
			break
		}
	}
	if len(r.Findings) < maxFindings {
		r.Findings = append(r.Findings, f)
	} else if f.Mended == "" {
		r.Unlisted++
	}
	s.o.Metrics.found(&f)
	log := s.o.Log.With("kind", f.Kind, "object", f.Key, "why", f.Why)
	if f.Mended != "" {
		log.Warn("scrub: mended", "how", f.Mended)
	} else {
		log.Error("scrub: damaged, and not mended")
	}
	return s.save()
}

// besidePrefix begins the names of directories below the root that a pass needs until its end.
const besidePrefix = "scrub-"

func stateFile(root string) string { return filepath.Join(root, "scrub.json") }

// load reads how far the last pass came.
func (s *Scrubber) load() error {
	fresh := saved{Report: Report{Began: time.Now().UTC(), Checked: map[string]Count{}}}
	s.s = fresh
	if s.o.Check {
		return nil
	}
	left, err := filepath.Glob(filepath.Join(s.o.Root, besidePrefix+"*"))
	for _, dir := range left {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	if err != nil {
		return err
	}
	b, err := os.ReadFile(stateFile(s.o.Root))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var old saved
	if err := json.Unmarshal(b, &old); err != nil || old.Phase >= len(phases) || old.Phase < 0 || old.Report.Checked == nil {
		return nil // it says nothing: begin anew
	}
	old.Report.Resumed++
	s.s = old
	return nil
}

func (s *Scrubber) save() error {
	if s.o.Check {
		return nil
	}
	s.last = time.Now()
	s.report()
	return s.write(s.s)
}

// finish records a pass that is at its end.
func (s *Scrubber) finish(r *Report) error {
	if s.o.Check {
		return nil
	}
	return s.write(saved{Report: *r, Phase: len(phases)})
}

func (s *Scrubber) write(v saved) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return durable.Replace(stateFile(s.o.Root), b)
}

// Last returns what the last pass has found that was not cut short; nil: there is none, or another one is under way.
func Last(root string) (*Report, error) {
	b, err := os.ReadFile(stateFile(root))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var v saved
	if err == nil {
		err = json.Unmarshal(b, &v)
	}
	if err != nil || v.Report.Ended.IsZero() {
		return nil, err
	}
	return &v.Report, nil
}
