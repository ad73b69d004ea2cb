package rootfs

import (
	"cmp"

	"hydrofoil.dev/foil/internal/worker/origin"
)

// Key is what images, containers and holds name it by.
func (r *Rootfs) Key() origin.Key { return KeyOf(r.dir) }

// Origin is the registry for whose images it came; empty: not known.
func (r *Rootfs) Origin() string { return r.rec.Origin }

// Unwalled reports whether a version that knew no origins laid it out.
func (r *Rootfs) Unwalled() bool { return r.rec.Unwalled }

// Adopt notes whose an unwalled rootfs is. It is called before anybody knows of it.
func (r *Rootfs) Adopt(registry string) { r.rec.Origin, r.rec.Version = registry, RecordVersion }

// Proof is what is known of where its TOC came from.
func (r *Rootfs) Proof() Proof {
	r.mu.Lock()
	defer r.mu.Unlock()
	return cmp.Or(r.rec.Proof, Served)
}

// Hashed reports whether the contents of its own arena that are not one segment were hashed whole.
func (r *Rootfs) Hashed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.rec.Hashed
}

// Quarantine notes a content that is not what its ID says: nothing may be served from it.
func (r *Rootfs) Quarantine(why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rec.Wrong = why.Error()
	r.become(Broken)
	r.why = why
}
