package engines

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
)

// Containerd pulls every layer, unpacks it with one of containerd's own
// snapshotters, and then starts the container.
type Containerd struct {
	Snapshotter string // overlayfs or erofs
}

func (c *Containerd) Name() string { return c.Snapshotter }

// command runs a program outside of any site.
func command(ctx context.Context, program string, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, program, args...).CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("bench: %s %s: %w\n%s", program, strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

// tools are containerd and what belongs to it.
type tools struct {
	containerd, ctr string
	major, minor    int
	version         string
}

var versionNumber = regexp.MustCompile(`\bv?(\d+)\.(\d+)\.\d+\S*`)

func findContainerd(ctx context.Context, p Programs) (t tools, err error) {
	t.containerd = p.Containerd
	if t.containerd == "" {
		t.containerd = "containerd"
	}
	if t.containerd, err = exec.LookPath(t.containerd); err != nil {
		return t, fmt.Errorf("bench: %w; install containerd, or say --containerd", err)
	}
	if t.ctr, err = find(filepath.Dir(t.containerd), "ctr"); err != nil {
		return t, err
	}
	out, err := command(ctx, t.containerd, "--version")
	if err != nil {
		return t, err
	}
	match := versionNumber.FindStringSubmatch(out)
	if match == nil {
		return t, fmt.Errorf("bench: which version is containerd? it says %q", out)
	}
	t.version = "containerd " + match[0]
	t.major, _ = strconv.Atoi(match[1])
	t.minor, _ = strconv.Atoi(match[2])
	return t, nil
}

func (c *Containerd) Find(ctx context.Context, p Programs) (string, error) {
	t, err := findContainerd(ctx, p)
	if err != nil || c.Snapshotter != "erofs" {
		return t.version, err
	}
	if t.major < 2 || t.major == 2 && t.minor < 1 {
		return "", fmt.Errorf("bench: %s has no erofs snapshotter (2.1 has)", t.version)
	}
	out, err := command(ctx, "mkfs.erofs", "--help")
	if err != nil {
		return "", err
	}
	if !strings.Contains(out, "--tar") {
		return "", fmt.Errorf("bench: this mkfs.erofs cannot read tar files, as containerd's erofs differ wants (erofs-utils 1.8 can)")
	}
	return t.version, nil
}

func (*Containerd) Prepare(context.Context, *site.Site, Programs, Image) (Preparation, error) {
	return Preparation{What: "none"}, nil
}

// Whole: a pull returns when every layer is unpacked.
func (*Containerd) Whole() {}

func (c *Containerd) Worker(s *site.Site, p Programs, dir string) Worker {
	return newContainerd(s, p, dir, c.Snapshotter)
}

// containerdWorker is a containerd of its own.
type containerdWorker struct {
	site        *site.Site
	side        link.Side
	programs    Programs
	tools       tools
	dir         string
	snapshotter string
	proxy       string // socket of a snapshotter in another process, if it is
	transfer    bool   // pull by containerd's transfer service, which tells the snapshotter what of
	cri         bool   // with Kubernetes' plugins
	namespace   string // of containerd's
	hosts       string // directory of hosts.toml, if that says how to reach the registry
	mirror      string // what hosts.toml says of hosts that are asked before the registry, if any
	daemon      *site.Process
	runs        int
}

func newContainerd(s *site.Site, p Programs, dir, snapshotter string) *containerdWorker {
	return &containerdWorker{site: s, side: link.Edge, programs: p, dir: dir, snapshotter: snapshotter, namespace: "bench"}
}

func (w *containerdWorker) socket() string { return filepath.Join(w.dir, "sock") }

func (w *containerdWorker) Start(ctx context.Context) (err error) {
	if w.tools, err = findContainerd(ctx, w.programs); err != nil {
		return err
	}
	if err := os.MkdirAll(w.dir, 0o711); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if w.hosts != "" {
		if err := writeHosts(w.hosts, w.mirror); err != nil {
			return err
		}
	}
	var config strings.Builder
	version, disabled := 2, `"io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime"`
	if w.cri {
		version, disabled = 3, `"io.containerd.nri.v1.nri"`
	}
	fmt.Fprintf(&config, "version = %d\nroot = %q\nstate = %q\n", version, filepath.Join(w.dir, "root"), filepath.Join(w.dir, "state"))
	// Nothing but what is needed; Kubernetes' plugins would look for a network.
	fmt.Fprintf(&config, "disabled_plugins = [%s]\n", disabled)
	fmt.Fprintf(&config, "[grpc]\naddress = %q\n[ttrpc]\naddress = %q\n", w.socket(), w.socket()+".ttrpc")
	if w.cri {
		w.configureCRI(&config)
	}
	fmt.Fprintf(&config, "[plugins.\"io.containerd.internal.v1.opt\"]\npath = %q\n", filepath.Join(w.dir, "opt"))
	if w.snapshotter == "erofs" {
		config.WriteString("[plugins.\"io.containerd.service.v1.diff-service\"]\ndefault = [\"erofs\", \"walking\"]\n")
	}
	if w.proxy != "" {
		fmt.Fprintf(&config, "[proxy_plugins.%s]\ntype = \"snapshot\"\naddress = %q\n", w.snapshotter, w.proxy)
	}
	if w.transfer {
		fmt.Fprintf(&config, "[proxy_plugins.%s.exports]\nenable_remote_snapshot_annotations = \"true\"\n", w.snapshotter)
		fmt.Fprintf(&config, "[[plugins.\"io.containerd.transfer.v1.local\".unpack_config]]\nplatform = \"linux/%s\"\nsnapshotter = %q\n", runtime.GOARCH, w.snapshotter)
	}
	path := filepath.Join(w.dir, "config.toml")
	if err := os.WriteFile(path, []byte(config.String()), 0o644); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	// The shim that belongs to it is found beside it.
	search := "PATH=" + filepath.Dir(w.tools.containerd) + ":" + os.Getenv("PATH")
	if w.daemon, err = w.site.Start(w.side, nil, "env", search, w.tools.containerd, "--config", path); err != nil {
		return err
	}
	return started(ctx, w.daemon, "containerd", func(ctx context.Context) bool {
		_, err := w.ctr(ctx, "version")
		return err == nil
	})
}

// configureCRI writes what containerd 2 needs for pods, as deploy/containerd has it.
func (w *containerdWorker) configureCRI(config *strings.Builder) {
	fmt.Fprintf(config, "[plugins.\"io.containerd.cri.v1.images\"]\nsnapshotter = %q\ndisable_snapshot_annotations = false\n", w.snapshotter)
	fmt.Fprintf(config, "[plugins.\"io.containerd.cri.v1.images\".registry]\nconfig_path = %q\n", w.hosts)
	fmt.Fprintf(config, "[plugins.\"io.containerd.cri.v1.images\".pinned_images]\nsandbox = %q\n", PauseRef)
	// A benchmark may run where it must not make itself harder to kill.
	config.WriteString("[plugins.\"io.containerd.cri.v1.runtime\"]\nrestrict_oom_score_adj = true\n")
}

func (w *containerdWorker) Processes() []int { return []int{w.daemon.PID()} }

func (w *containerdWorker) arguments(args ...string) []string {
	return append([]string{"--address", w.socket(), "--namespace", w.namespace}, args...)
}

func (w *containerdWorker) ctr(ctx context.Context, args ...string) (string, error) {
	return w.site.Run(ctx, w.side, w.tools.ctr, w.arguments(args...)...)
}

// Pull gets an image whole.
func (w *containerdWorker) Pull(ctx context.Context, ref string) error {
	args := []string{"images", "pull", "--snapshotter", w.snapshotter}
	if w.hosts != "" {
		args = append(args, "--hosts-dir", w.hosts, "--skip-metadata")
	} else {
		args = append(args, "--plain-http")
	}
	if w.tools.major >= 2 && !w.transfer {
		args = append(args, "--local") // the way that 1.x has; the other takes no snapshotter
	}
	_, err := w.ctr(ctx, append(args, ref)...)
	return err
}

func (w *containerdWorker) Provision(ctx context.Context, im Image, t *Trial) (*Container, error) {
	if err := w.Pull(ctx, im.Ref); err != nil {
		return nil, err
	}
	t.Mark(Pulled)
	return w.start(ctx, w.tools.ctr, im.Ref, im.Command, t)
}

// start runs a container of an image that has been pulled.
func (w *containerdWorker) start(ctx context.Context, ctr, ref string, command []string, t *Trial) (*Container, error) {
	w.runs++
	id := fmt.Sprintf("run-%d", w.runs)
	pidFile := filepath.Join(w.dir, id+".pid")
	args := w.arguments("run", "--rm", "--net-host", "--pid-file", pidFile, "--snapshotter", w.snapshotter, ref, id)
	p, err := w.site.Start(w.side, nil, ctr, append(args, command...)...)
	if err != nil {
		return nil, err
	}
	p.Init = func(context.Context) (int, error) { return readPID(pidFile) }
	c := &Container{p, func() error { return w.stopContainer(p, id) }}
	// It is written when the container exists, just before it is let go.
	err = p.Until(ctx, "start a container", func() bool {
		_, err := os.Stat(pidFile)
		return err == nil
	})
	if _, statErr := os.Stat(pidFile); err != nil && statErr != nil {
		return c, err
	}
	t.Mark(Started)
	return c, nil
}

// readPID reads a process ID from a file.
func readPID(path string) (int, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("bench: %w", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, fmt.Errorf("bench: %s: %w", path, err)
	}
	return pid, nil
}

// runcInit is the first process of the only container below a state directory of
// runc's.
func runcInit(ctx context.Context, state string) (int, error) {
	out, err := command(ctx, "runc", "--root", state, "list", "--format", "json")
	if err != nil {
		return 0, err
	}
	var list []struct {
		PID    int    `json:"pid"`
		Status string `json:"status"`
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		return 0, fmt.Errorf("bench: runc's list of containers: %w", err)
	}
	for _, c := range list {
		if c.Status == "running" {
			return c.PID, nil
		}
	}
	return 0, errors.New("bench: runc runs no container")
}

func (w *containerdWorker) stopContainer(p *site.Process, id string) error {
	select {
	case <-p.Done:
		return nil
	default:
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), 15*time.Second, site.ErrTooLong)
	defer cancel()
	_, err := w.ctr(ctx, "tasks", "kill", "--signal", "SIGKILL", id)
	select {
	case <-p.Done:
		return nil // by itself, perhaps meanwhile
	case <-ctx.Done():
		return errors.Join(err, fmt.Errorf("bench: container %s does not end%s", id, p.Said()))
	}
}

// Complete has nothing to wait for: everything is here before the start.
func (w *containerdWorker) Complete(_ context.Context, _ Image, t *Trial) error {
	if p, ok := t.At(Pulled); ok {
		t.mark(Complete, p)
	}
	return nil
}

func (w *containerdWorker) Check(ctx context.Context, im Image, _ bool) error {
	listed, err := w.ctr(ctx, "images", "list", "name=="+im.Ref)
	if err != nil {
		return err
	}
	if !strings.Contains(listed, im.Built.Digest.String()) {
		return fmt.Errorf("bench: containerd's %s is not %s:\n%s", im.Ref, im.Built.Digest, listed)
	}
	return nil
}

// Mounted calls fn with the path of an image's file tree, mounted as a container
// has it.
func (w *containerdWorker) Mounted(ctx context.Context, ref string, fn func(tree string) error) (err error) {
	w.runs++
	tree := filepath.Join(w.dir, fmt.Sprintf("tree-%d", w.runs))
	if err := os.MkdirAll(tree, 0o755); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if _, err := w.ctr(ctx, "images", "mount", "--rw", "--snapshotter", w.snapshotter, ref, tree); err != nil {
		return err
	}
	defer func() {
		_, unmountErr := w.ctr(context.WithoutCancel(ctx), "images", "unmount", "--rm", "--snapshotter", w.snapshotter, tree)
		if err == nil {
			err = unmountErr
		}
	}()
	return fn(tree)
}

func (w *containerdWorker) Stop() error { return w.daemon.Stop(syscall.SIGTERM) }
