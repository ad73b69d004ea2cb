package pull

import "testing"

func TestReferences(t *testing.T) {
	const d = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
	for _, c := range []struct {
		in, host, repository, latest string
	}{
		{"registry.example/a/b:1", "registry.example", "a/b", "1"},
		{"registry.example/a/b", "registry.example", "a/b", "latest"},
		{"registry.example:5000/a@" + d, "registry.example:5000", "a", d},
		{"registry.example/a:1@" + d, "registry.example", "a", d},
		{"[::1]:5000/a:1", "[::1]:5000", "a", "1"},
	} {
		r, err := ParseRef(c.in)
		if err != nil {
			t.Errorf("%s: %v", c.in, err)
			continue
		}
		if r.Host != c.host || r.Repository != c.repository || r.Reference != c.latest {
			t.Errorf("%s: %+v", c.in, r)
		}
	}
	for _, in := range []string{"", "redis", "registry.example/A", "registry.example/a:", "registry.example/../a"} {
		if r, err := ParseRef(in); err == nil {
			t.Errorf("%q is %+v", in, r)
		}
	}
	for in, ok := range map[string]bool{"": true, "linux/amd64": true, "linux/arm/v7": true, "linux": false, "windows/amd64": false, "linux/": false, "a/b/c/d": false} {
		if _, err := parsePlatform(in); (err == nil) != ok {
			t.Errorf("platform %q: %v", in, err)
		}
	}
}
