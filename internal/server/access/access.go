// Package access decides who may do what to which repository. It is a pure function of
// rules: who somebody is, package login finds out; that every endpoint asks, package
// guard sees to.
//
// # Subjects
//
// A subject is a name with the way by which it became known before it, so that nobody can
// take another one's name by another way:
//
//	user:NAME      by a password (htpasswd)
//	cert:NAME      by a client certificate
//	token:NAME     by an external token service
//	ISSUER:NAME    by a token of the issuer that the configuration calls ISSUER
//	anonymous      not at all
//
// A subject may be in groups: those of the configuration, and, as ISSUER:GROUP, those that
// its issuer says.
//
// # Rights
//
//	pull     manifests, blobs, tags, referrers, bundles, recipes and contents of layers; a name in the
//	         catalog; reports of starts; what is known of startup sets
//	push     uploads, manifests, mounts (which need pull where the blob is); notifications of pushes
//	delete   manifests, tags, blobs
//	teach    recorded traces, which decide what a startup set has, and forgetting them
//	admin    what is about the whole server, as its metrics; asked for the repository ""
//
// No right includes another one.
//
// # Rules
//
// Rules are read from the first to the last. The first that names the subject, the right
// and the repository decides, by its effect. If there is none, the answer is no.
//
//	[[rule]]
//	name = "developers"               # for explanations and the audit log
//	to = ["group:developers"]
//	allow = ["pull", "push"]          # or: deny = [...]
//	repositories = ["team/**", "base/*"]
//
// To whom: "everyone"; "authenticated", which is everyone but anonymous; "anonymous";
// "group:NAME"; or a subject, in which * stands for any number of any characters. "*" alone is
// refused: it might be meant for one of the first two.
//
// A repository pattern is a name whose segments, between slashes, may have *, which stands for
// any number of characters but slashes. A segment ** stands for any number of segments, also
// none: team/** are team and all below it, ** are all repositories and the server itself.
package access

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Right is something that may be done.
type Right uint8

// Rights. The zero value is one that nobody has: an endpoint that forgot to name its right
// is closed.
const (
	Pull Right = 1 + iota
	Push
	Delete
	Teach
	Admin
)

var rightNames = [...]string{Pull: "pull", Push: "push", Delete: "delete", Teach: "teach", Admin: "admin"}

// Rights are all of them.
func Rights() []Right { return []Right{Pull, Push, Delete, Teach, Admin} }

func (r Right) String() string {
	if r == 0 || int(r) >= len(rightNames) {
		return "none"
	}
	return rightNames[r]
}

// ParseRight reads the name of a right.
func ParseRight(s string) (Right, error) {
	for _, r := range Rights() {
		if s == r.String() {
			return r, nil
		}
	}
	return 0, fmt.Errorf("%q is no right: there are %v", s, Rights())
}

// Anonymous is the subject that nobody knows.
const Anonymous = "anonymous"

// Subject is who wants to do something.
type Subject struct {
	Name   string   // user:ann, ISSUER:NAME, ..., or Anonymous
	Groups []string // that its issuer says, ISSUER:GROUP
}

// RuleConfig is a rule as the configuration has it.
type RuleConfig struct {
	Name         string   `toml:"name"`
	To           []string `toml:"to"`
	Allow        []string `toml:"allow"`
	Deny         []string `toml:"deny"`
	Repositories []string `toml:"repositories"`
}

// GroupConfig is a group as the configuration has it.
type GroupConfig struct {
	Name    string   `toml:"name"`
	Members []string `toml:"members"`
}

// Rule is one rule.
type Rule struct {
	// Name is the configuration's, or "rule 3".
	Name  string
	Allow bool // else it denies

	to           []who
	rights       [Admin + 1]bool
	repositories []Pattern
}

// Rules decide. They do not change.
type Rules struct {
	rules  []Rule
	groups []group
}

type group struct {
	name    string
	members []who
}

// who is one entry of a rule's list of subjects.
type who struct {
	everyone, authenticated bool
	group                   string // without "group:"
	name                    string // a pattern, with *
}

// New reads rules. An error names the rule.
func New(rules []RuleConfig, groups []GroupConfig) (*Rules, error) {
	r := new(Rules)
	for i, c := range groups {
		g, err := newGroup(c)
		if err == nil && slices.ContainsFunc(r.groups, func(o group) bool { return o.name == c.Name }) {
			err = errors.New("it is there twice")
		}
		if err != nil {
			return nil, fmt.Errorf("group %d %q: %w", i+1, c.Name, err)
		}
		r.groups = append(r.groups, g)
	}
	for i, c := range rules {
		rule, err := r.newRule(c)
		if rule.Name == "" {
			rule.Name = fmt.Sprintf("rule %d", i+1)
		}
		if err == nil && slices.ContainsFunc(r.rules, func(o Rule) bool { return o.Name == rule.Name }) {
			err = errors.New("another rule has this name")
		}
		if err != nil {
			return nil, fmt.Errorf("rule %d %q: %w", i+1, c.Name, err)
		}
		r.rules = append(r.rules, rule)
	}
	return r, nil
}

func newGroup(c GroupConfig) (group, error) {
	g := group{name: c.Name}
	if c.Name == "" || strings.ContainsAny(c.Name, ":* ") {
		return g, errors.New("a group wants a name without colons, stars and spaces: names with a colon are groups of issuers")
	}
	for _, m := range c.Members {
		w, err := parseWho(m)
		if err != nil {
			return g, err
		}
		if w.name == "" {
			return g, fmt.Errorf("%q is no subject: members are subjects, such as user:ann", m)
		}
		g.members = append(g.members, w)
	}
	return g, nil
}

func (r *Rules) newRule(c RuleConfig) (rule Rule, err error) {
	rule = Rule{Name: c.Name, Allow: len(c.Allow) > 0}
	if (len(c.Allow) > 0) == (len(c.Deny) > 0) {
		return rule, errors.New("it wants either allow or deny, with rights")
	}
	if len(c.To) == 0 {
		return rule, errors.New(`it wants to whom: to = ["user:ann"]`)
	}
	if len(c.Repositories) == 0 {
		return rule, errors.New(`it wants repositories, such as ["team/**"]; ["**"] are all`)
	}
	for _, s := range c.To {
		w, err := parseWho(s)
		if err != nil {
			return rule, err
		}
		if w.group != "" && !strings.Contains(w.group, ":") && !slices.ContainsFunc(r.groups, func(g group) bool { return g.name == w.group }) {
			return rule, fmt.Errorf("there is no group %s; those of an issuer are group:ISSUER:NAME", w.group)
		}
		rule.to = append(rule.to, w)
	}
	for _, s := range append(slices.Clone(c.Allow), c.Deny...) {
		right, err := ParseRight(s)
		if err != nil {
			return rule, err
		}
		rule.rights[right] = true
	}
	for _, s := range c.Repositories {
		p, err := ParsePattern(s)
		if err != nil {
			return rule, err
		}
		rule.repositories = append(rule.repositories, p)
	}
	return rule, nil
}

// parseWho reads an entry of a list of subjects.
func parseWho(s string) (who, error) {
	switch s {
	case "everyone":
		return who{everyone: true}, nil
	case "authenticated":
		return who{authenticated: true}, nil
	case Anonymous:
		return who{name: Anonymous}, nil
	case "*":
		return who{}, errors.New(`"*" is no subject: write "everyone", or "authenticated" for all but anonymous`)
	}
	kind, name, ok := strings.Cut(s, ":")
	if !ok || kind == "" || name == "" || strings.Contains(kind, "*") {
		return who{}, fmt.Errorf(`%q is no subject: want "everyone", "authenticated", "anonymous", "group:NAME", "user:NAME", "cert:NAME" or "ISSUER:NAME"`, s)
	}
	if kind == "group" {
		if strings.Contains(name, "*") {
			return who{}, fmt.Errorf("%q: a group's name has no star", s)
		}
		return who{group: name}, nil
	}
	return who{name: s}, nil
}

// Decide says whether a subject may do something to a repository, and by which rule; nil: none
// names it, so the answer is no.
func (r *Rules) Decide(s Subject, right Right, repository string) (allowed bool, by *Rule) {
	if right == 0 || int(right) >= len(rightNames) {
		return false, nil
	}
	for i := range r.rules {
		rule := &r.rules[i]
		if rule.rights[right] && rule.has(repository) && r.names(rule, s) {
			return rule.Allow, rule
		}
	}
	return false, nil
}

func (rule *Rule) has(repository string) bool {
	return slices.ContainsFunc(rule.repositories, func(p Pattern) bool { return p.Match(repository) })
}

func (r *Rules) names(rule *Rule, s Subject) bool {
	return slices.ContainsFunc(rule.to, func(w who) bool {
		switch {
		case w.everyone:
			return true
		case w.authenticated:
			return s.Name != Anonymous
		case w.group != "":
			return r.in(s, w.group)
		}
		return Glob(w.name, s.Name)
	})
}

// in reports whether a subject is in a group.
func (r *Rules) in(s Subject, name string) bool {
	if strings.Contains(name, ":") {
		return slices.Contains(s.Groups, name)
	}
	i := slices.IndexFunc(r.groups, func(g group) bool { return g.name == name })
	return slices.ContainsFunc(r.groups[i].members, func(w who) bool { return Glob(w.name, s.Name) })
}

// Names reports whether any rule allows a subject something.
func (r *Rules) Names(s Subject) bool {
	return slices.ContainsFunc(r.rules, func(rule Rule) bool { return rule.Allow && r.names(&rule, s) })
}

// Groups returns the groups that a subject is in: the issuer's, and the configuration's.
func (r *Rules) Groups(s Subject) []string {
	all := slices.Clone(s.Groups)
	for _, g := range r.groups {
		if r.in(s, g.name) {
			all = append(all, g.name)
		}
	}
	return all
}

// Grants are the rules that give or deny a right for a repository, in their order, each with those
// it names: for explanations. Rules behind one that names everyone are without effect, and left out.
func (r *Rules) Grants(right Right, repository string) []Grant {
	var all []Grant
	for i := range r.rules {
		rule := &r.rules[i]
		if int(right) >= len(rule.rights) || !rule.rights[right] || !rule.has(repository) {
			continue
		}
		g := Grant{Rule: rule}
		last := false
		for _, w := range rule.to {
			g.To = append(g.To, w.String())
			if i := slices.IndexFunc(r.groups, func(g group) bool { return g.name == w.group }); i >= 0 {
				for _, m := range r.groups[i].members {
					g.Members = append(g.Members, m.String())
				}
			}
			last = last || w.everyone
		}
		if all = append(all, g); last {
			break
		}
	}
	return all
}

// Grant is what one rule says about a right and a repository.
type Grant struct {
	Rule    *Rule
	To      []string // subjects, as the rule has them
	Members []string // of the groups among them
}

func (w who) String() string {
	switch {
	case w.everyone:
		return "everyone"
	case w.authenticated:
		return "authenticated"
	case w.group != "":
		return "group:" + w.group
	}
	return w.name
}
