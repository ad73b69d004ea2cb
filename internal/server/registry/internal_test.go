package registry

import (
	"bytes"
	"testing"

	"github.com/opencontainers/go-digest"
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
			all = append(all, m.Subject)
		}
		for _, d := range all {
			// Each becomes part of a key in the object store.
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
