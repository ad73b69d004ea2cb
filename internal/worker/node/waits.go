package node

import (
	"context"
	"log/slog"
	"time"

	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/fetch"
)

// logWaits says which reads of r's arena had to wait during a fetch, the first 256
// of them, at level debug: which pages of which file, for how long, and why.
func (n *Node) logWaits(r *rootfs, a *arena.Arena, begun time.Time, waits []fetch.Wait) {
	if len(waits) == 0 || a == nil || !n.log.Enabled(context.Background(), slog.LevelDebug) {
		return
	}
	t, err := r.loadTOC()
	if err != nil {
		n.log.Debug("name the reads that waited", "rootfs", r.rec.ChainID, "error", err)
		return
	}
	named := paths(t)
	l := a.Layout()
	for _, w := range waits {
		path, page := "", int64(-1)
		if first, end := l.SegmentsIn(w.Offset, w.Length); first < end {
			content := l.Content(first)
			at, _ := l.Offset(content)
			path, page = named[int32(content)], (w.Offset-at)/trace.BlockSize
		}
		n.log.Debug("read waited", "rootfs", r.rec.ChainID, "path", path, "page", page, "pages", (w.Length+trace.BlockSize-1)/trace.BlockSize,
			"since_begin", w.Began.Sub(begun), "took", w.Took, "planned", w.Planned, "ahead", w.Ahead, "promoted", w.Promoted, "moved", w.Moved, "error", w.Err)
	}
}
