package registries

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// server is a registry that runs.
type server struct {
	name string
	root string
	addr string
	cmd  *exec.Cmd
	foil string // the program, if it is foil serve
}

// start starts one of the servers: foil:MODE, docker-registry, or distribution.
func start(ctx context.Context, o *Options, name, root, addr string) (*server, error) {
	s := &server{name: name, root: root, addr: addr}
	mode, isFoil := strings.CutPrefix(name, "foil:")
	switch {
	case isFoil:
		s.foil = o.Foil
		rules := filepath.Join(root, "..", filepath.Base(root)+".toml")
		// Layers stay intact after a push for as long as it takes to push; then the modes say.
		text := fmt.Sprintf("mode = %q\nrate = \"1G\"\n[selective]\nstay = \"1s\"\nhot = %g\ncold = %g\n", mode, o.Hot, o.Hot/3)
		if err := os.WriteFile(rules, []byte(text), 0o600); err != nil {
			return nil, fmt.Errorf("bench: %w", err)
		}
		s.cmd = exec.CommandContext(ctx, o.Foil, "serve", "--root", root, "--listen", addr, "--modes", rules, "--log-level", "warn",
			"--restored-max", fmt.Sprint(o.Restored))
	case name == "docker-registry", name == "distribution":
		config := filepath.Join(root, "..", filepath.Base(root)+".yml")
		text := fmt.Sprintf("version: 0.1\nlog:\n  level: error\n  accesslog:\n    disabled: true\nstorage:\n  filesystem:\n    rootdirectory: %s\n  cache:\n    blobdescriptor: inmemory\nhttp:\n  addr: %s\n", root, addr)
		if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
			return nil, fmt.Errorf("bench: %w", err)
		}
		program := o.DockerRegistry
		if name == "distribution" {
			program = o.Distribution
		}
		s.cmd = exec.CommandContext(ctx, program, "serve", config)
		s.cmd.Env = append(os.Environ(), "OTEL_TRACES_EXPORTER=none")
	default:
		return nil, fmt.Errorf("bench: there is no server %q: foil:MODE, docker-registry, distribution", name)
	}
	log, err := os.Create(filepath.Join(root, "..", filepath.Base(root)+".log"))
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	defer log.Close()
	s.cmd.Stdout, s.cmd.Stderr = log, log
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("bench: start %s: %w", name, err)
	}
	for range 300 {
		if res, err := http.Get("http://" + addr + "/v2/"); err == nil {
			res.Body.Close()
			return s, nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	return nil, errors.Join(fmt.Errorf("bench: %s does not answer at %s; see %s", name, addr, log.Name()), s.stop())
}

// stop ends it.
func (s *server) stop() error {
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	_ = s.cmd.Wait() // how it ends is its own affair
	return nil
}

// cpu is the processor time that it has taken.
func (s *server) cpu() (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.cmd.Process.Pid))
	if err != nil {
		return 0, fmt.Errorf("bench: %w", err)
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	fields := strings.Fields(rest)
	var ticks int64
	for _, i := range []int{11, 12} {
		var n int64
		if _, err := fmt.Sscan(fields[i], &n); err != nil {
			return 0, fmt.Errorf("bench: %w", err)
		}
		ticks += n
	}
	return time.Duration(ticks) * time.Second / 100, nil
}

// settle waits until each layer was looked at, and makes the conversions. Configs are never proven. It returns how long that took.
func (s *server) settle(ctx context.Context, configs int) (time.Duration, error) {
	if s.foil == "" {
		return 0, nil
	}
	began := time.Now()
	for unproven := 1; unproven > 0; {
		out, err := exec.CommandContext(ctx, s.foil, "server", "mode", "now", "--root", s.root, "--json").Output()
		if err != nil {
			return 0, fmt.Errorf("bench: foil server mode now: %w", err)
		}
		var status struct {
			Groups []struct {
				Mode   string
				Copies int
				Blobs  int
			}
			Kept []struct {
				Why   string
				Blobs int
			}
		}
		if err := json.Unmarshal(out, &status); err != nil {
			return 0, fmt.Errorf("bench: foil server mode now: %w", err)
		}
		if strings.HasSuffix(s.name, ":intact") {
			return 0, nil
		}
		unproven = 0
		for _, k := range status.Kept {
			if k.Why == "unproven" || k.Why == "busy" {
				unproven += k.Blobs
			}
		}
		unproven -= configs
		if unproven > 0 {
			time.Sleep(500 * time.Millisecond)
		}
	}
	return time.Since(began), nil
}

// stored is the bytes of all files below its root, by the directories that they are in.
func (s *server) stored() (total int64, kinds map[string]int64, err error) {
	kinds = map[string]int64{}
	err = filepath.WalkDir(s.root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return nil // removed meanwhile
		}
		var st unix.Stat_t
		if unix.Lstat(path, &st) != nil {
			return nil
		}
		rest := strings.TrimPrefix(strings.TrimPrefix(path, s.root), "/")
		rest = strings.TrimPrefix(rest, "objects/")
		kind, _, _ := strings.Cut(rest, "/")
		if kind == "reserve" || kind == "restored" {
			return nil // given back when it is needed
		}
		kinds[kind] += st.Size
		total += st.Size
		return nil
	})
	return total, kinds, err
}
