// Package demo is Hydrofoil's demonstration: an unmodified image is pushed to a
// registry in the cloud and run at the edge, once by foil run and once by a full
// pull of the same layers; then the image is updated, both ways again.
//
// Cloud and edge are network namespaces joined by an emulated link (package
// link). All runs inside mount and PID namespaces of its own (see Confine), so
// that nothing is left behind, however it ends.
//
// What is measured:
//
//   - time to ready: from the command until the container answers, as seen from
//     outside (a PING for redis), with the machine's page caches dropped before;
//     both daemons run already;
//   - bytes moved: what has arrived at the edge's device from the cloud, IP
//     headers included, when the container was ready, and when the image was
//     complete and the line silent;
//   - the floor T*: the fastest warm start of the same container, one round
//     trip, and the bytes that it touches before it is ready, compressed, at the
//     link's rate. For the update only bytes of files that are not in the first
//     version count.
//
// What is checked: the container answers, both sides have the digest that was
// built, and foil verify finds every byte right.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/bench/images"
	"hydrofoil.dev/foil/bench/link"
)

// Options say what is shown.
type Options struct {
	Foil  string // path of the foil binary
	Cache string // directory on a disk; images are kept there
	// Images are the two versions, or one image that has no second one. Each is
	// NAME:TAG of the declared images, or, with From, a reference of a registry.
	Images []string
	From   bool
	// Probe tells when the container is ready; empty: the declared one.
	Probe   string
	Command []string // replaces the image's command
	RTT     time.Duration
	Rate    int64 // bits a second
	// SkipCheck does not try the link first, which takes some seconds.
	SkipCheck bool
	Out       io.Writer // the table
	Log       func(line string)
}

// demo is one run.
type demo struct {
	options Options
	dir     string // scratch, removed at the end
	link    *link.Link
	ready   readiness
}

// Run is the whole demonstration. It must run inside Confine.
func Run(ctx context.Context, o Options) (err error) {
	if err := furnish(); err != nil {
		return err
	}
	if o.Foil, err = filepath.Abs(o.Foil); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	if o.Cache, err = filepath.Abs(o.Cache); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	d := &demo{options: o}
	versions, err := d.build(ctx)
	if err != nil {
		return err
	}
	if d.dir, err = d.scratch(); err != nil {
		return err
	}
	defer func() {
		// Mounts below are this namespace's own; what holds one open was stopped.
		err = errors.Join(err, removeTree(d.dir))
	}()
	// The link ends after the processes that use it.
	d.link, err = link.New(context.WithoutCancel(ctx), link.Options{RTT: o.RTT, Rate: o.Rate})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.link.Close()) }()
	if !o.SkipCheck {
		m, err := d.link.Check(ctx)
		if err != nil {
			return fmt.Errorf("%w (stop what else runs here, and try again)", err)
		}
		d.log("link: %v", m)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, 10*time.Minute, errTooLong)
	defer cancel()
	return d.compare(ctx, versions)
}

func (d *demo) log(format string, args ...any) {
	if d.options.Log != nil {
		d.options.Log(fmt.Sprintf(format, args...))
	}
}

// version is one version of the image.
type version struct {
	built *images.Built
	ref   string // in the cloud's registry
}

// build makes or fetches the images, and finds out how to tell that one is ready.
func (d *demo) build(ctx context.Context) ([]version, error) {
	catalogue, err := images.Declared()
	if err != nil {
		return nil, err
	}
	builder := images.Builder{Cache: filepath.Join(d.options.Cache, "images"), Log: d.options.Log}
	var versions []version
	for i, ref := range d.options.Images {
		var built *images.Built
		if d.options.From {
			built, err = builder.Fetch(ctx, ref)
		} else {
			built, err = builder.Build(ctx, catalogue, ref)
		}
		if err != nil {
			return nil, err
		}
		name := fmt.Sprintf("%s:5000/demo:%d", registryAddr, i+1)
		versions = append(versions, version{built, name})
		if d.options.Probe == "" {
			d.options.Probe = built.Probe
		}
	}
	if d.options.Probe == "" {
		d.options.Probe = "exit"
	}
	redis := strings.Contains(d.options.Images[0], "redis") && d.options.Probe == "tcp:6379"
	d.ready, err = parseReadiness(d.options.Probe, redis)
	return versions, err
}

// The cloud's address, see link.Options.
const registryAddr = "192.0.2.1"

// scratch makes the directory of this run, and removes those of dead ones: a run
// holds a lock on its own.
func (d *demo) scratch() (string, error) {
	old, err := filepath.Glob(filepath.Join(d.options.Cache, "demo-*"))
	if err != nil {
		return "", fmt.Errorf("demo: %w", err)
	}
	for _, dir := range old {
		if lock, err := lockDir(dir); err == nil {
			err := removeTree(dir)
			lock.Close()
			if err != nil {
				return "", err
			}
		}
	}
	dir, err := os.MkdirTemp(d.options.Cache, "demo-")
	if err != nil {
		return "", fmt.Errorf("demo: %w", err)
	}
	// Held until the process ends.
	if _, err := lockDir(dir); err != nil {
		return "", err
	}
	// Containers with users of their own must find the way to their rootfs.
	if err := os.Chmod(dir, 0o711); err != nil {
		return "", fmt.Errorf("demo: %w", err)
	}
	return dir, nil
}

func lockDir(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("demo: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("demo: lock %s: %w", dir, err)
	}
	return f, nil
}

// removeTree removes a directory in which file systems may still be mounted.
func removeTree(dir string) error {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	var below []string
	for line := range strings.Lines(string(mounts)) {
		if fields := strings.Fields(line); len(fields) > 4 && strings.HasPrefix(fields[4], dir+"/") {
			below = append(below, fields[4])
		}
	}
	for i := len(below) - 1; i >= 0; i-- {
		if err := unix.Unmount(below[i], unix.MNT_DETACH); err != nil {
			return fmt.Errorf("demo: unmount %s: %w", below[i], err)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	return nil
}

// contestant is a way to get an image and run it.
type contestant interface {
	name() string
	pullAndRun(ctx context.Context, ref string, built *images.Built) (result, error)
}

// result is what one run came to.
type result struct {
	time    time.Duration // to ready
	atReady int64         // bytes moved by then
	moved   int64         // bytes moved in all
	waits   int64         // reads that had to wait before it was ready
	waited  time.Duration // their sum
}

// compare is the demonstration itself, once there are images and a link.
func (d *demo) compare(ctx context.Context, versions []version) (err error) {
	server, err := d.serve(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.stop(syscall.SIGTERM)) }()
	for _, v := range versions {
		began := time.Now()
		if err := d.push(ctx, v); err != nil {
			return err
		}
		d.log("skopeo pushed %s as it is: %.1f MB in %d layers, %.1f s", v.ref, mb(v.built.LayerBytes()), len(v.built.Manifest.Layers), time.Since(began).Seconds())
	}
	full, err := d.startContainerd(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, full.stop()) }()
	foil, err := d.startWorker(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, foil.stop()) }()

	t := table{rtt: d.options.RTT, rate: d.options.Rate, ready: d.options.Probe}
	var have startup
	for i, v := range versions {
		row := comparison{name: "fresh", layers: v.built.LayerBytes()}
		if i > 0 {
			row.name = "update"
		}
		for _, c := range []contestant{full, foil} {
			if err := dropCaches(); err != nil {
				return err
			}
			r, err := c.pullAndRun(ctx, v.ref, v.built)
			if err != nil {
				return fmt.Errorf("%s, %s: %w", c.name(), row.name, err)
			}
			d.log("%s, %s: ready after %.2f s, %.1f MB moved, %.1f MB in all", c.name(), row.name, r.time.Seconds(), mb(r.atReady), mb(r.moved))
			row.results = append(row.results, r)
		}
		if row.warm, err = foil.warm(ctx, v.ref); err != nil {
			return fmt.Errorf("warm start: %w", err)
		}
		err := full.mounted(ctx, v.ref, func(tree string) (err error) {
			row.startup, err = d.measureStartup(ctx, tree, v.built, have.contents)
			return err
		})
		if err != nil {
			return fmt.Errorf("measure what is touched before %s: %w", d.options.Probe, err)
		}
		have = row.startup
		t.rows = append(t.rows, row)
	}
	_, err = io.WriteString(d.options.Out, t.String())
	return err
}

// serve starts the registry in the cloud.
func (d *demo) serve(ctx context.Context) (*process, error) {
	address := net.JoinHostPort(d.link.Addr(link.Cloud).String(), "5000")
	p, err := d.start(link.Cloud, nil, d.options.Foil, "serve", "--root", filepath.Join(d.dir, "serve"), "--listen", address)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, 30*time.Second, errTooLong)
	defer cancel()
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return d.link.DialContext(ctx, link.Cloud, network, address)
		},
	}}
	return p, p.until(ctx, "start foil serve", func() bool {
		response, err := client.Get("http://" + address + "/v2/")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
}

// push pushes by a standard client, in the cloud, and asks the registry by which
// digest it knows the image.
func (d *demo) push(ctx context.Context, v version) error {
	target := "docker://" + v.ref
	if _, err := d.run(ctx, link.Cloud, "skopeo", "copy", "--dest-tls-verify=false", v.built.Source(), target); err != nil {
		return err
	}
	out, err := d.run(ctx, link.Cloud, "skopeo", "inspect", "--tls-verify=false", "--format", "{{.Digest}}", target)
	if err != nil {
		return err
	}
	if got := strings.TrimSpace(out); got != v.built.Digest.String() {
		return fmt.Errorf("demo: the registry's %s is %s, not %s as it was pushed", v.ref, got, v.built.Digest)
	}
	return nil
}

// measurement is a run under way.
type measurement struct {
	demo   *demo
	began  time.Time
	before int64
}

func (d *demo) measure() measurement {
	return measurement{d, time.Now(), d.link.Stats(link.Cloud).Bytes}
}

func (m measurement) ready() result {
	return result{time: time.Since(m.began), atReady: m.demo.link.Stats(link.Cloud).Bytes - m.before}
}

// moved waits until the line has been silent for some round trips.
func (m measurement) moved() int64 {
	last := m.demo.link.Stats(link.Cloud).Bytes
	for {
		time.Sleep(50*time.Millisecond + 2*m.demo.options.RTT)
		now := m.demo.link.Stats(link.Cloud).Bytes
		// A connection that is kept open says something now and then.
		if now-last < 1500 {
			return now - m.before
		}
		last = now
	}
}

func mb(n int64) float64 { return float64(n) / 1e6 }
