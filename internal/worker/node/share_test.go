package node

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/bundletest"
)

// fileSize is so large that a read of the last shared file does not wait for those before it: it is promoted.
const fileSize = 60_000

// sharing is a host that pulls two images with a base of 20 files, and 10 of their own each.
type sharing struct {
	*host
	t            *testing.T
	s            *fakeServer
	a, b         *fakeImage
	refA, refB   string
	doneA, doneB chan error
}

// newSharing begins both pulls. The stream of the first one sends so many frames; the
// second one has said what it does not want.
func newSharing(t *testing.T, frames int, stall time.Duration) *sharing {
	t.Helper()
	v := &sharing{t: t, s: newFakeServer(t), doneA: make(chan error, 1), doneB: make(chan error, 1)}
	base := some(1, 20, fileSize)
	with := func(seed uint64) *fakeImage {
		f := maps.Clone(base)
		for name, b := range some(seed, 10, fileSize) {
			f["own-"+name] = b
		}
		return newFakeImage(t, f)
	}
	v.a, v.b = with(100), with(200)
	v.refA, v.refB = v.s.Serve("a:1", v.a), v.s.Serve("b:1", v.b)
	v.s.SetLimit(0)
	v.host = newHost(t)
	v.restartWith(stall)
	go func() { v.doneA <- v.until(v.refA) }()
	v.s.Change("a", func(st *bundletest.Stream) { st.Limited, st.Limit = true, 0 })
	eventually(t, "the first image is mounted", func() error {
		if img := v.image(v.refA); img.Ref == "" {
			return fmt.Errorf("it is not")
		}
		return nil
	})
	v.s.SetLimit(-1)
	go func() { v.doneB <- v.until(v.refB) }()
	v.chosen("b")
	v.s.Change("a", func(st *bundletest.Stream) { st.Limit = frames })
	return v
}

func (v *sharing) restartWith(stall time.Duration) {
	v.stall = stall
	v.restart()
}

// until pulls an image until it is complete.
func (v *sharing) until(ref string) error {
	ev, err := v.pull(ref, api.Complete)
	if err == nil && ev.Event != api.Complete {
		err = fmt.Errorf("the last event is %s", ev.Event)
	}
	return err
}

// chosen waits until the worker has said what of a stream it does not want.
func (v *sharing) chosen(repository string) {
	v.t.Helper()
	eventually(v.t, "the worker has chosen", func() error {
		if n := len(v.s.Requests()); n < 2 || !v.s.Chosen(repository) {
			return fmt.Errorf("%d requests", n)
		}
		return nil
	})
}

func (v *sharing) ended(done chan error, what string) {
	v.t.Helper()
	if err := ends(v.t, what, done); err != nil {
		v.t.Fatalf("%s: %v", what, err)
	}
}

// What two images share comes once.
func TestPullsShare(t *testing.T) {
	v := newSharing(t, -1, 0)
	v.ended(v.doneA, "the first pull")
	v.ended(v.doneB, "the second pull")
	if n := v.s.Sent(); n != 40 {
		t.Errorf("%d frames were sent, the images have 40 between them", n)
	}
	v.same(v.a)
	v.same(v.b)
	v.verified(v.refA)
	v.verified(v.refB)
}

// A read of what another pull brings has it come soon there.
func TestPullsShareReads(t *testing.T) {
	v := newSharing(t, 0, 0)
	// The second pull has brought what is its own, and waits for the rest.
	own, shared := int64(0), ""
	for name, b := range v.b.Files {
		if _, both := v.a.Files[name]; both {
			shared = max(shared, name)
		} else {
			own += int64(len(b))
		}
	}
	v.here(v.refB, own)
	end, out := cat(t, filepath.Join(v.dir(v.b), "mnt", shared))
	if err := ends(t, "the read", end); err != nil || out.String() != v.b.Files[shared] {
		t.Errorf("read %s: %v, %d bytes", shared, err, out.Len())
	}
	v.s.Change("a", func(st *bundletest.Stream) { st.Limit = -1 })
	v.ended(v.doneA, "the first pull")
	v.ended(v.doneB, "the second pull")
	if n := v.s.Sent(); n != 40 {
		t.Errorf("%d frames were sent, the images have 40 between them", n)
	}
	v.same(v.a)
	v.same(v.b)
}

// What another pull does not bring after all, the second one asks for.
func TestPullsShareNoMore(t *testing.T) {
	for name, c := range map[string]struct {
		stall time.Duration
		do    func(v *sharing)
		after func(v *sharing) // when the second pull is complete
	}{
		"it fails": {
			do: func(v *sharing) { v.s.Change("a", func(st *bundletest.Stream) { st.Fail = true }) },
			after: func(v *sharing) {
				if err := ends(v.t, "the first pull", v.doneA); err == nil {
					v.t.Error("the first pull has not failed")
				}
			},
		},
		"it is removed": {
			do: func(v *sharing) { v.remove(v.refA) },
			after: func(v *sharing) {
				<-v.doneA
				v.remove(v.refB)
				v.empty()
			},
		},
		"it stalls": {
			stall: 300 * time.Millisecond,
			do:    func(*sharing) {},
			after: func(v *sharing) {
				v.s.Change("a", func(st *bundletest.Stream) { st.Limit = -1 })
				v.ended(v.doneA, "the first pull")
				v.same(v.a)
			},
		},
		"its arena is damaged": {
			do: func(v *sharing) {
				// The bytes change as soon as they are there.
				a := v.n.store.Get(v.key(v.a)).Arena()
				stop, stopped := make(chan struct{}), make(chan struct{})
				v.t.Cleanup(func() {
					close(stop)
					<-stopped
				})
				go func() {
					defer close(stopped)
					l := a.Layout()
					for {
						for i := range l.Segments() {
							if s := l.Segment(i); a.HasSegment(i) {
								_, _ = a.File().WriteAt([]byte("damaged"), s.Offset)
							}
						}
						select {
						case <-stop:
							return
						default:
						}
					}
				}()
				v.s.Change("a", func(st *bundletest.Stream) { st.Limit = -1 })
			},
			after: func(v *sharing) { v.logged("the bytes are not the segment's") },
		},
	} {
		t.Run(name, func(t *testing.T) {
			v := newSharing(t, 7, c.stall)
			v.here(v.refA, 7*fileSize)
			c.do(v)
			v.ended(v.doneB, "the second pull")
			v.logged("another pull does not bring what this one expects")
			v.same(v.b)
			v.verified(v.refB)
			if _, err := os.Stat(v.dir(v.b)); err != nil {
				t.Error(err)
			}
			c.after(v)
		})
	}
}
