package probe

import (
	"bytes"
	"io"
)

// maxLine is how much of an unfinished line is kept for matching, in bytes.
// What is longer is matched in pieces.
const maxLine = 64 << 10

// Writer returns w with a probe's eye on what is written. For probes of other
// kinds it returns w itself. It may be called for several streams; each is
// matched for itself.
func (p *Probe) Writer(w io.Writer) io.Writer {
	if p.kind != stdout {
		return w
	}
	return &matcher{w: w, p: p}
}

type matcher struct {
	w    io.Writer
	p    *Probe
	line []byte // what has been written of the line that is not finished
	done bool
}

func (m *matcher) Write(b []byte) (int, error) {
	n := len(b)
	var err error
	if m.w != nil {
		n, err = m.w.Write(b)
	}
	m.look(b)
	return n, err
}

func (m *matcher) look(b []byte) {
	for !m.done && len(b) > 0 {
		line, rest, finished := bytes.Cut(b, []byte("\n"))
		b = rest
		m.line = append(m.line, line...)
		if m.p.re.Match(bytes.TrimSuffix(m.line, []byte("\r"))) {
			m.done, m.line = true, nil
			m.p.ready.Do(func() { close(m.p.seen) })
			return
		}
		if finished || len(m.line) > maxLine {
			m.line = m.line[:0]
		}
	}
}
