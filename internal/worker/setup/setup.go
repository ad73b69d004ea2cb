// Package setup says what in the settings of a worker's daemon does not go
// together with this host: addresses that nobody listens on, files of registry
// hosts that cannot be read, a systemd unit of an older version. It is for foil
// doctor, and changes nothing.
package setup

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/config"
	"github.com/pelletier/go-toml/v2"

	"hydrofoil.dev/foil/internal/metrics"
	"hydrofoil.dev/foil/internal/worker/containerd"
	"hydrofoil.dev/foil/internal/worker/mirror"
	"hydrofoil.dev/foil/internal/worker/node"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/rootlock"
)

// Options are settings of foil node, as its flags have them.
type Options struct {
	Root      string // --root
	HostsDirs string // --hosts-dir
	Mirror    string // --mirror-listen
	Metrics   string // --metrics-listen
	DiskLimit string // --disk-limit
	// Groups are those of --origin-group; Registries those of the images on the worker, nil when no daemon answers.
	Groups, Registries []string
	// Policies are those of --policy. Unproven says, by registry, why images here are to be proven before they start.
	Policies []string
	Unproven map[string]string
	// Unit is what `systemctl show foil-node` prints; empty where there is no systemd.
	Unit string
	// Running is the version of the daemon that answers, empty when none does, and
	// Version that of this program.
	Running, Version string
}

type finding = containerd.Finding

// Check looks at everything.
func Check(ctx context.Context, o Options) []finding {
	named, list := checkHosts(ctx, o)
	if why := rootlock.Hanging(o.Root); why != "" {
		list = append(list, finding{Name: "daemon", State: containerd.Wrong, Detail: why, Fix: "start the daemon: it ends that connection"})
	}
	if f, ok := checkMirror(ctx, o, named); ok {
		list = append(list, f)
	}
	if o.Metrics != metrics.Off {
		network, at, err := metrics.Network(o.Metrics)
		if err != nil {
			list = append(list, finding{Name: "metrics", State: containerd.Wrong, Detail: err.Error(), Fix: "correct metrics-listen"})
		} else {
			list = append(list, checkListens(ctx, "metrics", network, at, "metrics-listen"))
		}
	}
	list = append(list, checkLimit(o.DiskLimit), checkOrigins(o, named))
	list = append(list, checkPolicies(ctx, o)...)
	if o.Unit != "" {
		list = append(list, checkUnit(o.Unit))
	}
	if o.Running != "" && o.Running != o.Version {
		list = append(list, finding{Name: "version", State: containerd.Note, Detail: fmt.Sprintf("the daemon is foil %s, this is %s", o.Running, o.Version),
			Fix: "restart it; containers go on: systemctl restart " + containerd.Unit})
	}
	return list
}

// checkHosts reads every hosts.toml as containerd does, with the certificates
// that it names, and returns those that name the mirror.
func checkHosts(ctx context.Context, o Options) (named []string, list []finding) {
	self, err := mirror.Addresses(o.Mirror)
	if err != nil {
		self = nil // off, or said elsewhere
	}
	read := 0
	for _, root := range filepath.SplitList(o.HostsDirs) {
		files, err := filepath.Glob(filepath.Join(root, "*", "hosts.toml"))
		if err != nil {
			list = append(list, finding{Name: "hosts.toml", State: containerd.Wrong, Detail: err.Error(), Fix: "correct hosts-dir"})
		}
		for _, file := range files {
			dir := filepath.Dir(file)
			registry := registryOf(filepath.Base(dir))
			// containerd logs that it cannot be parsed, and goes on without it.
			var parsed map[string]any
			b, err := os.ReadFile(file)
			if err == nil {
				err = toml.Unmarshal(b, &parsed)
			}
			if err != nil {
				list = append(list, finding{Name: "hosts.toml", State: containerd.Wrong, Detail: fmt.Sprintf("%s: %v", file, err),
					Fix: "correct it: containerd and foil node do as if it were not there"})
				continue
			}
			hosts, err := config.ConfigureHosts(ctx, config.HostOptions{HostDir: func(string) (string, error) { return dir, nil }})(registry)
			if err != nil {
				fix := "correct " + file + ", or the files that it names (ca, client): neither containerd nor foil node pulls from that registry"
				if os.Geteuid() != 0 && errors.Is(err, os.ErrPermission) {
					fix = "ask again as root"
				}
				list = append(list, finding{Name: "hosts.toml", State: containerd.Wrong, Detail: fmt.Sprintf("%s: %v", file, err), Fix: fix})
				continue
			}
			read++
			for _, h := range hosts {
				if slices.Contains(self, h.Host) {
					named = append(named, file)
					if err := askMirror(ctx, h); err != nil {
						list = append(list, finding{Name: "hosts.toml", State: containerd.Wrong, Detail: fmt.Sprintf("by %s containerd gets nothing from the mirror: %v", file, err),
							Fix: "write there:\n" + mirror.Hosts(o.Root, h.Host)})
					}
				}
			}
		}
	}
	if read > 0 {
		list = append(list, finding{Name: "hosts.toml", State: containerd.OK, Detail: fmt.Sprintf("%d read, with the certificates that they name", read)})
	}
	return named, list
}

// askMirror asks the mirror as containerd does by a hosts.toml. That nobody answers at its address is said elsewhere.
func askMirror(ctx context.Context, h docker.RegistryHost) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, h.Scheme+"://"+h.Host+"/v2/", nil)
	if err != nil {
		return err
	}
	defer h.Client.CloseIdleConnections()
	resp, err := h.Client.Do(req)
	if e, ok := errors.AsType[*net.OpError](err); ok && e.Op == "dial" {
		return nil
	}
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("it answers %s", resp.Status)
	}
	return nil
}

// registryOf returns the registry that a directory of hosts.toml is for: its name, in
// which _5000_ may stand for the port :5000.
func registryOf(dir string) string {
	if dir == "_default" {
		return "registry.invalid"
	}
	if name, port, ok := strings.Cut(strings.TrimSuffix(dir, "_"), "_"); ok {
		return net.JoinHostPort(strings.Trim(name, "[]"), port)
	}
	return dir
}

func checkMirror(ctx context.Context, o Options, named []string) (finding, bool) {
	if o.Mirror == "off" {
		return finding{}, false
	}
	if _, err := mirror.Addresses(o.Mirror); err != nil {
		return finding{Name: "mirror", State: containerd.Wrong, Detail: err.Error(), Fix: "correct mirror-listen"}, true
	}
	f := checkListens(ctx, "mirror", "tcp", o.Mirror, "mirror-listen")
	if f.State == containerd.OK && len(named) == 0 {
		return finding{Name: "mirror", State: containerd.Wrong, Detail: "it answers at " + o.Mirror + ", and no hosts.toml in " + o.HostsDirs + " names it: containerd never asks",
			Fix: "in a hosts.toml for each registry, or in that of _default, write:\n" + mirror.Hosts(o.Root, o.Mirror)}, true
	}
	if f.State == containerd.OK {
		f.Detail += "; " + fmt.Sprintf("%d hosts.toml name it", len(named))
	}
	return f, true
}

// checkListens reports whether somebody takes connections.
func checkListens(ctx context.Context, name, network, address, setting string) finding {
	if host, port, err := net.SplitHostPort(address); err == nil && host == "" {
		address = net.JoinHostPort("localhost", port)
	}
	c, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, network, address)
	if err != nil {
		fix := "start the daemon: systemctl start " + containerd.Unit + ", or foil node; if it runs, its log says why it does not listen: give " + setting + " another address, or restart it when that was changed"
		if errors.Is(err, os.ErrPermission) {
			fix = "ask again as root"
		}
		return finding{Name: name, State: containerd.Wrong, Detail: fmt.Sprintf("nothing answers at %s: %v", address, err), Fix: fix}
	}
	_ = c.Close()
	return finding{Name: name, State: containerd.OK, Detail: "answers at " + address}
}

func checkLimit(limit string) finding {
	if limit == "" {
		return finding{Name: "disk limit", State: containerd.Note, Detail: "none: nothing is removed that was not asked for",
			Fix: `where tags move and disks fill, set disk-limit = "80%" in the section [node] of the configuration file`}
	}
	if _, err := node.ParseLimit(limit); err != nil {
		return finding{Name: "disk limit", State: containerd.Wrong, Detail: err.Error(), Fix: "correct disk-limit: the daemon does not start with it"}
	}
	return finding{Name: "disk limit", State: containerd.OK, Detail: limit}
}

// checkOrigins says whether the daemon sees which image has whose layers. named are the hosts.toml that name the mirror.
func checkOrigins(o Options, named []string) finding {
	const name = "origins"
	groups, err := origin.ParseGroups(o.Groups)
	if err != nil {
		return finding{Name: name, State: containerd.Wrong, Detail: err.Error(), Fix: "correct origin-group: the daemon does not start with it"}
	}
	unseen := o.Registries
	if o.Mirror != "off" {
		unseen = slices.DeleteFunc(slices.Clone(unseen), func(registry string) bool {
			return slices.ContainsFunc(named, func(file string) bool {
				dir := filepath.Base(filepath.Dir(file))
				return dir == "_default" || registryOf(dir) == registry
			})
		})
	}
	if walls := groups.Walls(o.Registries); walls > 1 && len(unseen) > 0 {
		return finding{Name: name, State: containerd.Note,
			Detail: fmt.Sprintf("there are images of %d registries that do not trust each other, and containerd does not ask the mirror for those of %s: it may run one on the files of another that has the same layers, before these are proven", walls, strings.Join(unseen, ", ")),
			Fix:    "set mirror-listen, and name the mirror in a hosts.toml of each registry, or of _default; or, if whoever runs one may choose what runs of the others, name them in origin-group"}
	}
	detail := "each registry is a wall"
	if len(o.Groups) > 0 {
		detail = "registries that trust each other: " + strings.Join(o.Groups, "; ")
	}
	if o.Mirror == "off" {
		detail += "; without the mirror nobody sees which image has whose layers: under containerd those of one registry come lazily, and containerd unpacks all others until these are proven"
	}
	return finding{Name: name, State: containerd.OK, Detail: detail}
}

// UnitProperties are what checkUnit reads.
var UnitProperties = []string{"LoadState", "NeedDaemonReload", "FragmentPath", "Type", "KillMode", "FileDescriptorStoreMax"}

func checkUnit(shown string) finding {
	p := make(map[string]string)
	for line := range strings.Lines(shown) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		p[key] = value
	}
	const name = "systemd unit"
	install := "install deploy/systemd/" + containerd.Unit + " of this version, and run systemctl daemon-reload"
	switch {
	case p["LoadState"] == "not-found":
		return finding{Name: name, State: containerd.Note, Detail: containerd.Unit + " is not installed", Fix: install + ", for a daemon that is there from boot to shutdown"}
	case p["LoadState"] != "loaded":
		return finding{Name: name, State: containerd.Wrong, Detail: containerd.Unit + " is " + p["LoadState"], Fix: "systemctl status " + containerd.Unit + " says why"}
	case p["NeedDaemonReload"] == "yes":
		return finding{Name: name, State: containerd.Wrong, Detail: p["FragmentPath"] + " was changed", Fix: "run systemctl daemon-reload"}
	}
	var differs []string
	for _, want := range []struct{ key, value, why string }{
		{"Type", "notify", "containerd starts before images are mounted"},
		{"KillMode", "process", "a restart of the daemon ends the keeper, and reads of running containers with it"},
	} {
		if got := p[want.key]; got != want.value {
			differs = append(differs, fmt.Sprintf("%s=%s, not %s: %s", want.key, got, want.value, want.why))
		}
	}
	if p["FileDescriptorStoreMax"] == "0" || p["FileDescriptorStoreMax"] == "" {
		differs = append(differs, "no FileDescriptorStoreMax: daemon and keeper killed together lose reads of running containers")
	}
	if len(differs) > 0 {
		return finding{Name: name, State: containerd.Wrong, Detail: p["FragmentPath"] + ": " + strings.Join(differs, "; "), Fix: "it is of another version: " + install}
	}
	return finding{Name: name, State: containerd.OK, Detail: p["FragmentPath"]}
}
