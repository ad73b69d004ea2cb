package node

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
)

// A read through the mount that waits is told while it does and after, with its file
// and its time.
func TestReadsThatWaitAreTold(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 10, 5000))
	ref := s.Serve("app:1", m)
	s.SetLimit(2)
	h := newHost(t)
	begun := time.Now()
	h.mustPull(ref, api.Mounted)
	const name = "f001-009"
	asked := time.Now()
	end, out := cat(t, filepath.Join(h.dir(m), "mnt", name))
	report := func() *api.PullReport {
		t.Helper()
		r, err := h.n.PullReport(t.Context(), ref)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	ofFile := func(r *api.PullReport) (found *api.Read) {
		for i := range r.Reads {
			if r.Reads[i].Path == "/"+name {
				found = &r.Reads[i]
				break
			}
		}
		return found
	}
	var waits api.Read
	eventually(t, "the read is told of", func() error {
		r := ofFile(report())
		if r == nil || r.Took <= 0 {
			return fmt.Errorf("%+v", r)
		}
		waits = *r
		return nil
	})
	if !waits.Waiting || waits.Err != "" || waits.Page != 0 || waits.Pages < 1 || waits.Began.Before(asked) || waits.Began.After(time.Now()) {
		t.Errorf("while it waits: %+v, asked at %v", waits, asked)
	}
	if r := report(); r.Began.Before(begun) || r.Began.After(asked) || r.Ref != ref || r.Event.Event != api.Mounted {
		t.Errorf("the pull: %+v", r)
	}
	s.SetLimit(-1)
	if err := ends(t, "the read", end); err != nil || out.String() != m.Files[name] {
		t.Errorf("the read: %d bytes, %v", out.Len(), err)
	}
	h.complete(ref)
	check := func() {
		t.Helper()
		r := report()
		// The reader may be told a moment before that is noted.
		eventually(t, "the read has ended", func() error {
			r = report()
			if read := ofFile(r); read == nil || read.Waiting {
				return fmt.Errorf("%+v", read)
			}
			return nil
		})
		read := ofFile(r)
		if !read.Began.Equal(waits.Began) || read.Took < waits.Took || read.Err != "" {
			t.Errorf("after it has waited: %+v; while it waited %+v", read, waits)
		}
		if r.Waits < 1 || r.Waited < read.Took || int64(len(r.Reads)) != r.Waits {
			t.Errorf("%d reads waited %v s in sum, told are %+v", r.Waits, r.Waited, r.Reads)
		}
	}
	check()
	if err := h.n.RemoveImage(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	if _, err := h.n.PullReport(t.Context(), ref); codeOfErr(err) != api.CodeNotFound {
		t.Errorf("the report of an image that was removed: %v", err)
	}
	if _, err := h.n.PullReport(t.Context(), "redis"); codeOfErr(err) != api.CodeInvalid {
		t.Errorf("the report of a name without a host: %v", err)
	}
}
