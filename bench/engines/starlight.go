package engines

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	digest "github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
)

// Starlight is containerd with Starlight's daemon, and its proxy with PostgreSQL
// beside the registry, as its documents say: images are converted and announced to
// the proxy, and one start of each is traced and reported.
//
// Its proxy and its converter speak HTTP without TLS to local names only, and
// take only images that an index leads to.
type Starlight struct{}

func (*Starlight) Name() string { return "starlight" }

const (
	converted    = "-starlight"          // suffix of converted images' tags
	localAddr    = "registry.local:5000" // the registry, by a name that is local
	proxyAddr    = "192.0.2.1:8090"
	databaseAddr = "127.0.0.1:5432"
)

func (*Starlight) Find(ctx context.Context, p Programs) (string, error) {
	t, err := findContainerd(ctx, p)
	if err != nil {
		return "", err
	}
	paths, err := findPrograms(p, "starlight-proxy", "starlight-daemon", "ctr-starlight")
	if err != nil {
		return "", err
	}
	postgres, err := findPostgres("postgres")
	if err != nil {
		return "", err
	}
	database, err := firstLine(ctx, postgres, "--version")
	if err != nil {
		return "", err
	}
	said, err := firstLine(ctx, paths["starlight-proxy"], "--version")
	return said + ", " + database + ", " + t.version, err
}

// findPostgres finds a program of PostgreSQL's server, which Debian does not put
// on PATH.
func findPostgres(name string) (string, error) {
	found, err := filepath.Glob(filepath.Join("/usr/lib/postgresql/*/bin", name))
	if err == nil && len(found) > 0 {
		return found[len(found)-1], nil
	}
	return find("", name)
}

// Serve starts the database and the proxy.
func (*Starlight) Serve(ctx context.Context, s *site.Site, p Programs, root string) (stop func() error, err error) {
	var stops []func() error
	stop = func() error {
		var errs []error
		for i := len(stops) - 1; i >= 0; i-- {
			errs = append(errs, stops[i]())
		}
		return errors.Join(errs...)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, stop())
		}
	}()
	unmount, err := nameRegistry(root)
	if err != nil {
		return stop, err
	}
	stops = append(stops, unmount)
	database, err := serveDatabase(ctx, s, filepath.Join(root, "database"))
	if err != nil {
		return stop, err
	}
	stops = append(stops, func() error { return database.Stop(syscall.SIGINT) })
	proxy, err := find(p.Peers, "starlight-proxy")
	if err != nil {
		return stop, err
	}
	daemon, err := s.Start(link.Cloud, nil, proxy, "--config", filepath.Join(root, "proxy.json"), "--host", "192.0.2.1", "--port", "8090",
		"--postgres", "postgres://postgres@"+databaseAddr+"/postgres?sslmode=disable", "--registry", localAddr)
	if err != nil {
		return stop, err
	}
	// It does not listen to SIGTERM.
	stops = append(stops, func() error { return daemon.Stop(syscall.SIGKILL) })
	return stop, started(ctx, daemon, "starlight-proxy", accepts(s, proxyAddr))
}

// accepts tests whether something listens in the cloud.
func accepts(s *site.Site, address string) func(ctx context.Context) bool {
	return func(ctx context.Context) bool {
		conn, err := s.Link.DialContext(ctx, link.Cloud, "tcp4", address)
		if err != nil {
			return false
		}
		conn.Close()
		return true
	}
}

// nameRegistry gives the registry a local name, for the processes of this mount
// namespace.
func nameRegistry(dir string) (undo func() error, err error) {
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	hosts, err := os.ReadFile("/etc/hosts")
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	name, _, _ := net.SplitHostPort(localAddr)
	address, _, _ := net.SplitHostPort(RegistryAddr)
	path := filepath.Join(dir, "hosts")
	if err := os.WriteFile(path, fmt.Appendf(hosts, "\n%s %s\n", address, name), 0o644); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	if err := unix.Mount(path, "/etc/hosts", "", unix.MS_BIND, ""); err != nil {
		return nil, fmt.Errorf("bench: mount a private /etc/hosts: %w", err)
	}
	return func() error {
		if err := unix.Unmount("/etc/hosts", unix.MNT_DETACH); err != nil {
			return fmt.Errorf("bench: unmount the private /etc/hosts: %w", err)
		}
		return nil
	}, nil
}

// serveDatabase starts PostgreSQL, which refuses to run as root.
func serveDatabase(ctx context.Context, s *site.Site, dir string) (*site.Process, error) {
	owner, err := user.Lookup("postgres")
	if err != nil {
		return nil, fmt.Errorf("bench: PostgreSQL's own user: %w", err)
	}
	become := []string{"--reuid", owner.Uid, "--regid", owner.Gid, "--clear-groups", "--"}
	if _, err := os.Stat(filepath.Join(dir, "PG_VERSION")); err != nil {
		if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o700)); err != nil {
			return nil, fmt.Errorf("bench: %w", err)
		}
		uid, _ := strconv.Atoi(owner.Uid)
		gid, _ := strconv.Atoi(owner.Gid)
		if err := os.Chown(dir, uid, gid); err != nil {
			return nil, fmt.Errorf("bench: %w", err)
		}
		initdb, err := findPostgres("initdb")
		if err != nil {
			return nil, err
		}
		if _, err := s.Run(ctx, link.Cloud, "setpriv", append(become, initdb, "--auth", "trust", "--username", "postgres", "--encoding", "UTF8", "--pgdata", dir)...); err != nil {
			return nil, err
		}
	}
	// What a benchmark before this one has left behind when it was killed.
	if err := os.RemoveAll(filepath.Join(dir, "postmaster.pid")); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	postgres, err := findPostgres("postgres")
	if err != nil {
		return nil, err
	}
	p, err := s.Start(link.Cloud, nil, "setpriv", append(become, postgres, "-D", dir, "-h", "127.0.0.1", "-k", "")...)
	if err != nil {
		return nil, err
	}
	return p, started(ctx, p, "PostgreSQL", accepts(s, databaseAddr))
}

// Prepare converts an image, announces it, traces one start and reports it.
func (e *Starlight) Prepare(ctx context.Context, s *site.Site, p Programs, im Image) (result Preparation, err error) {
	dir, err := os.MkdirTemp(s.Dir, "convert-")
	if err != nil {
		return result, fmt.Errorf("bench: %w", err)
	}
	defer func() { err = errors.Join(err, site.RemoveTree(dir)) }()
	layout := filepath.Join(dir, "layout")
	if _, err := s.Run(ctx, link.Cloud, "skopeo", "copy", "--src-tls-verify=false", "docker://"+im.Ref, "oci:"+layout+":image"); err != nil {
		return result, err
	}
	if err := addIndex(layout); err != nil {
		return result, err
	}
	local := strings.Replace(im.Ref, RegistryAddr, localAddr, 1)
	if _, err := s.Run(ctx, link.Cloud, "skopeo", "copy", "--all", "--dest-tls-verify=false", "oci:"+layout+":index", "docker://"+im.Ref+"-index"); err != nil {
		return result, err
	}
	w := e.worker(s, p, filepath.Join(dir, "worker"))
	if err := w.Start(ctx); err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, w.Stop()) }()
	began := time.Now()
	if _, err := w.command(ctx, "convert", "--insecure-source", "--insecure-destination", "--platform", "linux/"+runtime.GOARCH, "--notify", local+"-index", local+converted); err != nil {
		return result, err
	}
	if _, err := w.command(ctx, "optimizer", "on"); err != nil {
		return result, err
	}
	t := Begin(s, w.Processes())
	container, err := w.Provision(ctx, im, t)
	if err == nil {
		err = im.Ready.Wait(ctx, s.Link, container.Process)
	}
	t.End()
	if err = errors.Join(err, container.Stop()); err != nil {
		return result, fmt.Errorf("bench: trace a start of %s: %w%s", im.Name, err, w.daemon.Said())
	}
	if _, err := w.command(ctx, "optimizer", "off"); err != nil {
		return result, err
	}
	if _, err := w.command(ctx, "report"); err != nil {
		return result, err
	}
	result.Time = time.Since(began)
	result.What = "converted, announced to the proxy, and one start traced"
	result.Storage, err = layerBytes(ctx, s, im.Ref+converted)
	return result, err
}

// addIndex adds to an OCI layout with one image an index, called index, that leads
// to it and says its platform.
func addIndex(layout string) error {
	text, err := os.ReadFile(filepath.Join(layout, "index.json"))
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	var top v1.Index
	if err := json.Unmarshal(text, &top); err != nil || len(top.Manifests) != 1 {
		return fmt.Errorf("bench: %s/index.json has not one image (%w)", layout, err)
	}
	manifest := top.Manifests[0]
	manifest.Annotations = nil
	manifest.Platform = &v1.Platform{OS: "linux", Architecture: runtime.GOARCH}
	index, err := json.Marshal(v1.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageIndex, Manifests: []v1.Descriptor{manifest}})
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	d := digest.FromBytes(index)
	top.Manifests = append(top.Manifests, v1.Descriptor{
		MediaType: v1.MediaTypeImageIndex, Digest: d, Size: int64(len(index)),
		Annotations: map[string]string{v1.AnnotationRefName: "index"},
	})
	if text, err = json.Marshal(top); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := os.WriteFile(filepath.Join(layout, "blobs", "sha256", d.Encoded()), index, 0o644); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := os.WriteFile(filepath.Join(layout, "index.json"), text, 0o644); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	return nil
}

// Converted is what Prepare pushes.
func (*Starlight) Converted(im Image) []string {
	return []string{im.Ref + "-index", im.Ref + converted}
}

// Foresee: every file is compressed by itself, by one core.
func (*Starlight) Foresee(layers int64) time.Duration { return pace(4*time.Second, layers, 1.3e6) }

func (e *Starlight) Worker(s *site.Site, p Programs, dir string) Worker { return e.worker(s, p, dir) }

func (*Starlight) worker(s *site.Site, p Programs, dir string) *starlightWorker {
	w := &starlightWorker{containerdWorker: newContainerd(s, p, filepath.Join(dir, "containerd"), "starlight"), root: filepath.Join(dir, "starlight")}
	w.proxy = filepath.Join(w.root, "snapshotter.sock")
	return w
}

type starlightWorker struct {
	*containerdWorker
	root   string
	daemon *site.Process
}

func (w *starlightWorker) socket() string { return filepath.Join(w.root, "daemon.sock") }

// command runs Starlight's command line.
func (w *starlightWorker) command(ctx context.Context, args ...string) (string, error) {
	program, err := find(w.programs.Peers, "ctr-starlight")
	if err != nil {
		return "", err
	}
	out, err := w.site.Run(ctx, w.side, program, append([]string{"--address", "unix://" + w.socket(), "--namespace", "bench"}, args...)...)
	// It says that it failed, and ends well.
	if err == nil && strings.Contains(out, "failed") {
		err = fmt.Errorf("bench: ctr-starlight %s: %s", strings.Join(args, " "), strings.TrimSpace(out))
	}
	return out, err
}

func (w *starlightWorker) Start(ctx context.Context) (err error) {
	if err := os.MkdirAll(w.root, 0o711); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	program, err := find(w.programs.Peers, "starlight-daemon")
	if err != nil {
		return err
	}
	config, err := json.Marshal(map[string]any{
		"log_level": "info", "id": "worker", "metadata": filepath.Join(w.root, "metadata.db"),
		"socket": w.proxy, "daemon_type": "unix", "daemon": w.socket(), "containerd": w.containerdWorker.socket(),
		"default_namespace": "bench", "traces_dir": filepath.Join(w.root, "traces"), "fs_root": filepath.Join(w.root, "root"),
		"default_proxy": "cloud", "configs": map[string]any{"cloud": map[string]string{"protocol": "http", "address": proxyAddr}},
	})
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	path := filepath.Join(w.root, "daemon.json")
	if err := os.WriteFile(path, config, 0o644); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := w.containerdWorker.Start(ctx); err != nil {
		return err
	}
	w.daemon, err = w.site.Start(w.side, nil, program, "--config", path)
	if err == nil {
		err = started(ctx, w.daemon, "starlight-daemon", func(context.Context) bool {
			_, err := os.Stat(w.socket())
			_, other := os.Stat(w.proxy)
			return err == nil && other == nil
		})
	}
	if err != nil {
		return errors.Join(err, w.Stop())
	}
	return nil
}

// Forgets: its documents do not say that it may be started again between two
// images.
func (*starlightWorker) Forgets() {}

func (w *starlightWorker) Processes() []int {
	return append(w.containerdWorker.Processes(), w.daemon.PID())
}

func (w *starlightWorker) Provision(ctx context.Context, im Image, t *Trial) (*Container, error) {
	ref := strings.Replace(im.Ref, RegistryAddr, localAddr, 1) + converted
	if _, err := w.command(ctx, "pull", ref); err != nil {
		return nil, fmt.Errorf("%w%s", err, w.daemon.Said())
	}
	t.Mark(Pulled)
	return w.start(ctx, w.tools.ctr, ref, im.Command, t)
}

// Complete waits until the image is marked so: it is a label of containerd's.
func (w *starlightWorker) Complete(ctx context.Context, im Image, t *Trial) error {
	ref := strings.Replace(im.Ref, RegistryAddr, localAddr, 1) + converted
	err := w.daemon.Until(ctx, "wait until "+ref+" is complete", func() bool {
		time.Sleep(20 * time.Millisecond)
		listed, err := w.ctr(ctx, "images", "list", "name=="+ref)
		return err == nil && strings.Contains(listed, "complete")
	})
	if err == nil {
		t.Mark(Complete)
	}
	return err
}

func (w *starlightWorker) Check(ctx context.Context, im Image, _ bool) error {
	ref := strings.Replace(im.Ref, RegistryAddr, localAddr, 1) + converted
	listed, err := w.ctr(ctx, "images", "list", "name=="+ref)
	if err == nil && !strings.Contains(listed, ref) {
		err = fmt.Errorf("bench: containerd does not know %s", ref)
	}
	return err
}

func (w *starlightWorker) Stop() error {
	err := w.containerdWorker.Stop()
	if w.daemon != nil {
		err = errors.Join(err, w.daemon.Stop(syscall.SIGKILL)) // it does not listen to SIGTERM
	}
	return err
}
