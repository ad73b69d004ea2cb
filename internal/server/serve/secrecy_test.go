package serve_test

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
)

// What one may not pull takes as long to be refused as what is not there. Samples are taken in turns, in an order that
// chance decides, so that a busy machine disturbs both sides alike; and they are compared by ranks, so that what it
// disturbs a lot counts as little as what it disturbs a little.
func TestForbiddenTakesAsLongAsAbsent(t *testing.T) {
	g := startGuarded(t, "[limits]\nrequests = 1000000\nburst = 1000000\n", nil)
	token, _ := g.token(basic("pull"), "")
	d := digest.FromBytes(g.m.manifest).String()
	calls := func(repo string) []call {
		return []call{
			{method: "GET", path: "/v2/" + repo + "/manifests/1"},
			{method: "HEAD", path: "/v2/" + repo + "/manifests/" + d},
			{method: "HEAD", path: "/v2/" + repo + "/blobs/" + digest.FromBytes(g.m.blobs[0]).String()},
			{method: "GET", path: "/v2/" + repo + "/tags/list"},
			{method: "GET", path: "/v2/" + repo + "/referrers/" + d},
			{method: "POST", path: "/v2/" + repo + "/blobs/uploads/"},
			g.request("POST", bundle.PullPath, repo, nobody),
		}
	}
	// Names of one length, so that nothing but being there tells them apart.
	there, absent, allowed := calls("other/app"), calls("other/apq"), calls("mine/app")
	timed := func(c call, who credential) float64 {
		began := time.Now()
		g.do(c, who)
		return time.Since(began).Seconds()
	}
	compare := func(as credential, c, with call, done func(effect float64) bool) (effect float64) {
		for range 3 {
			effect = between(func() float64 { return timed(c, as) }, func() float64 { return timed(with, as) }, 1000)
			if done(effect) {
				break
			}
		}
		return effect
	}
	// One in ten thousand comparisons of equals is as far away as this, and three in a row are never.
	const most = 0.05
	equal := func(effect float64) bool { return math.Abs(effect) < most }
	for n, c := range there {
		if effect := compare(bearer(token), c, absent[n], equal); !equal(effect) {
			t.Errorf("%s %s: what is there takes longer than what is not in %.1f%% of pairs", c.method, c.path, 100*(effect+0.5))
		}
	}
	for n, c := range there[:2] {
		if effect := compare(nobody, c, absent[n], equal); !equal(effect) {
			t.Errorf("nobody's %s %s: what is there takes longer than what is not in %.1f%% of pairs", c.method, c.path, 100*(effect+0.5))
		}
	}
	// The measure tells what does differ: a manifest that one may pull is read.
	if effect := compare(bearer(token), allowed[0], absent[0], func(effect float64) bool { return effect > most }); effect <= most {
		t.Errorf("a manifest takes longer than none in %.1f%% of pairs only: this test would find nothing", 100*(effect+0.5))
	}
}

// between takes n samples of each of two, and returns in which share of pairs the first is the larger one, less a
// half: 0 if nothing tells them apart.
func between(first, second func() float64, n int) float64 {
	type sample struct {
		value float64
		first bool
	}
	var all []sample
	for range n {
		if rand.IntN(2) == 0 {
			all = append(all, sample{first(), true}, sample{second(), false})
		} else {
			all = append(all, sample{second(), false}, sample{first(), true})
		}
	}
	slices.SortFunc(all, func(a, b sample) int { return cmp.Compare(a.value, b.value) })
	var ranks float64
	for rank, s := range all {
		if s.first {
			ranks += float64(rank + 1)
		}
	}
	larger := ranks - float64(n)*float64(n+1)/2
	return larger/float64(n*n) - 0.5
}
