package origin

import (
	"testing"

	"github.com/opencontainers/go-digest"
)

func TestGroups(t *testing.T) {
	g, err := ParseGroups([]string{"docker.io mirror.test:5000", "a.test b.test c.test"})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		a, b string
		want bool
	}{
		{"docker.io", "docker.io", true},
		{"docker.io", "mirror.test:5000", true},
		{"docker.io", "mirror.test", false},
		{"docker.io", "a.test", false},
		{"c.test", "a.test", true},
		{"other.test", "other.test", true},
		{"", "", false},
		{"", "a.test", false},
	} {
		if got := g.Same(c.a, c.b); got != c.want {
			t.Errorf("Same(%q, %q) = %v", c.a, c.b, got)
		}
		if got := (Groups{}).Same(c.a, c.b); got != (c.a == c.b && c.a != "") {
			t.Errorf("without groups, Same(%q, %q) = %v", c.a, c.b, got)
		}
	}
	if n := g.Walls([]string{"a.test", "docker.io", "b.test", "x.test", "a.test"}); n != 3 {
		t.Errorf("%d walls, want 3", n)
	}
	for _, bad := range []string{"", "a.test", "a.test a.test", "a.test/x b.test", "a.test,b.test c.test", "A B:x"} {
		if _, err := ParseGroups([]string{bad}); err == nil {
			t.Errorf("group %q is taken", bad)
		}
	}
	if _, err := ParseGroups([]string{"a.test b.test", "b.test c.test"}); err == nil {
		t.Error("a registry may be in two groups")
	}
}

func TestKeysDiffer(t *testing.T) {
	one, two := digest.FromString("1"), digest.FromString("2")
	keys := map[Key]bool{Key(one): true, KeyOf("a", one, two): true, KeyOf("b", one, two): true, KeyOf("a", two, two): true, KeyOf("a", one, one): true}
	if len(keys) != 5 {
		t.Errorf("%d keys of 5", len(keys))
	}
	for k := range keys {
		if k.Validate() != nil || KeyOfName(k.Encoded()) != k {
			t.Errorf("key %s", k)
		}
	}
	if Key("sha256:12").Validate() == nil {
		t.Error("a short key is one")
	}
}

func TestOf(t *testing.T) {
	for name, want := range map[string]string{"docker.io/library/redis:7": "docker.io", "a.test:5000/x/y@sha256:" + digest.FromString("").Encoded(): "a.test:5000", "?": ""} {
		if got := Of(name); got != want {
			t.Errorf("Of(%q) = %q, want %q", name, got, want)
		}
	}
}
