// Package containerd reads the configuration of a containerd, and says what in
// it keeps images from coming lazily: each finding with what goes wrong because
// of it, and what to write where.
//
// It knows the schemas of containerd 1.7 (version 2) and 2.x (version 3 and 4,
// which for what is read here are the same; 2.x migrates version 2 when it
// starts). What `containerd config dump` prints has every default in it; a plain
// file lacks those, and they are taken to be containerd's.
package containerd

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
)

// Finding is one thing that was looked at.
type Finding struct {
	Name   string
	State  State
	Detail string // what was found
	Fix    string // what to do about it
}

// State is what a finding means.
type State string

const (
	OK State = "ok"
	// Wrong: images do not come lazily, or not at all, or a kubelet does not work, because of it.
	Wrong State = "wrong"
	Note  State = "note" // it works, and this is worth knowing
	// Absent: this containerd was never told of Hydrofoil.
	Absent State = "absent"
)

// Options say what Check compares with.
type Options struct {
	// Socket is where the daemon serves containerd.
	Socket string
	// Root is the daemon's.
	Root string
	// Major is the first number of containerd's version; 0: what the
	// configuration's own version says.
	Major int
	// File is named in advice.
	File string
}

// Names of plugins, and the tables that hold what is looked for.
const (
	criImages  = "io.containerd.cri.v1.images"     // 2.x
	criGRPC    = "io.containerd.grpc.v1.cri"       // 1.7
	transfer   = "io.containerd.transfer.v1.local" // 2.x unpacks by it
	defaultFor = "overlayfs"
)

// config is a configuration as TOML has it.
type config map[string]any

// table returns the table at a path, nil when there is none.
func (c config) table(path ...string) config {
	for _, p := range path {
		next, ok := c[p].(map[string]any)
		if !ok {
			return nil
		}
		c = next
	}
	return c
}

func (c config) text(key string) string {
	s, _ := c[key].(string)
	return s
}

// Check looks at a configuration. An error says that it cannot be read.
func Check(data []byte, o Options) ([]Finding, error) {
	var c config
	if err := toml.Unmarshal(data, &c); err != nil {
		return nil, fmt.Errorf("read containerd's configuration: %w", err)
	}
	if o.File == "" {
		o.File = defaultFile
	}
	version, _ := c["version"].(int64)
	if version == 0 {
		version = 1
	}
	if o.Major == 0 {
		o.Major = 1
		if version >= 3 {
			o.Major = 2
		}
	}
	var list []Finding
	add := func(name string, s State, detail, format string, args ...any) {
		list = append(list, Finding{name, s, detail, fmt.Sprintf(format, args...)})
	}
	if version < 2 {
		add("configuration", Wrong, fmt.Sprintf("version %d", version), "bring %s up to version 2 or later with `containerd config migrate`, then merge what deploy/containerd has", o.File)
		return list, nil
	}

	name, plugin := proxy(c, o.Socket)
	if plugin == nil {
		add("proxy plugin", Absent, "none is Hydrofoil's", "to use Hydrofoil, write to %s:\n[proxy_plugins.hydrofoil]\n  type = \"snapshot\"\n  address = %q%s", o.File, o.Socket, exports(o))
		return list, nil
	}
	switch address := strings.TrimPrefix(plugin.text("address"), "unix://"); {
	case plugin.text("type") != "snapshot":
		add("proxy plugin", Wrong, fmt.Sprintf("%s has type %q", name, plugin.text("type")), "in [proxy_plugins.%s] of %s write: type = \"snapshot\"", name, o.File)
	case address != o.Socket:
		add("proxy plugin", Wrong, fmt.Sprintf("%s is at %s", name, address), "the daemon serves containerd at %s: in [proxy_plugins.%s] of %s write: address = %q, or start foil node with --snapshotter-socket %s", o.Socket, name, o.File, o.Socket, address)
	default:
		add("proxy plugin", OK, name+" is at "+address, "")
	}
	checkMapping(name, plugin, o, add)
	if o.Major >= 2 {
		checkTransfer(c, name, plugin, o, add)
	}
	checkCRI(c, name, plugin, o, add)
	return list, nil
}

// exports is what else the table of a proxy plugin is to have.
func exports(o Options) string {
	root := fmt.Sprintf("\n  [proxy_plugins.hydrofoil.exports]\n    root = %q", o.Root)
	if o.Major < 2 {
		return root
	}
	return "\n  capabilities = [\"remap-ids\"]" + root + "\n    enable_remote_snapshot_annotations = \"true\""
}

// proxy returns the proxy plugin that is meant to be Hydrofoil's: the one at its
// socket, or of its name.
func proxy(c config, socket string) (string, config) {
	all := c.table("proxy_plugins")
	for name := range all {
		if p := all.table(name); p != nil && strings.TrimPrefix(p.text("address"), "unix://") == socket {
			return name, p
		}
	}
	return "hydrofoil", all.table("hydrofoil")
}

// checkMapping looks at how containers in user namespaces get their files. 2.x
// maps the IDs of a mount; 1.7 cannot.
func checkMapping(name string, plugin config, o Options, add adder) {
	list, _ := plugin["capabilities"].([]any)
	switch declared := slices.Contains(list, any("remap-ids")); {
	case declared && o.Major < 2:
		add("user namespaces", Wrong, "the capability remap-ids is declared", "containerd 1.7 cannot mount what it then asks for, and no container in a user namespace starts: in [proxy_plugins.%s] of %s take it away", name, o.File)
	case !declared && o.Major >= 2:
		add("user namespaces", Note, "the capability remap-ids is not declared", "for a container in a user namespace containerd copies the image, all of which has to arrive first, and changes the owner of each file: in [proxy_plugins.%s] of %s write: capabilities = [\"remap-ids\"]", name, o.File)
	default:
		add("user namespaces", OK, "", "")
	}
}

type adder func(name string, s State, detail, format string, args ...any)

// checkTransfer looks at what ctr and, from 2.1 on, CRI pull by.
func checkTransfer(c config, name string, plugin config, o Options, add adder) {
	if plugin.table("exports").text("enable_remote_snapshot_annotations") != "true" {
		add("transfer: annotations", Wrong, "the transfer service does not say which image a layer is of", "every image is unpacked plainly: in %s write:\n[proxy_plugins.%s.exports]\n  enable_remote_snapshot_annotations = \"true\"", o.File, name)
	} else {
		add("transfer: annotations", OK, "", "")
	}
	unpack, _ := c.table("plugins", transfer)["unpack_config"].([]any)
	var others []string
	for _, u := range unpack {
		t, _ := u.(map[string]any)
		u := config(t)
		switch {
		case u.text("snapshotter") != name:
			others = append(others, u.text("snapshotter"))
		case !strings.HasPrefix(u.text("platform"), "linux"):
			add("transfer: unpack", Wrong, fmt.Sprintf("%s is for platform %q", name, u.text("platform")), "in that unpack_config of %s write: platform = \"linux\"", o.File)
			return
		default:
			add("transfer: unpack", OK, name+" for "+u.text("platform"), "")
			return
		}
	}
	detail := "no unpack_config"
	if len(others) > 0 {
		slices.Sort(others)
		detail = "only for " + strings.Join(others, ", ")
	}
	add("transfer: unpack", Wrong, detail, "ctr and nerdctl cannot pull with --snapshotter %s: in %s write:\n[[plugins.%q.unpack_config]]\n  platform = \"linux\"\n  snapshotter = %q", name, o.File, transfer, name)
}

// checkCRI looks at what Kubernetes and crictl pull by.
func checkCRI(c config, name string, plugin config, o Options, add adder) {
	disabled, _ := c["disabled_plugins"].([]any)
	for _, d := range disabled {
		if d == criImages || d == criGRPC || d == "cri" {
			add("CRI", Note, fmt.Sprintf("%v is disabled", d), "")
			return
		}
	}
	cri, where := c.table("plugins", criGRPC, "containerd"), fmt.Sprintf("[plugins.%q.containerd]", criGRPC)
	runtimes := cri.table("runtimes")
	if o.Major >= 2 {
		// 2.x takes version 2's table over when it starts.
		if images := c.table("plugins", criImages); images != nil || cri == nil {
			cri, where = images, fmt.Sprintf("[plugins.%q]", criImages)
			runtimes = c.table("plugins", "io.containerd.cri.v1.runtime", "containerd", "runtimes")
		}
	}
	snapshotter := cri.text("snapshotter")
	if snapshotter == "" {
		snapshotter = defaultFor
	}
	if snapshotter != name {
		add("CRI: snapshotter", Wrong, "it is "+snapshotter, "Kubernetes and crictl do not use Hydrofoil: in %s of %s write: snapshotter = %q", where, o.File, name)
	} else {
		add("CRI: snapshotter", OK, snapshotter, "")
	}
	checkRoot(name, plugin, o, add)
	if off, ok := cri["disable_snapshot_annotations"].(bool); !ok || off {
		add("CRI: annotations", Wrong, "disable_snapshot_annotations is not false", "CRI does not say which image a layer is of, and every image is unpacked plainly: in %s of %s write: disable_snapshot_annotations = false", where, o.File)
	} else {
		add("CRI: annotations", OK, "", "")
	}
	if discard, _ := cri["discard_unpacked_layers"].(bool); discard {
		add("CRI: discarded layers", Note, "discard_unpacked_layers is true", "an image that came the plain way cannot be pushed or exported from containerd; one that came lazily never could, without fetching its layers")
	}
	var named []string
	for r := range runtimes {
		if s := runtimes.table(r).text("snapshotter"); s != "" && s != name {
			named = append(named, r+" uses "+s)
		}
	}
	if len(named) > 0 {
		slices.Sort(named)
		add("CRI: runtimes", Note, strings.Join(named, ", "), "pods of these runtimes do not use Hydrofoil")
	}
}

// checkRoot looks at where CRI says that images are.
func checkRoot(name string, plugin config, o Options, add adder) {
	const finding = "CRI: image filesystem"
	root := plugin.table("exports").text("root")
	if root != "" && sameDirectory(root, o.Root) {
		add(finding, OK, root, "")
		return
	}
	detail := "no root is exported"
	if root != "" {
		detail = root + " is not the daemon's root"
	}
	add(finding, Wrong, detail, "a kubelet measures a directory that is not there, or another filesystem: /stats/summary fails, and it neither evicts pods nor removes images: in %s write:\n[proxy_plugins.%s.exports]\n  root = %q", o.File, name, o.Root)
}

// sameDirectory reports whether two paths name one directory.
func sameDirectory(a, b string) bool {
	if filepath.Clean(a) == filepath.Clean(b) {
		return true
	}
	x, err := os.Stat(a)
	y, yerr := os.Stat(b)
	return err == nil && yerr == nil && os.SameFile(x, y)
}
