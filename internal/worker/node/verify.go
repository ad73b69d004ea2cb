package node

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/arena"
)

// Verify compares every local byte of an image with its digest: the TOC and
// the metadata image, and of every content what is here, segment by segment.
// Bytes that have not arrived are counted, and are no error.
func (n *Node) Verify(ctx context.Context, name string, emit func(api.VerifyEvent) error) error {
	leave, err := n.enter()
	if err != nil {
		return err
	}
	defer leave()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(n.ctx, func() { cancel(errStopping) })()
	r, release, err := n.lookup(name)
	if err != nil {
		return err
	}
	defer release()
	t, err := r.loadTOC()
	if err != nil {
		return errorf(api.CodeCorrupt, "image %s: %w: remove it with `foil rm` and pull it again", name, err)
	}
	ev := api.VerifyEvent{Total: r.rec.Contents}
	bad := func(what string) error {
		ev.Bad = what
		err := emit(ev)
		ev.Bad = ""
		return err
	}
	if r.rec.Meta != "" {
		got, err := fileSum(r.path("meta.erofs"))
		if err != nil {
			return err
		}
		if got != r.rec.Meta {
			if err := bad("(metadata image)"); err != nil {
				return err
			}
		}
	}
	place, err := r.loadPlacement(t)
	if err != nil {
		return err
	}
	v := verifier{n: n, t: t, ev: &ev, emit: emit, buf: make([]byte, segment.MaxLength)}
	for i, chain := range r.rec.Arenas {
		if err := v.arena(ctx, chain, place.in(i)); err != nil {
			return err
		}
	}
	for _, c := range v.bad {
		if err := bad(v.path(c)); err != nil {
			return err
		}
	}
	ev.Done = true
	return emit(ev)
}

type verifier struct {
	n     *Node
	t     *toc.TOC
	ev    *api.VerifyEvent
	emit  func(api.VerifyEvent) error
	buf   []byte
	bad   []int32
	names *names
	since int64 // bytes since the last event
}

// arena verifies the contents that lie in the arena of one rootfs.
func (v *verifier) arena(ctx context.Context, chain digest.Digest, here []int32) (failed error) {
	r := v.n.arenaOf(chain)
	v.n.mu.Lock()
	if r == nil || r.contents == nil {
		v.n.mu.Unlock()
		return errorf(api.CodeCorrupt, "the arena of rootfs %s is gone: remove the image with `foil rm` and pull it again", chain)
	}
	r.users++
	file, present, contents := r.reader(), r.holder(), r.contents
	v.n.mu.Unlock()
	defer func() {
		failed = errors.Join(failed, file.Close())
		v.n.mu.Lock()
		defer v.n.mu.Unlock()
		r.letGo()
	}()
	id := func(c int32) *segment.ID { return &v.t.Contents[c].ID }
	segment.Sort(here, id)
	found := 0
	contents.join(here, id, func(c int32, off int64, piece bool) {
		if piece || failed != nil {
			return
		}
		found++
		if failed = context.Cause(ctx); failed == nil {
			failed = v.content(file, c, off, present)
		}
	})
	if failed == nil && found != len(here) {
		failed = errorf(api.CodeCorrupt, "the arena of rootfs %s holds %d of the %d contents placed in it: remove the image with `foil rm` and pull it again", chain, found, len(here))
	}
	return failed
}

// content verifies one content at its place.
func (v *verifier) content(file io.ReaderAt, c int32, at int64, present func(off, n int64) bool) error {
	content := &v.t.Contents[c]
	ok := true
	for _, s := range v.t.Segments[content.First : content.First+content.Segments] {
		off := at + s.Offset
		if !present(off, int64(s.Length)) {
			v.ev.Absent += int64(s.Length)
			continue
		}
		b := v.buf[:s.Length]
		if _, err := file.ReadAt(b, off); err != nil {
			return fmt.Errorf("read %s: %w", v.path(c), err)
		}
		v.ev.Checked += int64(s.Length)
		v.since += int64(s.Length)
		if s.ID.IsHole() {
			ok = ok && len(bytes.Trim(b, "\x00")) == 0
		} else {
			ok = ok && segment.Sum(b) == s.ID
		}
	}
	if !ok {
		v.bad = append(v.bad, c)
	}
	if v.since >= 32<<20 {
		v.since = 0
		return v.emit(*v.ev)
	}
	return nil
}

// path names a content by a path that has it.
func (v *verifier) path(c int32) string {
	if v.names == nil {
		v.names = namesOf(v.t)
	}
	path, _ := v.names.path(c)
	return path
}

// read reads and verifies TOC and placement.
func (r *rootfs) read() (*restored, error) {
	t, err := r.loadTOC()
	if err != nil {
		return nil, err
	}
	place, err := r.loadPlacement(t)
	return &restored{t, place}, err
}

// loadTOC reads and verifies a rootfs's TOC.
func (r *rootfs) loadTOC() (*toc.TOC, error) {
	b, err := os.ReadFile(r.path("toc"))
	if err != nil {
		return nil, err
	}
	if got := digest.FromBytes(b); got != r.rec.TOC {
		return nil, fmt.Errorf("TOC of rootfs %s has digest %s, not %s: the file was damaged", r.rec.ChainID, got, r.rec.TOC)
	}
	return toc.Decode(b)
}

// loadPlacement reads and verifies where a rootfs's contents lie.
func (r *rootfs) loadPlacement(t *toc.TOC) (placement, error) {
	b, err := os.ReadFile(r.path("placement"))
	if err != nil {
		return nil, err
	}
	if sum(b) != r.rec.Placement {
		return nil, fmt.Errorf("placement of rootfs %s: the file was damaged", r.rec.ChainID)
	}
	return decodePlacement(b, t, len(r.rec.Arenas))
}

// layout returns the layout of the rootfs's own arena.
func (r *rootfs) layout(t *toc.TOC, place placement) (*arena.Layout, error) {
	own := r.own()
	return arena.NewLayout(t, func(c int) bool { return own >= 0 && int(place[c]) == own })
}

func fileSum(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", errors.Join(fmt.Errorf("read %s: %w", path, err))
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
