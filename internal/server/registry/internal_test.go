package registry

import (
	"bytes"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/server/leftover"
)

func FuzzParseManifest(f *testing.F) {
	f.Add([]byte(`{"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"digest":"sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a","size":2},"layers":[]}`), "application/vnd.oci.image.manifest.v1+json")
	f.Add([]byte(`{"manifests":[{"digest":"sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"}],"subject":null}`), "application/vnd.oci.image.index.v1+json")
	f.Add([]byte(`{"subject":{"digest":"sha512:x"}}`), "application/x; a=b")
	f.Add([]byte("\xff"), "")
	f.Fuzz(func(t *testing.T, b []byte, contentType string) {
		m, refs, err := parseManifest(b, contentType)
		if err != nil {
			if e := classify(err); e.kind != manifestInvalid {
				t.Fatalf("%v is told as %v", err, wire[e.kind])
			}
			return
		}
		if !bytes.Equal(m.Bytes, b) || m.MediaType == "" {
			t.Fatalf("manifest %+v of %q", m, b)
		}
		all := append(refs.blobs, refs.any...)
		if m.Subject != "" {
			all = append(all, ocispec.Descriptor{Digest: m.Subject})
		}
		for _, descriptor := range all {
			// Each becomes part of a key in the object store.
			d := descriptor.Digest
			if d.Validate() != nil || checkAlgorithm(d.Algorithm()) != nil {
				t.Fatalf("%q is taken for a digest", d)
			}
		}
	})
}

func FuzzParseRange(f *testing.F) {
	f.Add("bytes=0-1", int64(2))
	f.Add("bytes=-5", int64(2))
	f.Add("bytes=5-", int64(0))
	f.Fuzz(func(t *testing.T, header string, size int64) {
		if size < 0 {
			return
		}
		offset, length, ok, err := parseRange(header, size)
		switch {
		case err != nil:
		case !ok && (offset != 0 || length != size):
			t.Errorf("an ignored range is %d+%d of %d", offset, length, size)
		case ok && (offset < 0 || length <= 0 || offset > size-length):
			t.Errorf("range %d+%d of %d", offset, length, size)
		}
	})
}

func TestWire(t *testing.T) {
	for k := internal; k <= noSpace; k++ {
		if w := wire[k]; w.code == "" || w.status < 400 {
			t.Errorf("kind %d is told as %+v", k, w)
		}
	}
}

func TestParseReference(t *testing.T) {
	d := digest.FromString("x").String()
	for s, tag := range map[string]bool{"latest": true, "_": true, "1.0-a_b": true, d: false} {
		gotTag, gotDigest, err := parseReference(s)
		if err != nil || (gotTag == s) != tag || (gotDigest.String() == s) == tag {
			t.Errorf("%s: tag %q, digest %q, %v", s, gotTag, gotDigest, err)
		}
	}
}

// Uploads that nobody continues go after a week, but for those that a request works
// on; one of a clock that was ahead counts from when that is known.
func TestExpire(t *testing.T) {
	u, err := openUploads(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	upload := func(letter string, age time.Duration) string {
		id := strings.ReplaceAll("xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", "x", letter)
		for _, path := range []string{u.dataPath(id), u.statePath(id)} {
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chtimes(path, now.Add(-age), now.Add(-age)); err != nil {
				t.Fatal(err)
			}
		}
		return id
	}
	const week = 7 * 24 * time.Hour
	old, busy, young, ahead := upload("a", week+time.Hour), upload("b", 2*week), upload("c", 6*24*time.Hour), upload("d", -52*week)
	release, err := u.acquire(t.Context(), busy, func() {})
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	ages := leftover.Ages{Keep: week}
	look := func(later time.Duration, want ...string) {
		t.Helper()
		ids, err := u.expire(t.Context(), &ages, now.Add(later), later)
		slices.Sort(ids)
		if err != nil || !slices.Equal(ids, want) {
			t.Errorf("after %v: dropped %v, %v; want %v", later, ids, err, want)
		}
	}
	look(0)
	look(time.Hour, old)
	look(2 * time.Hour)
	look(2*24*time.Hour, young)
	look(week+3*time.Hour, ahead)
	for _, id := range []string{old, young, ahead} {
		if _, err := os.Stat(u.dataPath(id)); !os.IsNotExist(err) {
			t.Errorf("files of upload %s: %v", id, err)
		}
	}
	if _, err := os.Stat(u.dataPath(busy)); err != nil {
		t.Error(err)
	}
}
