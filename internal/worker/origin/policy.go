package origin

import (
	"fmt"
	"strings"
)

// Policy says what has to be known of an image before a container may start on it.
type Policy string

const (
	// Served: a server that was authenticated, or that somebody trusts all the same, said what its files are.
	Served Policy = "served"
	// Proven: its layers were hashed here, and make these files.
	Proven Policy = "proven"
)

// Policies are what an administrator says for registries. The zero value says nothing of any.
type Policies struct{ of map[string]Policy }

// others is the name that stands for each registry that is not named itself.
const others = "*"

// ParsePolicies reads policies: each is HOST[:PORT]=POLICY, or *=POLICY for all other registries.
func ParsePolicies(list []string) (Policies, error) {
	p := Policies{of: make(map[string]Policy)}
	for _, s := range list {
		name, policy, _ := strings.Cut(s, "=")
		if policy := Policy(policy); policy != Served && policy != Proven {
			return Policies{}, fmt.Errorf("%q: write REGISTRY=served or REGISTRY=proven", s)
		}
		if name != others && (name == "" || strings.Contains(name, "/") || Of(name+"/some/image") != name) {
			return Policies{}, fmt.Errorf("%q: %q is no registry: write HOST or HOST:PORT, as image names have it, or * for all that are not named", s, name)
		}
		if _, twice := p.of[name]; twice {
			return Policies{}, fmt.Errorf("%s is named twice: say one policy for it", name)
		}
		p.of[name] = Policy(policy)
	}
	return p, nil
}

// Of is the policy for the images of a registry; "": nothing was said, so that it depends on who serves them.
func (p Policies) Of(registry string) Policy {
	if policy, ok := p.of[registry]; ok {
		return policy
	}
	return p.of[others]
}
