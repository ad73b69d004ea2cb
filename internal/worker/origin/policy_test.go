package origin

import (
	"strings"
	"testing"
)

func TestPolicies(t *testing.T) {
	p, err := ParsePolicies([]string{"a.test=proven", "b.test:5000=served", "[::1]:5000=proven"})
	if err != nil {
		t.Fatal(err)
	}
	all, err := ParsePolicies([]string{"*=proven", "b.test:5000=served"})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		p        Policies
		registry string
		want     Policy
	}{
		{p, "a.test", Proven},
		{p, "a.test:5000", ""},
		{p, "b.test:5000", Served},
		{p, "[::1]:5000", Proven},
		{p, "", ""},
		{all, "a.test", Proven},
		{all, "b.test:5000", Served},
		{Policies{}, "a.test", ""},
	} {
		if got := c.p.Of(c.registry); got != c.want {
			t.Errorf("the policy for %q is %q, want %q", c.registry, got, c.want)
		}
	}
	for _, c := range []struct {
		list []string
		want string
	}{
		{[]string{""}, "write REGISTRY=served"},
		{[]string{"a.test"}, "write REGISTRY=served"},
		{[]string{"a.test=Proven"}, "write REGISTRY=served"},
		{[]string{"a.test/x=proven"}, "is no registry"},
		{[]string{"=proven"}, "is no registry"},
		{[]string{"A B=served"}, "is no registry"},
		{[]string{"a.test=served", "a.test=proven"}, "named twice"},
	} {
		if _, err := ParsePolicies(c.list); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v, want %q", c.list, err, c.want)
		}
	}
}
