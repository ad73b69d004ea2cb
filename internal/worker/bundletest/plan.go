package bundletest

import (
	"fmt"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
)

// SentFrame is a frame, encoded.
type SentFrame struct {
	Bytes []byte
	ids   []segment.ID
}

// present adds to have what a worker has of an image.
func present(have map[segment.ID]bool, m *Image, h *bundle.Have) {
	for i, seg := range m.Tree.Segments {
		if h.Present == nil || h.Present[i/8]>>(i%8)&1 != 0 {
			have[seg.ID] = true
		}
	}
}

// plan puts the segments of an image in frames of group at most, but those that the worker has, and those that the image has
// no bytes of. encode is given a name for what it makes of the bytes.
func plan(m *Image, have map[segment.ID]bool, group int, encode func(name string, raw ...[]byte) []byte) (*bundle.Plan, []SentFrame) {
	p := &bundle.Plan{}
	var frames []SentFrame
	var raw [][]byte
	var ids []segment.ID
	length := uint32(0)
	flush := func() {
		if len(raw) == 0 {
			return
		}
		encoded := encode(fmt.Sprint(ids), raw...)
		p.Frames = append(p.Frames, bundle.PlanFrame{First: uint32(len(p.Segments) - len(raw)), Segments: uint32(len(raw)), RawLength: length, MaxLength: uint32(len(encoded))})
		p.MaxBytes += bundle.SectionLength(len(encoded))
		p.ContentBytes += int64(length)
		frames = append(frames, SentFrame{encoded, ids})
		raw, ids, length = nil, nil, 0
	}
	for i, seg := range m.Tree.Segments {
		if have[seg.ID] || seg.ID.IsHole() || m.Data[seg.ID] == nil {
			continue
		}
		have[seg.ID] = true
		if len(raw) == group || int(length+seg.Length) > segment.MaxFrameRaw {
			flush()
		}
		p.Segments = append(p.Segments, uint32(i))
		raw, ids, length = append(raw, m.Data[seg.ID]), append(ids, seg.ID), length+seg.Length
	}
	flush()
	return p, frames
}
