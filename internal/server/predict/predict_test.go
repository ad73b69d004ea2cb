package predict

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
)

func layers(names ...string) (list []digest.Digest) {
	for _, n := range names {
		list = append(list, digest.FromString(n))
	}
	return list
}

func TestPredict(t *testing.T) {
	var p Predictor
	now := time.Now()
	image := layers("a", "b", "c")
	want := func(client string, want ...string) {
		t.Helper()
		if d := cmp.Diff(layers(want...), p.Predict(client, image)); d != "" {
			t.Errorf("%s (-want +got):\n%s", client, d)
		}
	}
	want("new", "a", "b", "c")
	for _, d := range image[:2] {
		p.Pulled("once", d, now)
	}
	want("once", "c")
	want("new", "a", "b", "c") // who others are
	// It pulls what it has, though less than half of the time, and then more.
	for range 2 {
		p.Pulled("once", image[2], now)
	}
	want("once")
	p.Pulled("once", image[2], now)
	want("once", "a", "b", "c")
	for _, d := range layers("d", "e", "f", "g") {
		p.Pulled("once", d, now)
	}
	want("once")
}

func TestPredictorIsBounded(t *testing.T) {
	var p Predictor
	now := time.Now()
	for i := range maxLayers * 3 {
		p.Pulled("x", digest.FromString(fmt.Sprint(i%(maxLayers*2))), now)
	}
	c := p.clients["x"].Value.(*client)
	pulls, again := 0, 0
	for _, n := range c.counts {
		if pulls += n; n > 1 {
			again += n
		}
	}
	if len(c.counts) != maxLayers || len(c.order) != maxLayers || pulls != c.pulls || again != c.again {
		t.Errorf("%d layers, %d in order; %d pulls, it says %d; %d again, it says %d", len(c.counts), len(c.order), pulls, c.pulls, again, c.again)
	}
	for i := range maxClients + 5 {
		p.Pulled(fmt.Sprint(i), digest.FromString("a"), now)
	}
	if len(p.clients) != maxClients || p.recent.Len() != maxClients || p.clients["x"] != nil {
		t.Errorf("%d clients", len(p.clients))
	}
	p.Pulled("later", digest.FromString("a"), now.Add(forgetAfter))
	if len(p.clients) != 1 {
		t.Errorf("%d clients after a month", len(p.clients))
	}
}
