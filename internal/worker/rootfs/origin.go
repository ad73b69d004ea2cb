package rootfs

import (
	"cmp"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/worker/origin"
)

// Key is what images, containers and holds name it by.
func (r *Rootfs) Key() origin.Key { return KeyOf(r.dir) }

// Origin is the registry for whose images it came; empty: not known.
func (r *Rootfs) Origin() string { return r.rec.Origin }

// Unwalled reports whether a version that knew no origins laid it out.
func (r *Rootfs) Unwalled() bool { return r.rec.Unwalled }

// Made reports whether it was made on this worker: no server knows it.
func (r *Rootfs) Made() bool { return r.rec.Made }

// Adopt notes whose an unwalled rootfs is. It is called before anybody knows of it.
func (r *Rootfs) Adopt(registry string) { r.rec.Origin, r.rec.Version = registry, RecordVersion }

// Proof is what is known of where its TOC came from.
func (r *Rootfs) Proof() Proof {
	r.mu.Lock()
	defer r.mu.Unlock()
	return cmp.Or(r.rec.Proof, Served)
}

// SetProven notes that it is what its image's layers make.
func (r *Rootfs) SetProven() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rec.Proof = Proven
}

// SetWeak notes which server sends of it though nothing shows that it is this server. It reports whether that is the
// first one.
func (r *Rootfs) SetWeak(server string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.rec.Weak != "" {
		return false
	}
	r.rec.Weak = server
	return true
}

// Unproven notes from when on it has been here unproven, once.
func (r *Rootfs) Unproven(since time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.rec.Since.IsZero() {
		r.rec.Since = since
	}
}

// Hashed reports whether the contents of its own arena that are not one segment were hashed whole.
func (r *Rootfs) Hashed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.rec.Hashed
}

// Lying says why an image, by its manifest, is not the one of these layers; "": nobody has found that.
func (r *Rootfs) Lying(manifest digest.Digest) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.rec.Lying[manifest]
}

// SetLying notes all of those that name it.
func (r *Rootfs) SetLying(lying map[digest.Digest]string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rec.Lying = lying
}

// Quarantine notes why nothing may be served from it: a content is not what its ID says, or it is not what its
// image's layers make.
func (r *Rootfs) Quarantine(why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rec.Wrong = why.Error()
	r.become(Broken)
	r.why = why
}
