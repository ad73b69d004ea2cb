package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/containerd"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/setup"
	"hydrofoil.dev/foil/internal/worker/snapshotter"
)

func newDoctorCommand() *cobra.Command {
	var root, config, socket, settingsFile string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor [flags]",
		Short: "Say what this host can do, and what to do about the rest",
		Long: `doctor tries everything that a worker needs or can use on this host, by doing it
once in --root, and leaves nothing behind. It says which gate would hold back
reads of bytes that have not arrived, and what to do about what is missing. Ask
it before the first pull, and when "foil node" does not start. It needs no
daemon.

If a containerd runs here that has this worker as a snapshotter, or the one of
/etc/containerd/config.toml, or if --containerd-config names another's file,
doctor reads its configuration (of 1.7 and 2.x) as well, and says what keeps images from coming
lazily, what goes wrong because of it, and what to write where. A containerd that
was never told of Hydrofoil is no error.

It reads the settings of foil node too, in the file of --config: whether the
mirror and the metrics are where they should be, whether each hosts.toml can be
used with the certificates that it names, whether containers of a registry wait
for the proof of their image, and why, whether the systemd unit is that of this
version, and whether there is a limit for the disk.

Exit codes: 0 a worker can run here; 1 it cannot, or its settings, or those of a
containerd that is set up for it, are wrong.`,
		Example: `  sudo foil doctor
  sudo foil doctor --containerd-config /etc/containerd/config.toml
  foil doctor --json | jq -r 'select(.state == "missing" or .state == "wrong") | .fix'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			features, err := kernel.Features(cmd.Context(), root)
			if err != nil {
				return err
			}
			if socket == "" {
				socket = snapshotter.SocketPath(root)
			}
			host, found := containerdFindings(cmd.Context(), config, containerd.Options{Socket: socket, Root: root})
			worker, err := workerFindings(cmd, root, settingsFile)
			if err != nil {
				return err
			}
			return printDoctor(cmd.OutOrStdout(), root, features, []group{
				{"worker: ", "the settings of foil node", worker},
				{"containerd: ", host, found},
			}, asJSON)
		},
	}
	clientRoot(cmd, &root)
	jsonFlag(cmd, &asJSON)
	cmd.Flags().StringVar(&config, "containerd-config", "", "`FILE` that containerd reads; default: that of one that runs")
	cmd.Flags().StringVar(&socket, "snapshotter-socket", "", "`PATH` of the daemon's socket for containerd; default: DIR/run/snapshotter.sock")
	addConfigFlag(cmd, &settingsFile)
	return cmd
}

// workerFindings looks at the settings of foil node, and whether what they say is
// so.
func workerFindings(cmd *cobra.Command, root, file string) ([]containerd.Finding, error) {
	tables, err := readConfig(cmd.Root(), file, cmd.Flags().Changed("config"))
	if err != nil {
		return nil, err
	}
	get := func(name string) string {
		if v, ok := tables["node"][name]; ok {
			return v
		}
		return sections(cmd.Root())["node"].Flags().Lookup(name).DefValue
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), 10*time.Second)
	defer cancel()
	o := setup.Options{Root: root, HostsDirs: get("hosts-dir"), Mirror: get("mirror-listen"), Metrics: get("metrics-listen"), DiskLimit: get("disk-limit"), Version: version()}
	if _, err := os.Stat("/run/systemd/system"); err == nil {
		out, err := exec.CommandContext(ctx, "systemctl", "show", "--property="+strings.Join(setup.UnitProperties, ","), containerd.Unit).Output()
		if err == nil {
			o.Unit = string(out)
		}
	}
	for name, into := range map[string]*[]string{"origin-group": &o.Groups, "policy": &o.Policies} {
		if v, ok := tables["node"][name]; ok {
			*into, _ = tomlValue(sections(cmd.Root())["node"].Flags().Lookup(name), v).([]string)
		}
	}
	c := api.Dial(root)
	defer c.Close()
	if list, err := c.Images(ctx); err == nil {
		o.Unproven = make(map[string]string)
		for _, img := range list {
			o.Registries = append(o.Registries, origin.Of(img.Ref))
			if img.Policy == string(origin.Proven) {
				o.Unproven[origin.Of(img.Ref)] = img.PolicyWhy
			}
		}
		slices.Sort(o.Registries)
		o.Registries = slices.Compact(o.Registries)
	}
	if st, err := c.Status(ctx); err == nil {
		o.Running = st.Version
	}
	return setup.Check(ctx, o), nil
}

// containerdFindings looks at the containerd of a file, or else at the one that
// runs. host is what it is to people, empty when there is none.
func containerdFindings(ctx context.Context, file string, o containerd.Options) (host string, list []containerd.Finding) {
	var h *containerd.Host
	var err error
	if file != "" {
		h, err = containerd.Read(ctx, file)
	} else {
		h, err = containerd.Running(ctx, "/proc", o.Socket)
	}
	if h == nil && err == nil {
		return "", nil
	}
	if err == nil {
		list, err = h.Findings(ctx, o)
	}
	if err != nil {
		list = append(list, containerd.Finding{Name: "configuration", State: containerd.Wrong, Detail: err.Error(), Fix: "name containerd's file with --containerd-config"})
	}
	if h == nil {
		return "containerd", list
	}
	host = "containerd, configured in " + h.Config
	if h.PID != 0 {
		host = fmt.Sprintf("containerd, process %d, configured in %s", h.PID, h.Config)
	}
	return host, list
}

// group is what was found about one thing.
type group struct {
	prefix string // of names in JSON
	title  string // empty: there is no such thing here
	found  []containerd.Finding
}

// finding is a feature in JSON, or something about containerd or the worker's
// settings.
type finding struct {
	Feature string `json:"feature"`
	State   string `json:"state"` // ok, missing, or absent: missing and not needed; of containerd also wrong and note
	Needed  bool   `json:"needed"`
	Since   string `json:"since,omitempty"`
	Detail  string `json:"detail,omitempty"`
	Fix     string `json:"fix,omitempty"`
}

func printDoctor(w io.Writer, root string, features []kernel.Feature, groups []group, asJSON bool) error {
	var rows, advice []string
	lacking, powerless := 0, false
	gate := ""
	for _, f := range features {
		v := finding{f.Name, "ok", f.Need, f.Min, f.Detail, f.Fix}
		switch {
		case !f.Have && f.Need:
			v.State = "missing"
			lacking++
		case !f.Have:
			v.State = "absent"
		}
		if f.Name == kernel.FeatureGate && f.Have {
			gate, _, _ = strings.Cut(f.Detail, ":")
		}
		if asJSON {
			if err := printJSON(w, v); err != nil {
				return err
			}
			continue
		}
		rows = append(rows, fmt.Sprintf("%s\t%s\t%s\t%s", f.Name, v.State, orDash(f.Min), orDash(f.Detail)))
		if f.Fix != "" && !powerless {
			advice = append(advice, f.Name+": "+f.Fix)
		}
		// Without root the rest fails for that reason, and says nothing.
		powerless = powerless || f.Name == "root" && !f.Have
	}
	var verdict error
	if lacking > 0 {
		gate = ""
		verdict = fmt.Errorf("a worker cannot run on this host with its root at %s: what it needs is missing, see above", root)
	}
	for _, g := range groups {
		wrong := 0
		for _, f := range g.found {
			if f.State == containerd.Wrong {
				wrong++
			}
			if asJSON {
				if err := printJSON(w, finding{Feature: g.prefix + f.Name, State: string(f.State), Detail: f.Detail, Fix: f.Fix}); err != nil {
					return err
				}
			}
		}
		if wrong > 0 && verdict == nil {
			verdict = fmt.Errorf("a worker can run on this host, but %s", problems[g.prefix])
		}
	}
	if asJSON {
		return errors.Join(printJSON(w, map[string]any{"gate": gate, "ok": lacking == 0}), verdict)
	}
	if err := table(w, "FEATURE STATE SINCE FOUND", rows); err != nil {
		return err
	}
	if len(advice) > 0 {
		fmt.Fprintln(w, "\nWhat to do:")
		for _, a := range advice {
			fmt.Fprintln(w, "  "+a)
		}
	}
	if gate == "" {
		gate = "none"
	}
	if _, err := fmt.Fprintf(w, "\ngate: %s\n", gate); err != nil {
		return err
	}
	for _, g := range groups {
		if err := g.print(w); err != nil {
			return err
		}
	}
	return verdict
}

// problems say what it means that something in a group is wrong.
var problems = map[string]string{
	"worker: ":     "its settings do not go together with what is here: see above",
	"containerd: ": "containerd is not set up for it: see above",
}

func (g group) print(w io.Writer) error {
	if g.title == "" || len(g.found) == 0 {
		return nil
	}
	fmt.Fprintf(w, "\n%s:\n", g.title)
	var rows, advice []string
	for _, f := range g.found {
		rows = append(rows, fmt.Sprintf("%s\t%s\t%s", f.Name, f.State, orDash(f.Detail)))
		if f.Fix != "" {
			advice = append(advice, "  "+f.Name+": "+strings.ReplaceAll(f.Fix, "\n", "\n      "))
		}
	}
	if err := table(w, "WHAT STATE FOUND", rows); err != nil {
		return err
	}
	if len(advice) > 0 {
		fmt.Fprintln(w, "\nWhat to do:")
		fmt.Fprintln(w, strings.Join(advice, "\n"))
	}
	return nil
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
