package gate

import (
	"log/slog"
	"sync"
	"time"
)

// denials says that reads of an arena failed, once a second.
type denials struct {
	mu       sync.Mutex
	last     time.Time
	unlogged int
}

func (d *denials) log(log *slog.Logger, arena string, off, n int64, pid int32, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if time.Since(d.last) < time.Second {
		d.unlogged++
		return
	}
	log.Warn("read failed with EIO", "arena", arena, "offset", off, "count", n, "pid", pid,
		"err", err, "unlogged", d.unlogged)
	d.last, d.unlogged = time.Now(), 0
}
