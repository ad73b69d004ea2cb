package layer

import (
	"fmt"
	"io"

	"hydrofoil.dev/foil/internal/format/segment"
)

// Split reads the file of e from r, calls add with each segment that is no hole,
// whose bytes are valid until it returns, and sets Content and Segments. Errors:
// those of r and of add; a file that is shorter or longer than e says.
func (e *Entry) Split(s *segment.Splitter, r io.Reader, add func(segment.ID, []byte) error) error {
	s.Reset(r)
	for {
		p, err := s.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		if p.Bytes != nil {
			if err := add(p.ID, p.Bytes); err != nil {
				return err
			}
		}
		e.Segments = append(e.Segments, Segment{ID: p.ID, Length: p.Length})
	}
	id, size := s.Content()
	if size != e.Size {
		return fmt.Errorf("file %q has %d bytes, its header says %d", e.Name, size, e.Size)
	}
	e.Content = id
	return nil
}
