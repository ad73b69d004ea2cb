package bundles

import (
	"context"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/planner"
)

// storeEnd is how many of a startup store's last bytes are read ahead: more than most indices
// have. What is before it is read by who sends it, in large pieces.
const storeEnd = 128 << 10

// ahead has the disk find and read what a pull looks at after the header of an image, all
// of it at once, while the header is made: one after the other, each would be waited
// for. Who has pulled the image before has left it in memory.
func (h *Handler) ahead(ctx context.Context, m *Resolved, r catalog.Rootfs) {
	if h.indices.Has(string(r.TOC)) {
		return
	}
	read := func(key string, last int64) {
		h.work.Go(func() {
			// What is wrong is noticed by who reads it.
			_ = readAhead(ctx, h.o.Objects, key, last)
		})
	}
	if r.Index != "" {
		read(r.Index, -1)
	}
	read(planner.OrderKey(m.Config.Digest, r.TOC), -1)
	h.work.Go(func() {
		row, err := h.o.Catalog.StartupImage(ctx, m.Repository, m.ChainID)
		if err == nil && row.Key != "" {
			_ = readAhead(ctx, h.o.Objects, row.Key, storeEnd)
		}
	})
}

// readAhead has the kernel, or the store, read the last bytes of an object, or all (last < 0), and does not wait
// for them.
func readAhead(ctx context.Context, store objects.Store, key string, last int64) error {
	if objects.ReadAhead(store, key, last) {
		return nil
	}
	r, err := store.Open(ctx, key, 0, -1)
	if err != nil {
		return err
	}
	defer r.Close()
	in, ok := r.(objects.InFile)
	if !ok {
		return nil // it is in no file
	}
	info, err := in.File().Stat()
	if err != nil {
		return err
	}
	from := int64(0)
	if last >= 0 {
		from = max(0, info.Size()-last)
	}
	raw, err := in.File().SyscallConn()
	if err != nil {
		return err
	}
	return raw.Control(func(fd uintptr) {
		_ = unix.Fadvise(int(fd), from, info.Size()-from, unix.FADV_WILLNEED)
	})
}
