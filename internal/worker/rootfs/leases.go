package rootfs

import "hydrofoil.dev/foil/internal/worker/locks"

// Leases keep rootfs from being removed, and their arenas open. Its zero value
// holds nothing.
type Leases struct {
	mu   locks.Mutex[locks.Leaf]
	held map[*Rootfs]bool
}

// Take makes l keep r, which the caller keeps from being removed meanwhile.
func (l *Leases) Take(r *Rootfs) {
	l.mu.Lock()
	fresh := !l.held[r]
	if fresh {
		if l.held == nil {
			l.held = make(map[*Rootfs]bool)
		}
		l.held[r] = true
	}
	l.mu.Unlock()
	if fresh {
		r.Use()
	}
}

// List returns what is kept.
func (l *Leases) List() []*Rootfs {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := make([]*Rootfs, 0, len(l.held))
	for r := range l.held {
		list = append(list, r)
	}
	return list
}

// End lets go of everything.
func (l *Leases) End() { l.Keep(nil) }

// Keep lets go of everything but what is given.
func (l *Leases) Keep(keep map[*Rootfs]bool) {
	for _, r := range l.List() {
		if !keep[r] {
			l.mu.Lock()
			delete(l.held, r)
			l.mu.Unlock()
			r.LetGo()
		}
	}
}
