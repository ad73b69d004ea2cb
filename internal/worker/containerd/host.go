package containerd

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
)

// Unit is the name of the daemon's systemd unit (deploy/systemd).
const Unit = "foil-node.service"

// Host is a containerd that runs on this host.
type Host struct {
	PID    int
	Config string // its configuration file
	Major  int    // of its version; 0 when that is not known
	// Blind: its CRI does not read what proxy plugins export.
	Blind bool
	// Stale: the file was changed after containerd had started.
	Stale bool
	// Data is its configuration, as `containerd config dump` prints it, or as
	// the file is when it cannot be asked.
	Data []byte
}

// defaultFile is what a containerd reads that is told of no other.
const defaultFile = "/etc/containerd/config.toml"

// Running finds a containerd that runs and reads its configuration: one that
// speaks of the socket, or else the one of the default file. Others belong to
// somebody: Docker has one of its own. proc is /proc. Without one it returns nil.
func Running(ctx context.Context, proc, socket string) (*Host, error) {
	dirs, err := filepath.Glob(filepath.Join(proc, "[0-9]*"))
	if err != nil {
		return nil, err
	}
	var main *Host
	for _, dir := range dirs {
		comm, err := os.ReadFile(filepath.Join(dir, "comm"))
		if err != nil || strings.TrimSpace(string(comm)) != "containerd" {
			continue
		}
		args, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil {
			continue // it has ended
		}
		h := &Host{Config: configFile(strings.Split(strings.TrimRight(string(args), "\x00"), "\x00"))}
		h.PID, _ = strconv.Atoi(filepath.Base(dir))
		if file, err := os.Stat(h.Config); err == nil {
			if started, err := os.Stat(dir); err == nil {
				h.Stale = file.ModTime().After(started.ModTime())
			}
		}
		exe := filepath.Join(dir, "exe")
		h.version(ctx, exe)
		if environ, err := os.ReadFile(filepath.Join(dir, "environ")); err == nil && h.Major < 2 && setsSandboxes(environ) {
			h.Blind = true
		}
		err = h.read(ctx, exe)
		switch {
		case err == nil && bytes.Contains(h.Data, []byte(socket)):
			return h, nil
		case h.Config == defaultFile && err != nil:
			return h, err
		case h.Config == defaultFile:
			main = h
		}
	}
	return main, nil
}

// Read reads the configuration of the containerd that is installed, which need
// not run, from a file.
func Read(ctx context.Context, file string) (*Host, error) {
	h := &Host{Config: file}
	exe, err := exec.LookPath("containerd")
	if err == nil {
		h.version(ctx, exe)
	}
	return h, h.read(ctx, exe)
}

// read has containerd say what it makes of its file, with its imports and
// defaults, or else reads the file.
func (h *Host) read(ctx context.Context, exe string) (err error) {
	if exe != "" {
		if h.Data, err = run(ctx, exe, "--config", h.Config, "config", "dump"); err == nil {
			return nil
		}
	}
	if h.Data, err = os.ReadFile(h.Config); errors.Is(err, os.ErrNotExist) {
		h.Data, err = []byte("version = 2\n"), nil // all defaults
	}
	return err
}

// run returns what a program prints, which is to be quick.
func run(ctx context.Context, name string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdout, cmd.WaitDelay = &out, time.Second
	err := cmd.Run()
	return out.Bytes(), err
}

var versionNumber = regexp.MustCompile(`\sv?(\d+)\.(\d+)`)

// version asks a program for its version.
func (h *Host) version(ctx context.Context, exe string) {
	out, err := run(ctx, exe, "--version")
	m := versionNumber.FindSubmatch(out)
	if err != nil || m == nil {
		return
	}
	h.Major, _ = strconv.Atoi(string(m[1]))
	minor, _ := strconv.Atoi(string(m[2]))
	h.Blind = h.Major == 1 && minor < 7
}

// setsSandboxes reports whether an environment, as /proc has it, gives containerd 1.7
// its other CRI server.
func setsSandboxes(environ []byte) bool {
	return slices.ContainsFunc(strings.Split(string(environ), "\x00"), func(v string) bool {
		value, ok := strings.CutPrefix(v, "ENABLE_CRI_SANDBOXES=")
		return ok && value != ""
	})
}

// configFile returns the file that a containerd with these arguments reads.
func configFile(args []string) string {
	for i, a := range args {
		flag, value, ok := strings.Cut(strings.TrimLeft(a, "-"), "=")
		if !strings.HasPrefix(a, "-") || flag != "config" && flag != "c" {
			continue
		}
		if ok {
			return value
		}
		if i+1 < len(args) {
			return args[i+1]
		}
	}
	return defaultFile
}

// Findings says everything about one containerd: its configuration, whether it
// reads it, whether the daemon is there, and whether it is there first.
func (h *Host) Findings(ctx context.Context, o Options) ([]Finding, error) {
	o.Major, o.File = h.Major, h.Config
	list, err := Check(h.Data, o)
	if err != nil || len(list) > 0 && list[0].State == Absent {
		return list, err
	}
	if h.Stale {
		list = append(list, Finding{"restart", Wrong, h.Config + " was changed after containerd had started", "restart containerd; containers go on: systemctl restart containerd"})
	}
	if h.Blind {
		list = append(list, h.blindFinding(o))
	}
	list = append(list, socketFinding(ctx, o.Socket))
	if _, err := os.Stat("/run/systemd/system"); err == nil {
		out, err := run(ctx, "systemctl", "show", "--property=After", "containerd.service")
		list = append(list, orderFinding(string(out), err))
	}
	return list, nil
}

// blindFinding looks at the directory that a CRI names which reads no exports.
func (h *Host) blindFinding(o Options) Finding {
	const name = "CRI: image directory"
	var c config
	_ = toml.Unmarshal(h.Data, &c) // Check has read it
	plugin, _ := proxy(c, o.Socket)
	dir := filepath.Join(cmp.Or(c.text("root"), "/var/lib/containerd"), "io.containerd.snapshotter.v1."+plugin)
	if sameDirectory(dir, o.Root) {
		return Finding{name, OK, dir, ""}
	}
	return Finding{name, Wrong, dir + " is not the daemon's root, and this containerd reads no exports",
		fmt.Sprintf("a kubelet measures a directory that is not there, or another filesystem: ln -sT %s %s", o.Root, dir)}
}

func socketFinding(ctx context.Context, socket string) Finding {
	c, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, "unix", socket)
	if err != nil {
		return Finding{"daemon", Wrong, fmt.Sprintf("nothing answers at %s: %v", socket, err),
			"start it: systemctl enable --now " + Unit + " (deploy/systemd), or foil node; without it containerd can neither pull nor start with this snapshotter"}
	}
	_ = c.Close()
	return Finding{"daemon", OK, "answers at " + socket, ""}
}

// orderFinding reads what systemctl says of containerd's order.
func orderFinding(after string, err error) Finding {
	switch {
	case err != nil:
		return Finding{"order", Note, "systemctl does not say: " + err.Error(), ""}
	case strings.Contains(" "+strings.TrimPrefix(strings.TrimSpace(after), "After=")+" ", " "+Unit+" "):
		return Finding{"order", OK, "containerd starts after " + Unit, ""}
	}
	return Finding{"order", Wrong, "containerd does not wait for " + Unit,
		"after a reboot, containers may be started before their images are mounted: install deploy/systemd/" + Unit + ", which has Before=containerd.service, and run systemctl daemon-reload"}
}
