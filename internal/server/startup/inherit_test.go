package startup

import (
	"errors"
	"testing"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/server/planner/plannertest"
)

func TestInherit(t *testing.T) {
	w := newWorld(t)
	files := someFiles(1)
	files["/opt/app-1.9/lib/part-3f2a1c.so"] = text(40, 300_000)
	old := w.image(t, "r", "1", files)
	args := []string{"app"}
	touched := []trace.Run{
		old.run(t, "/usr/bin/app", 0, 10), old.run(t, "/usr/lib/libx.so.1.2", 100, 10), old.run(t, "/usr/share/large", 700, 60),
		old.run(t, "/etc/version", 0, 0), old.run(t, "/etc/passwd", 0, 0), old.run(t, "/opt/app-1.9/lib/part-3f2a1c.so", 50, 1),
	}
	old.add(t, "a", old.trace(trace.Recorded, args, touched, nil))

	files = someFiles(2)
	delete(files, "/etc/passwd")
	// Has another name, 20 pages more at its beginning, and is cut in what was
	// page 107, so that the last two are at its end.
	files["/usr/lib/libx.so.1.3"] = text(30, 20*trace.BlockSize) + files["/usr/lib/libx.so.1.2"][:440_000]
	files["/usr/lib/libx.so.1"] = "-> libx.so.1.3"
	delete(files, "/usr/lib/libx.so.1.2")
	files["/usr/share/large"] = text(31, 100)
	// Has another name by its directory and its hash, and half a page less.
	files["/opt/app-1.10/lib/part-77b0de.so"] = text(40, 300_000)[2048:]
	next := w.image(t, "r", "2", files)
	if err := w.Prepare(t.Context(), next.Image); err != nil {
		t.Fatal(err)
	}
	got, origin := next.pages(t, "app")
	moved := []trace.Run{next.run(t, "/usr/lib/libx.so.1.3", 120, 8), next.run(t, "/etc/version", 0, 0), next.run(t, "/opt/app-1.10/lib/part-77b0de.so", 49, 2)}
	inherited := append([]trace.Run{next.run(t, "/usr/bin/app", 0, 10)}, moved...)
	want(t, "inherited", got, origin, bundle.OriginInherited, inherited...)
	wantPages(t, "what comes right after it", trace.Merge(next.find(t, "app").Late), moved...)
	next.deliver(t, next.find(t, "app").Select(next.x.Table(), everything))

	third := w.image(t, "r", "3", someFiles(3))
	if err := w.Prepare(t.Context(), third.Image); err != nil {
		t.Fatal(err)
	}
	got, origin = third.pages(t, "app")
	want(t, "from the one that was traced, not from the one between", got, origin, bundle.OriginInherited,
		third.run(t, "/usr/bin/app", 0, 10), third.run(t, "/usr/lib/libx.so.1.2", 100, 10), third.run(t, "/usr/share/large", 700, 60),
		third.run(t, "/etc/version", 0, 0), third.run(t, "/etc/passwd", 0, 0))

	// Reports add to it and take away.
	more := next.run(t, "/usr/lib/libc.so.6", 0, 5)
	next.add(t, "b", next.trace(trace.Reported, args, []trace.Run{more}, []trace.Run{next.run(t, "/etc/version", 0, 0)}))
	got, origin = next.pages(t, "app")
	want(t, "with a report", got, origin, bundle.OriginLearned, inherited[0], moved[0], moved[2], more)

	// Not from another platform or another repository.
	arm := w.image(t, "r", "arm", someFiles(4))
	arm.Platform = "linux/arm64"
	elsewhere := w.image(t, "elsewhere", "4", someFiles(4))
	for _, m := range []*image{arm, elsewhere} {
		if err := w.Prepare(t.Context(), m.Image); err != nil {
			t.Fatal(err)
		}
		got, origin = m.pages(t, "app")
		want(t, m.Platform+" "+m.Repository, got, origin, "")
	}

	// A version that was there before learns of it as well.
	if err := w.Forget(t.Context(), old.Image, ""); err != nil {
		t.Fatal(err)
	}
	third.built(t)
	got, origin = third.pages(t, "app")
	want(t, "from the report on the second", got, origin, bundle.OriginInherited, third.run(t, "/usr/lib/libc.so.6", 0, 5))
	if err := w.Forget(t.Context(), third.Image, trace.Service(args)); !errors.Is(err, ErrUnknown) {
		t.Errorf("forgot what is inherited: %v", err)
	}
}

// What the version before had in a pack that is lost is inherited by place.
func TestInheritWithoutPacks(t *testing.T) {
	w := newWorld(t)
	old := w.image(t, "r", "1", plannertest.Files{"/usr/bin/app": text(1, 400_000)})
	old.add(t, "a", old.trace(trace.Recorded, nil, []trace.Run{old.run(t, "/usr/bin/app", 30, 10)}, nil))
	if err := w.memory.List(t.Context(), "packs/", func(key string, _ int64) error { return w.memory.Delete(t.Context(), key) }); err != nil {
		t.Fatal(err)
	}
	next := w.image(t, "r", "2", plannertest.Files{"/usr/bin/app": text(2, 400_000)})
	if err := w.Prepare(t.Context(), next.Image); err != nil {
		t.Fatal(err)
	}
	got, origin := next.pages(t)
	want(t, "inherited", got, origin, bundle.OriginInherited, next.run(t, "/usr/bin/app", 30, 10))
}

func TestVersionless(t *testing.T) {
	for in, out := range map[string]string{
		"/usr/lib/libssl.so.3":                                 "/usr/lib/libssl.so.#",
		"/usr/lib/libssl.so.3.0.15":                            "/usr/lib/libssl.so.#",
		"/usr/lib/libfoo-1.so":                                 "/usr/lib/libfoo-#.so",
		"/usr/lib/python3.12/__pycache__/a.cpython-312.pyc":    "/usr/lib/python#/__pycache__/a.cpython-#.pyc",
		"/x/psycopg_binary.libs/libcrypto-1edd6557.so.3":       "/x/psycopg_binary.libs/libcrypto-#.so.#",
		"/x/psycopg-3.2.6.dist-info/METADATA":                  "/x/psycopg-#.dist-info/METADATA",
		"/nix/1b9p07z77phvv2hf6gm9f28syp39f1ag-glibc-2.35/lib": "/nix/#-glibc-#/lib",
		"/facade/decade":                                       "/facade/decade",
		"":                                                     "",
		"7.":                                                   "#.",
		".7":                                                   ".#",
	} {
		if got := versionless(in); got != out {
			t.Errorf("%s: %s, want %s", in, got, out)
		}
	}
	if likeness("liba-1.so", "liba-22.so") != 8 || likeness("abc", "abc") != 3 || likeness("", "x") != 0 || likeness("aa", "aaa") != 2 {
		t.Error("likeness")
	}
}
