// Package install sets a host up for foil node, and undoes that: the program, its systemd unit and
// settings, and what containerd 2.x is told of it.
//
// The daemon is a unit of the host, also where a pod of Kubernetes installs it. After a boot
// containerd can make no container before the daemon answers, not even one with the daemon in it.
// And all processes of a pod end with it: daemon and keeper at once, of which one has to live while
// reads wait.
//
// containerd's own file gets one import and keeps the rest. containerd 1.7 replaces whole sections
// by those of an import, so that there the administrator merges by hand.
package install

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"hydrofoil.dev/foil/deploy"
	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/worker/containerd"
)

const (
	containerdDir  = "/etc/containerd"
	containerdFile = containerdDir + "/config.toml"
	containerdUnit = "containerd.service"
	// Root is the daemon's, and Socket where it serves containerd, as the unit has them.
	Root   = "/var/lib/foil"
	Socket = Root + "/run/snapshotter.sock"
	// ContainerdSocket is where a kubelet speaks with containerd.
	ContainerdSocket = "/run/containerd/containerd.sock"
)

// Options are what is installed.
type Options struct {
	// Program is this program.
	Program []byte
	// Settings are those of the daemon (foil.toml); nil leaves what is there.
	Settings []byte
	// Log gets a line for each thing that is done. Nil: slog.Default().
	Log *slog.Logger
}

func (o Options) log() *slog.Logger {
	if o.Log == nil {
		return slog.Default()
	}
	return o.Log
}

var (
	unit   = file{path: "/etc/systemd/system/" + containerd.Unit, text: []byte(deploy.Unit), mode: 0o644}
	dropIn = file{path: containerdDir + "/conf.d/foil.toml", text: []byte(deploy.Containerd2), mode: 0o644}
)

func settings(text []byte) file { return file{path: "/etc/foil/foil.toml", text: text, mode: 0o644} }
func program(b []byte) file {
	return file{path: "/usr/local/bin/foil", text: b, mode: 0o755, binary: true}
}

// Install sets this host up, and starts the daemon. What is as it
// should be stays untouched: it may be called again, with another version too. Containers go on.
func Install(ctx context.Context, o Options) error {
	if err := check(ctx); err != nil {
		return err
	}
	if err := installDaemon(ctx, o); err != nil {
		return fmt.Errorf("install the daemon: %w", err)
	}
	// containerd refuses pulls and containers while nobody answers at the socket.
	if err := answers(ctx, Socket); err != nil {
		return fmt.Errorf("the daemon was started, and does not answer; its log is that of the unit, journalctl -u %s: %w", containerd.Unit, err)
	}
	if err := installContainerd(ctx, o); err != nil {
		return fmt.Errorf("tell containerd of the daemon: %w", err)
	}
	return nil
}

// check says what a host lacks that cannot be set up.
func check(ctx context.Context) error {
	if _, err := os.Stat("/run/systemd/system"); err != nil {
		return errors.New("this host has no systemd, which has to start the daemon before containerd: set it up by hand, see deploy/containerd/README.md")
	}
	out, err := call(ctx, "containerd", "--version")
	if err != nil {
		return fmt.Errorf("ask containerd for its version: %w", err)
	}
	if !strings.Contains(string(out), " v2.") && !strings.Contains(string(out), " 2.") {
		return fmt.Errorf("%s: foil install sets up containerd 2.x; earlier ones replace whole sections by those of an import: merge deploy/containerd/containerd-1.7.toml by hand", strings.TrimSpace(string(out)))
	}
	return nil
}

func installDaemon(ctx context.Context, o Options) error {
	// A unit of somebody else's comes with a program of theirs.
	exists, ours, err := unit.ours()
	if err == nil && exists && !ours {
		err = fmt.Errorf("%s: %w", unit.path, errForeign)
	}
	if err != nil {
		return err
	}
	files := []file{program(o.Program), unit}
	if o.Settings != nil {
		files = append(files, settings(o.Settings))
	}
	for _, f := range files {
		changed, err := f.put()
		if err != nil {
			return err
		}
		if changed {
			o.log().Info("wrote", "file", f.path)
		}
	}
	verb := "restart"
	if daemonStamp.is(files...) {
		verb = "start"
	}
	for _, args := range [][]string{{"daemon-reload"}, {"enable", containerd.Unit}, {verb, containerd.Unit}} {
		if _, err := call(ctx, "systemctl", args...); err != nil {
			return err
		}
	}
	return daemonStamp.set(files...)
}

// installContainerd has containerd read what it needs, and restarts it if that is news.
func installContainerd(ctx context.Context, o Options) error {
	old, err := os.ReadFile(containerdFile)
	missing := errors.Is(err, fs.ErrNotExist)
	if err != nil && !missing {
		return err
	}
	config := old
	if missing {
		config = []byte("version = 3\n") // as without a file
	}
	if config, err = addImport(config, containerdDir, dropIn.path); err != nil {
		return fmt.Errorf("%s: %w: add to it imports = [%q]", containerdFile, err, dropIn.path)
	}
	before, err := os.ReadFile(dropIn.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	written, err := dropIn.put()
	if err != nil {
		return err
	}
	imported := string(config) != string(old)
	if imported {
		err = errors.Join(containerdStamp.remove(), replace(containerdFile, config))
	}
	if err == nil && (imported || !containerdStamp.is(dropIn)) {
		err = verify(ctx)
	}
	if err != nil {
		return errors.Join(err, restore(before, old, written, imported, missing))
	}
	return reread(ctx, o, "containerd imports what it needs", dropIn, imported)
}

// restore puts back what containerd's files were.
func restore(dropInText, configText []byte, written, imported, missing bool) (err error) {
	if written && dropInText == nil {
		err = os.Remove(dropIn.path)
	} else if written {
		err = replace(dropIn.path, dropInText)
	}
	if imported && missing {
		err = errors.Join(err, os.Remove(containerdFile))
	} else if imported {
		err = errors.Join(err, replace(containerdFile, configText))
	}
	return err
}

// replace writes a file that is there, with the mode that it has.
func replace(path string, data []byte) error {
	mode := os.FileMode(0o644)
	if st, err := os.Stat(path); err == nil {
		mode = st.Mode().Perm()
	}
	if path, err := filepath.EvalSymlinks(path); err == nil {
		return errors.Join(durable.Replace(path, data), os.Chmod(path, mode))
	}
	return errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), durable.Replace(path, data), os.Chmod(path, mode))
}

// verify asks containerd what it makes of its configuration, before it is restarted with it.
func verify(ctx context.Context) error {
	out, err := call(ctx, "containerd", "--config", containerdFile, "config", "dump")
	if err != nil {
		return err
	}
	list, err := containerd.Check(out, containerd.Options{Socket: Socket, Root: Root, Major: 2, File: containerdFile})
	for _, f := range list {
		if f.State == containerd.Wrong || f.State == containerd.Absent {
			err = errors.Join(err, fmt.Errorf("%s: %s; %s", f.Name, f.Detail, f.Fix))
		}
	}
	return err
}

// reread restarts containerd if it has not read this import yet, or if more is new.
func reread(ctx context.Context, o Options, what string, f file, more bool) error {
	if containerdStamp.is(f) && !more {
		return nil
	}
	if err := restart(ctx); err != nil {
		return err
	}
	o.log().Info(what, "file", f.path)
	return containerdStamp.set(f)
}

func restart(ctx context.Context) error {
	if _, err := call(ctx, "systemctl", "restart", containerdUnit); err != nil {
		return err
	}
	return answers(ctx, ContainerdSocket)
}

// Check says whether the daemon answers containerd.
func Check(ctx context.Context) error { return answers(ctx, Socket) }

// answers waits until somebody listens at a Unix socket, for a minute at most.
func answers(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		err := connect(path)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func connect(path string) error {
	c, err := net.Dial("unix", path)
	if err == nil {
		err = c.Close()
	}
	return err
}
