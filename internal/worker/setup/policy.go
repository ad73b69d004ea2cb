package setup

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"hydrofoil.dev/foil/internal/worker/containerd"
	"hydrofoil.dev/foil/internal/worker/hosts"
	"hydrofoil.dev/foil/internal/worker/origin"
)

// checkPolicies says of each registry that is configured, or that images here are of, what has to be known of its images
// before a container starts, and why.
func checkPolicies(ctx context.Context, o Options) (list []finding) {
	const name = "policy"
	policies, err := origin.ParsePolicies(o.Policies)
	if err != nil {
		return []finding{{Name: name, State: containerd.Wrong, Detail: err.Error(), Fix: "correct policy: the daemon does not start with it"}}
	}
	set := hosts.New(hosts.Options{Dirs: o.HostsDirs})
	defer set.Close()
	for _, registry := range o.registries() {
		all, err := set.For(ctx, hosts.Want{Registry: registry})
		if err != nil {
			continue // what is wrong with its hosts.toml is said there
		}
		weak := make([]string, 0, len(all))
		for _, h := range all {
			if h.Weak != "" {
				weak = append(weak, h.Client.Base()+": "+h.Weak)
			}
		}
		always := len(weak) == len(all)
		if why := o.Unproven[registry]; why != "" && len(weak) == 0 {
			weak, always = append(weak, "images here came from "+why), true
		}
		list = append(list, policyOf(name, registry, policies.Of(registry), weak, always))
	}
	return list
}

// registries are those that something is known of.
func (o *Options) registries() []string {
	list := slices.Clone(o.Registries)
	for _, root := range filepath.SplitList(o.HostsDirs) {
		files, _ := filepath.Glob(filepath.Join(root, "*", "hosts.toml")) // a bad pattern is told elsewhere
		for _, file := range files {
			if dir := filepath.Base(filepath.Dir(file)); dir != "_default" {
				list = append(list, registryOf(dir))
			}
		}
	}
	for _, p := range o.Policies {
		if registry, _, _ := strings.Cut(p, "="); registry != "*" {
			list = append(list, registry)
		}
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// policyOf is the finding for one registry. said is what --policy says; weak are its hosts of which nothing shows that it
// is they who answer, and always says that there are no others.
func policyOf(name, registry string, said origin.Policy, weak []string, always bool) finding {
	because := strings.Join(weak, "; ")
	f := finding{Name: name, State: containerd.OK}
	switch {
	case said == origin.Served && len(weak) > 0:
		f.State = containerd.Note
		f.Detail = fmt.Sprintf("%s: served: --policy says so, though nothing shows who answers (%s): who is between may choose what runs until that is proven", registry, because)
		f.Fix = "have it speak TLS, with a certificate that its hosts.toml can verify; or take it out of policy, so that containers wait for the proof"
	case said != "":
		f.Detail = fmt.Sprintf("%s: %s: --policy says so", registry, said)
	case len(weak) == 0:
		f.Detail = registry + ": served: its hosts are authenticated by TLS, or on this machine"
	case always:
		f.Detail = fmt.Sprintf("%s: proven: a container waits for the proof of its image (%s)", registry, because)
	default:
		f.Detail = fmt.Sprintf("%s: served by hosts that are authenticated, proven by others (%s)", registry, because)
	}
	return f
}
