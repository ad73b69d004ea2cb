package snapshotter

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/containerd/containerd/v2/pkg/snapshotters"

	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/worker/node"
	"hydrofoil.dev/foil/internal/worker/pull"
)

// expectation is an image that containerd has resolved, and will ask for if it
// pulls: its snapshots are made while containerd stores manifest and config, so
// that the first layer's answer waits for no disk. Until containerd asks they are
// nobody's: their records say expected, and when it does not ask they go again, as
// they do when it asks for something else that shares a layer with them.
//
// So that they go when the daemon is killed, too, expected/HASH names them, from
// before they are in the metadata until they are claimed. It is not synced: it is
// for the kills that the page cache survives. After those that it does not,
// containerd starts as well, and then removes what it does not know.
//
// Without it a start of redis through CRI took 0.05 s more, of 0.4 (docs/results.md,
// "Through CRI").
type expectation struct {
	done  chan struct{} // closed when they are made, or cannot be
	made  []*record     // lowest first; set before done is closed
	timer *time.Timer   // ends it, unless it was asked for
	asked bool          // for; guarded by Snapshotter.mu
}

const (
	// expectFor is how long containerd may take from resolving an image to asking
	// for its first layer. The node keeps its stream open for about as long.
	expectFor = 15 * time.Second
	// mostExpected bounds how many images are.
	mostExpected = 8
)

// expected is the file of an expectation, JSON.
type expected struct {
	Boot  string   `json:"boot"` // the kernel's boot_id
	Names []string `json:"names"`
}

// expectedFile is where the expectation of an image is kept.
func (s *Snapshotter) expectedFile(image string) string {
	return filepath.Join(s.opts.Dir, "expected", filepath.Base(s.marker(image)))
}

// Expect says that containerd has resolved an image, and what its manifest and
// config are. It returns at once.
func (s *Snapshotter) Expect(h *pull.Header) {
	if s.opts.Node == nil || s.opts.Node.Has(h.Name) {
		return // nothing is to be waited for
	}
	p, err := layersOf(h.Manifest.Bytes, h.Config.Bytes)
	if err != nil || len(p.chains) == 0 {
		return // whoever asks for it is told
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.pulls[h.Name] != nil || s.asking[h.Name] > 0 || s.expected[h.Name] != nil || len(s.expected) >= mostExpected {
		return
	}
	if r, ok := s.refused[h.Name]; ok && time.Now().Before(r.until) {
		return // it goes the plain way
	}
	e := &expectation{done: make(chan struct{})}
	e.timer = time.AfterFunc(expectFor, func() { s.expire(h.Name, e) })
	s.expected[h.Name] = e
	s.work.Go(func() {
		defer close(e.done)
		if err := s.expect(h, p, e); err != nil {
			s.log.Debug("the snapshots of an image are not made before containerd asks for it", "image", h.Name, "reason", err)
		}
	})
}

func (s *Snapshotter) expect(h *pull.Header, p *pulled, e *expectation) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.expected[h.Name] != e {
		return fmt.Errorf("it is not expected any more")
	}
	parent, first := "", 0
	for ; first < len(p.chains); first++ {
		there := s.find(p.chains[first], parent)
		if there == nil {
			break
		}
		if there.expected {
			return fmt.Errorf("another image is expected that has a layer of it")
		}
		parent = there.Name
	}
	if first == len(p.chains) {
		return fmt.Errorf("they are there")
	}
	made, err := s.makeLazy(context.Background(), "expected/"+h.Name, parent, h.Name, p, first, nil, map[string]string{
		snapshotters.TargetRefLabel:            h.Name,
		snapshotters.TargetManifestDigestLabel: h.Manifest.Digest.String(),
	})
	if err != nil {
		_ = os.Remove(s.expectedFile(h.Name))
		// It may be half written, or not be durable. Nobody relies on it: who asks
		// for the image waits for this.
		_ = os.Remove(s.marker(h.Name))
		return err
	}
	e.made = made
	return nil
}

// noteExpected writes the file of an expectation, and the marker of its image,
// which has to be durable before the image is pulled.
func (s *Snapshotter) noteExpected(image string, made []*record) error {
	x := expected{Boot: s.boot}
	for _, r := range made {
		x.Names = append(x.Names, r.Name)
	}
	b, err := json.Marshal(x)
	if err != nil {
		return err
	}
	if err := os.WriteFile(s.expectedFile(image), b, 0o600); err != nil {
		return err
	}
	return os.WriteFile(s.marker(image), []byte(image), 0o600)
}

// claim makes the snapshots that were made for an image's header those of the
// image, of which containerd asks for the given layer, and returns the record of
// its rootfs, which has held now. It returns nil when there are none, or not as
// they have to be: then there are none of this image's layers any more that are
// only expected. Called with mu held.
func (s *Snapshotter) claim(ctx context.Context, name, parent string, p *pulled, i int, held *node.Held) *record {
	for other, e := range s.expected {
		if other != name && slices.ContainsFunc(e.made, func(r *record) bool { return slices.Contains(p.chains, r.Chain) }) {
			s.unexpect(ctx, other)
		}
	}
	e, here := s.expected[name], s.find(p.chains[i], parent)
	if e == nil || here == nil || !here.expected {
		return nil
	}
	rootfs := e.made[len(e.made)-1]
	gone := slices.ContainsFunc(e.made, func(r *record) bool { return s.records[r.ID] != r })
	err := s.ownRoot(rootfs, held)
	if err == nil && !gone && !p.held.Complete {
		err = os.Remove(s.expectedFile(name))
	}
	if gone || p.held.Complete || err != nil {
		s.unexpect(ctx, name)
		return nil
	}
	e.timer.Stop()
	delete(s.expected, name)
	for _, r := range e.made {
		r.expected = false
	}
	rootfs.held = held
	return rootfs
}

// ownRoot gives the directory of an expected rootfs the owner that the mount has,
// which was not known when it was made.
func (s *Snapshotter) ownRoot(r *record, held *node.Held) error {
	uid, gid, err := ownerOf(held.Mount)
	if err != nil {
		return err
	}
	if u, g, err := ownerOf(s.fsDir(r.ID)); err != nil || u == uid && g == gid {
		return err
	}
	if err := os.Chown(s.fsDir(r.ID), uid, gid); err != nil {
		return err
	}
	return durable.Sync(s.fsDir(r.ID))
}

// expire ends an expectation that nobody has asked for. What the node has begun
// of the image, it removes itself; an image that is here is somebody else's.
func (s *Snapshotter) expire(name string, e *expectation) {
	<-e.done
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.expected[name] != e || e.asked {
		return
	}
	s.unexpect(context.Background(), name)
	if s.rootfsOf(name) == nil {
		_ = os.Remove(s.marker(name))
	}
}

// settled ends an expectation of an image that containerd has asked for, if it
// has come to nothing.
func (s *Snapshotter) settled(ctx context.Context, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unexpect(ctx, name)
}

// unexpect removes what was made for an image that was expected. Called with mu
// held.
func (s *Snapshotter) unexpect(ctx context.Context, name string) {
	e := s.expected[name]
	if e == nil || s.closed {
		return
	}
	e.timer.Stop()
	delete(s.expected, name)
	s.removeExpected(ctx, name, e.made)
}

// removeExpected removes snapshots, lowest first, that nobody has claimed. Called
// with mu held.
func (s *Snapshotter) removeExpected(ctx context.Context, image string, made []*record) {
	for _, r := range slices.Backward(made) {
		if s.records[r.ID] != r {
			continue // containerd has collected it
		}
		// From here on it is one that containerd does not know, and removes.
		r.expected = false
		if err := s.plain.Remove(context.WithoutCancel(ctx), r.Name); err != nil {
			s.log.Warn("a snapshot that containerd did not ask for stays; containerd removes it with its next garbage", "snapshot", r.Name, "error", err)
			continue
		}
		delete(s.records, r.ID)
	}
	_ = os.Remove(s.expectedFile(image))
}

// dropExpected removes what an earlier daemon made for images that nobody asked
// it for. Called with mu held.
func (s *Snapshotter) dropExpected(ctx context.Context) {
	files, err := filepath.Glob(filepath.Join(s.opts.Dir, "expected", "*"))
	if err != nil {
		return
	}
	for _, path := range files {
		var x expected
		b, err := os.ReadFile(path)
		// One that cannot be read was half written, and nothing made.
		if err == nil && json.Unmarshal(b, &x) == nil && x.Boot == s.boot {
			var made []*record
			image := ""
			for _, name := range x.Names {
				if r := s.named(name); r != nil {
					made, image = append(made, r), r.Image
				}
			}
			s.removeExpected(ctx, image, made)
		}
		_ = os.Remove(path)
	}
}
