package pods

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
	"hydrofoil.dev/foil/internal/kubelettest"
)

// versions says what is measured with. The error says what is missing.
func versions(ctx context.Context, o Options) (string, error) {
	out, err := exec.CommandContext(ctx, o.Kubelet, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("bench: the kubelet: %w; make .cache/kubernetes/kubelet builds it, --kubelet says where it is", err)
	}
	said, err := exec.CommandContext(ctx, "runc", "--version").Output()
	if err == nil && !strings.Contains(string(said), "libseccomp") {
		err = fmt.Errorf("it says %q", said)
	}
	if err != nil {
		return "", fmt.Errorf("bench: pods need a runc with seccomp on PATH: %w; make .cache/runc/runc builds one", err)
	}
	runc, _, _ := strings.Cut(string(said), "\n")
	all := []string{strings.TrimSpace(string(out)), runc}
	for _, name := range o.Engines {
		version, err := runtimes[name].Find(ctx, o.Programs)
		if err != nil {
			return "", err
		}
		all = append(all, version)
	}
	return strings.Join(all, ", "), nil
}

// start makes a node, starts a pod on it, and notes in r how long that took. If another node is to come, it waits until
// the server has learned from this one.
func (b *bench) start(ctx context.Context, s *site.Site, im engines.Image, learn bool, r *Record) (err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, b.Timeout, site.ErrTooLong)
	defer cancel()
	b.made++
	dir := filepath.Join(b.dir, fmt.Sprintf("node-%d", b.made))
	if err := os.Mkdir(dir, 0o711); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	defer func() { err = errors.Join(err, site.RemoveTree(dir)) }()
	w := runtimes[r.Engine].Runtime(s, b.Programs, dir)
	if err := w.Start(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Stop()) }()
	k := &kubelet{site: s, worker: w, dir: filepath.Join(dir, "kubelet")}
	defer func() { err = errors.Join(err, k.stop()) }()
	if err := k.start(ctx, b.Kubelet, b.dir); err != nil {
		return err
	}
	asked, err := probe(im.Ready.Probe)
	if err != nil {
		return err
	}
	const name = "measured"
	text, err := manifest(name, im.Ref, im.Command, asked)
	if err != nil {
		return err
	}
	if err := site.DropCaches(); err != nil {
		return err
	}
	r.Began = time.Now()
	down := s.Link.Stats(link.Cloud).Bytes
	if err := kubelettest.WritePod(k.dir, name, text); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := im.Ready.Wait(ctx, s.Link, k.process); err != nil {
		return err
	}
	r.Answers = time.Since(r.Began).Seconds()
	if err := k.ready(ctx, name); err != nil {
		return err
	}
	r.Ready = time.Since(r.Began).Seconds()
	r.Down = s.Link.Stats(link.Cloud).Bytes - down
	running, err := w.Began(ctx, name+"-"+kubelettest.Host)
	if err != nil {
		return err
	}
	r.Running = running.Sub(r.Began).Seconds()
	if err := w.Check(ctx, im, false); err != nil || !learn {
		return err
	}
	return engines.Learned(ctx, s, im, r.Began)
}

// kubelet is that of a node.
type kubelet struct {
	site    *site.Site
	worker  *engines.Runtime
	dir     string
	groups  []string
	process *site.Process
}

// start starts a kubelet, which has run a pod when it returns. unique names no other directory on this host.
func (k *kubelet) start(ctx context.Context, program, unique string) (err error) {
	if err := os.Mkdir(k.dir, 0o711); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := kubelettest.Prepare(k.dir); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	group := "foil-bench-" + filepath.Base(unique)
	if k.groups, err = kubelettest.Groups(group); err != nil {
		return fmt.Errorf("bench: control groups for the kubelet's pods: %w", err)
	}
	config := kubelettest.Config(k.dir, k.worker.Socket(), "/"+group)
	script, err := kubelettest.Script(program, k.dir, k.site.Link.Addr(link.Edge).String(), config)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if k.process, err = k.site.Start(link.Edge, nil, "unshare", "--mount", "/bin/sh", "-c", script); err != nil {
		return err
	}
	const name = "before"
	text, err := manifest(name, engines.PauseRef, nil, nil)
	if err == nil {
		err = kubelettest.WritePod(k.dir, name, text)
	}
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	return k.ready(ctx, name)
}

// ready waits until the kubelet says that a pod is.
func (k *kubelet) ready(ctx context.Context, name string) error {
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		return k.site.Link.DialContext(ctx, link.Edge, network, address)
	}}}
	defer client.CloseIdleConnections()
	next := time.Now()
	return k.process.Until(ctx, "wait until the kubelet says that its pod "+name+" is ready", func() bool {
		if time.Now().Before(next) {
			return false
		}
		next = time.Now().Add(10 * time.Millisecond)
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d%s", kubelettest.ReadPort, kubelettest.PodsPath), nil)
		if err != nil {
			return false
		}
		response, err := client.Do(req)
		if err != nil {
			return false
		}
		defer response.Body.Close()
		var list kubelettest.Pods
		if json.NewDecoder(response.Body).Decode(&list) != nil {
			return false
		}
		pod, err := list.Named(name)
		return err == nil && pod.Ready()
	})
}

// stop ends the kubelet and its pods.
func (k *kubelet) stop() (err error) {
	ctx, cancel := context.WithTimeoutCause(context.Background(), 30*time.Second, site.ErrTooLong)
	defer cancel()
	if k.process != nil {
		err = k.process.Stop(syscall.SIGTERM)
	}
	err = errors.Join(err, k.worker.RemovePods(ctx))
	for _, group := range k.groups {
		kubelettest.KillGroup(group)
		var why error
		var none *site.Process
		waited := none.Until(ctx, "remove control group "+group, func() bool {
			why = kubelettest.RemoveGroup(group)
			return why == nil
		})
		if waited != nil {
			err = errors.Join(err, waited, why)
		}
	}
	return err
}
