package access_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/server/access"
)

func rules(t testing.TB, rules []access.RuleConfig, groups ...access.GroupConfig) *access.Rules {
	t.Helper()
	r, err := access.New(rules, groups)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestDecide(t *testing.T) {
	r := rules(t, []access.RuleConfig{
		{Name: "no secrets", To: []string{"anonymous", "user:eve"}, Deny: []string{"pull"}, Repositories: []string{"team/secret"}},
		{Name: "readers", To: []string{"everyone"}, Allow: []string{"pull"}, Repositories: []string{"team/**", "base/*"}},
		{Name: "developers", To: []string{"group:dev", "group:corp:dev"}, Allow: []string{"push", "pull"}, Repositories: []string{"**"}},
		{To: []string{"ci:org/*:main"}, Allow: []string{"push", "teach"}, Repositories: []string{"app-*"}},
		{Name: "known", To: []string{"authenticated"}, Allow: []string{"delete"}, Repositories: []string{"junk"}},
		{Name: "root", To: []string{"user:root"}, Allow: []string{"admin"}, Repositories: []string{"**"}},
	}, access.GroupConfig{Name: "dev", Members: []string{"user:ann", "cert:build-*"}})
	for _, test := range []struct {
		subject, groups string
		right           access.Right
		repository      string
		allowed         bool
		by              string
	}{
		{"anonymous", "", access.Pull, "team/app", true, "readers"},
		{"anonymous", "", access.Pull, "team", true, "readers"},
		{"anonymous", "", access.Pull, "team/secret", false, "no secrets"},
		{"user:eve", "", access.Pull, "team/secret", false, "no secrets"},
		{"user:bob", "", access.Pull, "team/secret", true, "readers"},
		{"user:bob", "", access.Pull, "team/secret/more", true, "readers"},
		{"anonymous", "", access.Pull, "teams/app", false, ""},
		{"anonymous", "", access.Pull, "base/debian", true, "readers"},
		{"anonymous", "", access.Pull, "base/debian/more", false, ""},
		{"anonymous", "", access.Push, "team/app", false, ""},
		{"user:ann", "", access.Push, "anything/at/all", true, "developers"},
		{"cert:ann", "", access.Push, "anything", false, ""},
		{"cert:build-7", "", access.Push, "anything", true, "developers"},
		{"corp:joe", "corp:dev", access.Push, "x", true, "developers"},
		{"corp:joe", "corp:ops", access.Push, "x", false, ""},
		{"user:ann", "", access.Delete, "team/app", false, ""},
		{"ci:org/x:main", "", access.Push, "app-1", true, "rule 4"},
		{"ci:org/x:other", "", access.Push, "app-1", false, ""},
		{"ci:org/x:main", "", access.Teach, "app", false, ""},
		{"anonymous", "", access.Delete, "junk", false, ""},
		{"x:y", "", access.Delete, "junk", true, "known"},
		{"user:root", "", access.Admin, "", true, "root"},
		{"user:ann", "", access.Admin, "", false, ""},
		{"user:root", "", 0, "x", false, ""},
		{"user:root", "", 77, "x", false, ""},
	} {
		s := access.Subject{Name: test.subject}
		if test.groups != "" {
			s.Groups = strings.Split(test.groups, ",")
		}
		allowed, by := r.Decide(s, test.right, test.repository)
		name := ""
		if by != nil {
			name = by.Name
		}
		if allowed != test.allowed || name != test.by {
			t.Errorf("%s %v %s %q: %v by %q, want %v by %q", test.subject, test.groups, test.right, test.repository, allowed, name, test.allowed, test.by)
		}
	}
	if got := r.Groups(access.Subject{Name: "cert:build-1", Groups: []string{"corp:x"}}); !slices.Equal(got, []string{"corp:x", "dev"}) {
		t.Errorf("groups: %v", got)
	}
	var grants []string
	for _, g := range r.Grants(access.Pull, "team/secret") {
		grants = append(grants, g.Rule.Name+": "+strings.Join(g.To, " "))
	}
	if diff := cmp.Diff([]string{"no secrets: anonymous user:eve", "readers: everyone"}, grants); diff != "" {
		t.Errorf("grants (-want +got):\n%s", diff)
	}
}

func TestWrongRules(t *testing.T) {
	one := func(change func(*access.RuleConfig)) []access.RuleConfig {
		c := access.RuleConfig{Name: "r", To: []string{"user:a"}, Allow: []string{"pull"}, Repositories: []string{"x"}}
		change(&c)
		return []access.RuleConfig{c}
	}
	for _, test := range []struct {
		rules []access.RuleConfig
		group access.GroupConfig
		want  string
	}{
		{one(func(c *access.RuleConfig) { c.Deny = c.Allow }), access.GroupConfig{}, "either allow or deny"},
		{one(func(c *access.RuleConfig) { c.Allow = nil }), access.GroupConfig{}, "either allow or deny"},
		{one(func(c *access.RuleConfig) { c.Allow = []string{"write"} }), access.GroupConfig{}, `"write" is no right: there are [pull push delete teach admin]`},
		{one(func(c *access.RuleConfig) { c.To = nil }), access.GroupConfig{}, "to whom"},
		{one(func(c *access.RuleConfig) { c.To = []string{"*"} }), access.GroupConfig{}, `write "everyone"`},
		{one(func(c *access.RuleConfig) { c.To = []string{"ann"} }), access.GroupConfig{}, `"ann" is no subject`},
		{one(func(c *access.RuleConfig) { c.To = []string{"*:ann"} }), access.GroupConfig{}, `"*:ann" is no subject`},
		{one(func(c *access.RuleConfig) { c.To = []string{"group:dev"} }), access.GroupConfig{}, "there is no group dev"},
		{one(func(c *access.RuleConfig) { c.To = []string{"group:a*"} }), access.GroupConfig{}, "has no star"},
		{one(func(c *access.RuleConfig) { c.Repositories = nil }), access.GroupConfig{}, "it wants repositories"},
		{one(func(c *access.RuleConfig) { c.Repositories = []string{"a//b"} }), access.GroupConfig{}, "a segment is empty"},
		{one(func(c *access.RuleConfig) { c.Repositories = []string{"/a"} }), access.GroupConfig{}, "a segment is empty"},
		{one(func(c *access.RuleConfig) { c.Repositories = []string{"a**"} }), access.GroupConfig{}, "segment of its own"},
		{one(func(c *access.RuleConfig) { c.Repositories = []string{"Team"} }), access.GroupConfig{}, "no repository has 'T'"},
		{one(func(c *access.RuleConfig) { c.Repositories = []string{"**/a/**/b/**"} }), access.GroupConfig{}, "at most 2 segments"},
		{append(one(func(*access.RuleConfig) {}), one(func(*access.RuleConfig) {})...), access.GroupConfig{}, "another rule has this name"},
		{nil, access.GroupConfig{Name: "a:b"}, "without colons"},
		{nil, access.GroupConfig{Name: "a", Members: []string{"group:b"}}, "is no subject"},
		{nil, access.GroupConfig{Name: "a", Members: []string{"everyone"}}, "is no subject"},
	} {
		var groups []access.GroupConfig
		if test.group.Name != "" {
			groups = append(groups, test.group)
		}
		if _, err := access.New(test.rules, groups); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v: %v, want %q", test.rules, err, test.want)
		}
	}
}

// A pattern matches what a regular expression made of it does.
func TestPatternIsRegexp(t *testing.T) {
	segment := rapid.SampledFrom([]string{"a", "b", "ab", "*", "a*", "*b", "a*b", "**", "a-*.b"})
	name := rapid.SampledFrom([]string{"a", "b", "ab", "aab", "ba", "a-x.b", "a-b"})
	rapid.Check(t, func(t *rapid.T) {
		text := strings.Join(rapid.SliceOfN(segment, 1, 5).Draw(t, "pattern"), "/")
		p, err := access.ParsePattern(text)
		if err != nil {
			if strings.Count(text, "**") <= 2 {
				t.Fatal(err)
			}
			return
		}
		s := strings.Join(rapid.SliceOfN(name, 0, 5).Draw(t, "name"), "/")
		// Each segment with the slash that ends it.
		var b strings.Builder
		for part := range strings.SplitSeq(text, "/") {
			if part == "**" {
				b.WriteString("([^/]+/)*")
			} else {
				b.WriteString(strings.ReplaceAll(regexp.QuoteMeta(part), `\*`, "[^/]*") + "/")
			}
		}
		subject := s + "/"
		if s == "" {
			subject = ""
		}
		if want := regexp.MustCompile("^" + b.String() + "$").MatchString(subject); p.Match(s) != want {
			t.Fatalf("%q matches %q: %v, want %v", text, s, !want, want)
		}
	})
}

// The first rule that names all three decides; rules behind it, and those that name
// something else, change nothing.
func TestFirstRuleDecides(t *testing.T) {
	subjects := []string{"anonymous", "user:a", "user:b", "ci:a"}
	repositories := []string{"x", "x/y", "z"}
	draw := rapid.Custom(func(t *rapid.T) access.RuleConfig {
		c := access.RuleConfig{
			To:           rapid.SliceOfN(rapid.SampledFrom(append([]string{"everyone", "authenticated", "user:*"}, subjects...)), 1, 3).Draw(t, "to"),
			Repositories: rapid.SliceOfN(rapid.SampledFrom([]string{"x", "x/**", "*", "**", "z"}), 1, 2).Draw(t, "repositories"),
		}
		rights := rapid.SliceOfN(rapid.SampledFrom([]string{"pull", "push", "delete"}), 1, 2).Draw(t, "rights")
		if rapid.Bool().Draw(t, "allow") {
			c.Allow = rights
		} else {
			c.Deny = rights
		}
		return c
	})
	rapid.Check(t, func(t *rapid.T) {
		configs := rapid.SliceOfN(draw, 0, 6).Draw(t, "rules")
		all, err := access.New(configs, nil)
		if err != nil {
			t.Fatal(err)
		}
		s := access.Subject{Name: rapid.SampledFrom(subjects).Draw(t, "subject")}
		right := rapid.SampledFrom([]access.Right{access.Pull, access.Push, access.Delete, access.Teach}).Draw(t, "right")
		repository := rapid.SampledFrom(repositories).Draw(t, "repository")
		want := false
		for _, c := range configs { // each alone
			one, err := access.New([]access.RuleConfig{c}, nil)
			if err != nil {
				t.Fatal(err)
			}
			if allowed, by := one.Decide(s, right, repository); by != nil {
				want = allowed
				break
			}
		}
		if got, _ := all.Decide(s, right, repository); got != want {
			t.Fatalf("%v %v %s: %v, want %v", s, right, repository, got, want)
		}
	})
}
