package tcp

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
)

// Whatever is answered is paced, and arrives as it was written.
func TestAnswersArePaced(t *testing.T) {
	for name, send := range map[string]func(http.ResponseWriter) error{
		"Write": func(w http.ResponseWriter) error {
			_, err := w.Write([]byte("x"))
			return err
		},
		"ReadFrom": func(w http.ResponseWriter) error {
			_, err := w.(io.ReaderFrom).ReadFrom(bytes.NewReader([]byte("x")))
			return err
		},
	} {
		f := new(fakeSocket)
		h := Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if err := send(w); err != nil {
				t.Error(err)
			}
		}), func(*http.Request) bool { return false })
		req := httptest.NewRequest(http.MethodGet, "/", nil)
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, req.WithContext(context.WithValue(t.Context(), pacerKey{}, &pacer{socket: f})))
		if f.looks != 1 || rec.Body.String() != "x" {
			t.Errorf("%s: looked %d times, answered %q", name, f.looks, rec.Body)
		}
	}
}

// A connection without a pacer is served as it is.
func TestAnswersWithoutPacer(t *testing.T) {
	rec := httptest.NewRecorder()
	h := Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if w != http.ResponseWriter(rec) {
			t.Errorf("the answer goes by a %T", w)
		}
	}), func(*http.Request) bool { return true })
	h.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/", nil))
}
