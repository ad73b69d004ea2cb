package pull

import (
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/images"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/records"
	"hydrofoil.dev/foil/internal/worker/store"
)

// named is the rootfs that the reference names by now, if any.
func (p *Pull) named() origin.Key {
	if img := p.s.images.Get(p.ref.Name); img != nil {
		return img.Rootfs
	}
	return ""
}

// note begins the record of the image, once. It names the rootfs that the image has unless an older version, or another
// registry of its group, left one: then names begins it anew.
func (p *Pull) note(img *bundle.Image) {
	made := &images.Image{
		Version:  images.Version,
		Ref:      p.ref.Name,
		Platform: p.req.Platform,
		Plain:    p.req.PlainHTTP,
		Digest:   img.Manifest.Digest,
		Manifest: img.Manifest.Bytes,
		Config:   img.Config.Bytes,
		ChainID:  img.ChainID,
		Rootfs:   origin.KeyOf(p.ref.Host, img.ChainID, img.TOCDigest),
		Created:  time.Now().UTC(),

		Entrypoint: p.req.Entrypoint,
		Args:       p.req.Args,
		NoStartup:  p.req.NoStartup,
	}
	if old := p.s.images.Get(made.Ref); old != nil && old.Digest == made.Digest {
		made.Created = old.Created
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.image == nil {
		p.stage(made)
	}
}

// names has the record of the image name r. A later stream may have found another rootfs than the first: the server
// has changed its TOC.
func (p *Pull) names(r *store.Rootfs) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.image.Rootfs != r.Key() {
		made := *p.image
		made.Rootfs = r.Key()
		p.stage(&made)
	}
}

// stage begins a record, in the place of one that was begun before. That it is on the disk is waited for when
// everything else is ready. Called with p.mu held.
func (p *Pull) stage(made *images.Image) {
	old, done := p.record, p.recorded
	var record records.Staged
	var err error
	staged := make(chan struct{})
	p.image, p.recorded, p.record = made, false, func() (records.Staged, error) {
		<-staged
		return record, err
	}
	p.work.Go(func() {
		defer close(staged)
		if old != nil && !done {
			if before, err := old(); err == nil {
				before.Drop()
			}
		}
		record, err = p.s.images.Stage(made)
	})
}

// commit records the image: from now on its reference names this rootfs.
func (p *Pull) commit() error {
	p.mu.Lock()
	img, record, done := p.image, p.record, p.recorded
	p.mu.Unlock()
	if done {
		return nil
	}
	staged, err := record()
	if err == nil {
		err = p.s.images.Put(img, staged)
	}
	if err != nil {
		return err
	}
	p.work.Go(func() {
		if err := p.s.images.Sync(); err != nil {
			p.s.log.Warn("make the record of an image durable", "ref", img.Ref, "error", err)
		}
	})
	p.mu.Lock()
	p.recorded = true
	p.mu.Unlock()
	p.s.metrics.mounted(time.Since(p.begun))
	p.happened(api.Mounted, nil)
	return nil
}

// dropRecord removes the record of an image that was not committed.
func (p *Pull) dropRecord() {
	p.mu.Lock()
	record, done := p.record, p.recorded
	p.mu.Unlock()
	if record == nil || done {
		return
	}
	if staged, err := record(); err == nil {
		staged.Drop()
	}
}
