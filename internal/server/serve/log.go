package serve

import (
	"io"
	"log/slog"
	"net/http"
	"time"
)

// logRequests counts requests, and writes one line for each when it has ended; those that
// ask whether the server lives are worth one only when debugging.
func logRequests(log *slog.Logger, m *requestMetrics, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		level := slog.LevelInfo
		if req.URL.Path == "/healthz" {
			level = slog.LevelDebug
		}
		start := time.Now()
		rec := &recorder{ResponseWriter: w}
		ended, end := false, m.begin(req)
		defer func() {
			status := any(rec.status)
			if !ended {
				status = aborted
			}
			end(rec.status, rec.bytes, ended)
			log.Log(req.Context(), level, "request", "method", req.Method, "path", req.URL.Path,
				"status", status, "bytes", rec.bytes, "took", time.Since(start).Round(time.Microsecond),
				"protocol", req.Proto, "client", req.RemoteAddr)
		}()
		next.ServeHTTP(rec, req)
		ended = true
		if rec.status == 0 {
			rec.status = http.StatusOK
		}
	})
}

// recorder counts what is answered.
type recorder struct {
	http.ResponseWriter
	status int
	bytes  int64
}

func (r *recorder) WriteHeader(status int) {
	if r.status == 0 && status >= 200 {
		r.status = status
	}
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Write(p []byte) (int, error) {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	n, err := r.ResponseWriter.Write(p)
	r.bytes += int64(n)
	return n, err
}

// ReadFrom keeps the way to sendfile(2) open.
func (r *recorder) ReadFrom(src io.Reader) (int64, error) {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	n, err := io.Copy(r.ResponseWriter, src)
	r.bytes += n
	return n, err
}

// Flush implements http.Flusher.
func (r *recorder) Flush() {
	_ = http.NewResponseController(r.ResponseWriter).Flush()
}

// Unwrap is for http.ResponseController.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }
