package encoder

import (
	"context"
	"fmt"
	"io"
	"sync"
)

// chunk is how many bytes are read of a tar stream at once.
const chunk = 256 << 10

// window reads a stream that goes forward for those who read near each other: parts of it that are
// worked on at once. It keeps the last bytes.
type window struct {
	r    io.Reader
	keep int64 // bytes that are kept

	mu      sync.Mutex
	ready   sync.Cond // with mu: more was read
	reading bool      // guarded by mu: somebody reads more
	begin   int64     // guarded by mu: where the kept bytes begin
	end     int64     // guarded by mu: where they end
	chunks  [][]byte  // guarded by mu: the kept bytes; what is in a chunk does not change
	err     error     // guarded by mu: of r
}

func newWindow(r io.Reader, at, keep int64) *window {
	w := &window{r: r, keep: keep, begin: at, end: at}
	w.ready.L = &w.mu
	return w
}

// ReadAt implements io.ReaderAt for what is kept, or comes.
func (w *window) ReadAt(b []byte, at int64) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.end < at+int64(len(b)) && w.err == nil {
		if w.reading {
			w.ready.Wait()
			continue
		}
		w.more()
	}
	if at < w.begin {
		return 0, fmt.Errorf("byte %d of the tar stream is not kept any more, those from %d on are", at, w.begin)
	}
	n := 0
	begin := w.begin
	for _, c := range w.chunks {
		if n == len(b) {
			break
		}
		if from := at + int64(n) - begin; from < int64(len(c)) {
			n += copy(b[n:], c[from:])
		}
		begin += int64(len(c))
	}
	if n < len(b) {
		return n, w.err
	}
	return n, nil
}

// more reads a chunk. It is called with mu held, and gives it up meanwhile.
func (w *window) more() {
	w.reading = true
	w.mu.Unlock()
	b := make([]byte, chunk)
	n, err := io.ReadFull(w.r, b)
	if err == io.ErrUnexpectedEOF {
		err = io.EOF
	}
	w.mu.Lock()
	w.reading = false
	w.err = err
	if n > 0 {
		w.chunks = append(w.chunks, b[:n])
		w.end += int64(n)
	}
	for len(w.chunks) > 1 && w.end-w.begin-int64(len(w.chunks[0])) > w.keep {
		w.begin += int64(len(w.chunks[0]))
		w.chunks[0] = nil
		w.chunks = w.chunks[1:]
	}
	w.ready.Broadcast()
}

// openWindow opens plain at an offset.
func openWindow(ctx context.Context, plain Plain, at, keep int64) (*window, io.Closer, error) {
	r, err := plain(ctx, at)
	if err != nil {
		return nil, nil, err
	}
	return newWindow(r, at, keep), r, nil
}
