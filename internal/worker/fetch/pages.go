package fetch

import (
	"errors"
	"fmt"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/arena"
)

// writePages writes one frame of a startup set. It returns raw, which it may
// have replaced by a larger buffer.
func (l *pipeline) writePages(j job, raw []byte) []byte {
	p := l.p
	s, f := j.stream, &j.set.Frames[j.frame]
	runs, ids := j.set.Runs[f.First:f.First+f.Count], j.set.Digests[f.First:f.First+f.Count]
	raw, err := segment.DecodeFrame(raw[:0], j.data, int(f.RawLength))
	if err != nil {
		l.forget(j.kept)
		s.tornPages(j.frame, ids, err)
		return raw
	}
	if j.set.arena == nil {
		return raw
	}
	var wrong []segment.ID
	here := make([]trace.Run, 0, len(runs))
	written, at := int64(0), int64(0)
	for i, r := range runs {
		content := &j.set.contents[int(f.First)+i]
		_, n := r.Range(content.Size)
		data := raw[at : at+n]
		at += n
		// What is used in place from another arena is here already.
		base, ok := j.set.arena.Layout().Offset(int(r.Content))
		if !ok || j.reads != nil && !j.reaches(base+int64(r.First)*trace.BlockSize, n) {
			continue
		}
		_, werr := j.set.arena.WriteRun(r, ids[i], data)
		switch {
		case errors.Is(werr, arena.ErrWrongBytes):
			wrong, err = append(wrong, ids[i]), werr
		case werr != nil:
			// The disk, or a server that says two things: another stream would
			// not help.
			p.cancel(fmt.Errorf("content %s: %w", content.ID, werr))
			return raw
		default:
			written += n
			here = append(here, r)
		}
	}
	if j.reads != nil && len(wrong) == 0 {
		return raw // counted when all of it is written; it goes to who reads it
	}
	// Filled pages are not in anybody's way into the page cache.
	if filled := int(j.frame) >= len(j.set.Frames)-j.set.Filled; p.opts.Pages != nil && len(here) > 0 && !filled {
		p.opts.Pages(j.set.Origin, here)
	}
	// The pages wait for the next sync that is due by time or for other bytes: it costs
	// the processors and the disk about as much as writing them did, while a start is
	// short of both.
	p.counts.pagesRaw.Add(written)
	p.counts.stored.Add(written)
	if len(wrong) > 0 {
		l.forget(j.kept)
		s.tornPages(j.frame, wrong, err)
		return raw
	}
	if written > 0 { // else it is no step forward
		p.counts.frames.Add(1)
	}
	return raw
}
