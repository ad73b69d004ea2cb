package trace

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// As the public traces have it.
const public = `[{"host": "dc118836", "http.request.duration": 0.877271679, "http.request.method": "GET", "http.request.remoteaddr": "0ab76ea7",
 "http.request.uri": "v2/4715bf8f/6c41e6eb/blobs/7b5ae5d6", "http.request.useragent": "docker/17.03", "http.response.status": 200,
 "http.response.written": 1518, "id": "1eb3d7f3", "timestamp": "2017-06-20T00:00:01.5Z"},
{"http.request.method": "HEAD", "http.request.uri": "v2/a/b/blobs/x", "timestamp": "2017-06-20T00:00:02Z"},
{"http.request.method": "GET", "http.request.remoteaddr": "c", "http.request.uri": "v2/4715bf8f/6c41e6eb/manifests/latest", "http.response.written": 7, "timestamp": "2017-06-20T00:00:03Z"},
{"http.request.method": "PUT", "http.request.remoteaddr": "c", "http.request.uri": "v2/a/b/blobs/uploads/77", "http.response.written": 0, "timestamp": "2017-06-20T00:00:04Z"}]`

func TestRead(t *testing.T) {
	want := []Request{
		{Image: "4715bf8f/6c41e6eb", Layer: "7b5ae5d6", Client: "0ab76ea7", Bytes: 1518},
		{At: 1500 * time.Millisecond, Manifest: true, Image: "4715bf8f/6c41e6eb:latest", Client: "c", Bytes: 7},
		{At: 2500 * time.Millisecond, Put: true, Image: "a/b", Layer: "77", Client: "c"},
	}
	got, err := Read(strings.NewReader(public), 0)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if got, err = Read(strings.NewReader(public), 1); err != nil || len(got) != 1 {
		t.Errorf("one: %d, %v", len(got), err)
	}
	for _, bad := range []string{"", "[{]", `{"timestamp": 3}`} {
		if _, err := Read(strings.NewReader(bad), 0); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
}

// What is made has the counts that were asked for, and is read as it was written.
func TestGenerate(t *testing.T) {
	for _, s := range Shapes {
		list := Generate(s, 1)
		if d := cmp.Diff(list, Generate(s, 1)); d != "" {
			t.Fatalf("%s: the same seed makes another trace", s.Name)
		}
		gets, manifests, puts := 0, 0, 0
		distinct := map[string]bool{}
		counts := map[[2]string]int{}
		for _, q := range list {
			switch {
			case q.Put && q.Manifest:
				puts++
			case q.Put:
			case q.Manifest:
				manifests++
			default:
				gets++
				distinct[q.Layer] = true
				counts[[2]string{q.Client, q.Layer}]++
			}
		}
		once := 0
		for _, n := range counts {
			if n == 1 {
				once++
			}
		}
		if manifests != s.GetManifests || gets < s.GetLayers*9/10 || gets > s.GetLayers || puts != s.PutManifests {
			t.Errorf("%s: %d manifests, %d layers, %d pushes; want %d, %d, %d", s.Name, manifests, gets, puts, s.GetManifests, s.GetLayers, s.PutManifests)
		}
		if len(distinct) < s.Layers/4 {
			t.Errorf("%s: of %d layers %d are pulled", s.Name, s.Layers, len(distinct))
		}
		if once*2 < len(counts) {
			t.Errorf("%s: of %d pairs of client and layer %d are pulled once", s.Name, len(counts), once)
		}
		var b bytes.Buffer
		if err := Write(&b, list, time.Unix(1e9, 0)); err != nil {
			t.Fatal(err)
		}
		again, err := Read(&b, 0)
		if err != nil {
			t.Fatal(err)
		}
		for i := range again {
			again[i].At += list[0].At
		}
		if d := cmp.Diff(list, again); d != "" {
			t.Errorf("%s: written and read (-want +got):\n%.2000s", s.Name, d)
		}
	}
}
