package catalogtest

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/server/catalog"
)

func startupImage(repo, rootfs string, noted int64) catalog.StartupImage {
	return catalog.StartupImage{
		Repository: repo, ChainID: digestOf(rootfs), TOC: digestOf("toc of " + rootfs), Platform: "linux/amd64", Noted: time.Unix(noted, 7),
	}
}

func startupTrace(m catalog.StartupImage, service, client string, n int64) catalog.Trace {
	return catalog.Trace{
		Repository: m.Repository, ChainID: m.ChainID, TOC: m.TOC, Service: service, Client: client,
		Received: time.Unix(n, 9), Body: fmt.Appendf(nil, "trace %d", n),
	}
}

func testStartupImages(t *testing.T, c catalog.Catalog) {
	ctx := t.Context()
	old, latest, other := startupImage("r", "old", 1), startupImage("r", "latest", 2), startupImage("other", "old", 3)
	if _, err := c.StartupImage(ctx, "r", old.ChainID); !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("an image that was not noted: %v", err)
	}
	if err := c.PutBuilt(ctx, old); !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("built an image that was not noted: %v", err)
	}
	for _, m := range []catalog.StartupImage{old, latest, other} {
		check(t, c.NoteImage(ctx, m))
	}
	again := old
	again.Noted = time.Unix(9, 0)
	check(t, c.NoteImage(ctx, again)) // changes nothing
	old.Wanted, latest.Wanted, other.Wanted = 1, 1, 1
	images, err := c.StartupImages(ctx, "r")
	check(t, err)
	wantEqual(t, "images", []catalog.StartupImage{latest, old}, images)
	stale, err := c.StaleImages(ctx, 2)
	check(t, err)
	wantEqual(t, "stale", []catalog.StartupImage{other, latest}, stale)

	latest.Built, latest.Generation, latest.Key, latest.Previous = 1, 4, "startup/4", "startup/3"
	check(t, c.PutBuilt(ctx, latest))
	got, err := c.StartupImage(ctx, "r", latest.ChainID)
	check(t, err)
	wantEqual(t, "built", latest, got)
	stale, err = c.StaleImages(ctx, 10)
	check(t, err)
	wantEqual(t, "stale", []catalog.StartupImage{other, old}, stale)

	latest.TOC = digestOf("another TOC")
	check(t, c.NoteImage(ctx, latest))
	latest.Wanted, latest.Key, latest.Previous = 2, "", ""
	got, err = c.StartupImage(ctx, "r", latest.ChainID)
	check(t, err)
	wantEqual(t, "after another TOC", latest, got)
}

func testTraces(t *testing.T, c catalog.Catalog) {
	ctx := t.Context()
	limits := catalog.TraceLimits{Traces: 3, Services: 2}
	m, sibling, arm, other := startupImage("r", "a", 1), startupImage("r", "b", 2), startupImage("r", "c", 3), startupImage("other", "a", 4)
	arm.Platform = "linux/arm64"
	put := func(v catalog.Trace) { t.Helper(); check(t, c.PutTrace(ctx, v, limits)) }
	want := func(what string, want ...catalog.Trace) {
		t.Helper()
		got, err := c.Traces(ctx, "r", m.ChainID)
		check(t, err)
		wantEqual(t, what, want, got)
	}
	if err := c.PutTrace(ctx, startupTrace(m, "s", "x", 1), limits); !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("a trace of an image that was not noted: %v", err)
	}
	want("none")
	for _, v := range []catalog.StartupImage{m, sibling, arm, other} {
		check(t, c.NoteImage(ctx, v))
	}

	report := func(service, client string, n int64) catalog.Trace { return startupTrace(m, service, client, n) }
	put(report("s", "x", 1))
	put(report("s", "y", 2))
	put(report("s", "x", 3)) // takes the place of the first
	want("one a client", report("s", "y", 2), report("s", "x", 3))
	put(report("s", "z", 4))
	put(report("s", "w", 5))
	want("the oldest goes", report("s", "x", 3), report("s", "z", 4), report("s", "w", 5))
	for v, wanted := range map[*catalog.StartupImage]int64{&m: 6, &sibling: 6, &arm: 1, &other: 1} {
		got, err := c.StartupImage(ctx, v.Repository, v.ChainID)
		check(t, err)
		wantEqual(t, "wanted of "+v.Platform+" of "+v.Repository, wanted, got.Wanted)
	}
	others, err := c.Traces(ctx, "other", m.ChainID)
	check(t, err)
	wantEqual(t, "of another repository", 0, len(others))

	recorded := func(client string, n int64) catalog.Trace {
		v := report("s", client, n)
		v.Recorded = true
		return v
	}
	for i, client := range []string{"y", "x", "x", "x", "x"} {
		put(recorded(client, 6+int64(i)))
	}
	want("recorded ones have their own list, and one client does not push out others",
		report("s", "x", 3), report("s", "z", 4), report("s", "w", 5), recorded("y", 6), recorded("x", 9), recorded("x", 10))

	check(t, c.DeleteTraces(ctx, "r", m.ChainID, "s"))
	put(report("t", "x", 11))
	put(report("t", "y", 12))
	put(report("u", "x", 13))
	put(report("v", "x", 14)) // the third service
	want("services: one that more clients know stays", report("t", "x", 11), report("t", "y", 12), report("v", "x", 14))
	check(t, c.DeleteTraces(ctx, "r", m.ChainID, "t"))
	want("after one was forgotten", report("v", "x", 14))
	if err := c.DeleteTraces(ctx, "r", m.ChainID, "t"); !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("forgot it twice: %v", err)
	}
	if err := c.DeleteTraces(ctx, "r", digestOf("unknown"), ""); !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("forgot what is unknown: %v", err)
	}
	before, err := c.StartupImage(ctx, "r", m.ChainID)
	check(t, err)
	check(t, c.DeleteTraces(ctx, "r", m.ChainID, ""))
	want("after all were forgotten")
	after, err := c.StartupImage(ctx, "r", m.ChainID)
	check(t, err)
	wantEqual(t, "wanted after all were forgotten", before.Wanted+1, after.Wanted)
}
