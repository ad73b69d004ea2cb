package engines

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/launch"
)

// Hydrofoil is what this project is about: a node daemon at the edge, and foil
// run. Pulled is when the rootfs is mounted. Without a variant, services were
// traced, and the daemon keeps a connection to the server from its start on.
//
// Startup sets and traces belong to a repository. What nobody has traced is pulled from
// one of its own, of which the server knows neither: it sends no set, and no trace
// decides about the order of the rest.
type Hydrofoil struct {
	// Variant is one of the constants below.
	Variant string
}

// Variants of Hydrofoil, each without something.
const (
	Untraced    = "untraced"    // no startup sets and no traces on the server
	Unconnected = "unconnected" // the daemon connects when it is told to pull
	Bare        = "bare"        // neither
	// Learning workers report what they touched, and nobody has traced anything
	// by hand.
	Learning = "learning"
	// Proving workers begin no container before its image is proven.
	Proving = "proving"
	// Used workers have pulled and run a small image before, as CRI's have.
	Used = "used"
)

func (h *Hydrofoil) Name() string {
	if h.Variant == "" {
		return "hydrofoil"
	}
	return "hydrofoil-" + h.Variant
}

func (h *Hydrofoil) traced() bool {
	return h.Variant == "" || h.Variant == Unconnected || h.Variant == Used || h.Variant == Proving
}
func (h *Hydrofoil) untraced() bool  { return h.Variant == Untraced || h.Variant == Bare }
func (h *Hydrofoil) connected() bool { return h.Variant != Unconnected && h.Variant != Bare }

// untraced is an image in the repository of what nobody has traced.
func untraced(im Image) Image {
	im.Ref = RegistryAddr + "/untraced/" + strings.TrimPrefix(im.Ref, RegistryAddr+"/")
	return im
}

// Find tells builds of one version apart by the digest of the program.
func (*Hydrofoil) Find(ctx context.Context, p Programs) (string, error) {
	version, err := firstLine(ctx, p.Foil, "version")
	if err != nil {
		return "", fmt.Errorf("%s; make build builds it, --foil says where it is", strings.TrimSpace(err.Error()))
	}
	program, err := digestOf(p.Foil)
	if err != nil || p.Serves() == p.Foil {
		return version + ", program " + program, err
	}
	server, err := digestOf(p.Serves())
	return version + ", program " + program + ", served by " + server, err
}

func digestOf(program string) (string, error) {
	text, err := os.ReadFile(program)
	if err != nil {
		return "", fmt.Errorf("bench: %w", err)
	}
	return fmt.Sprintf("sha256:%.6x", sha256.Sum256(text)), nil
}

// Prepare traces the service, unless that was done, or pushes the image to the repository of what
// nobody has traced. What the server prepares by itself when an image is
// pushed, and the time that takes, are part of the push.
func (h *Hydrofoil) Prepare(ctx context.Context, s *site.Site, p Programs, im Image) (Preparation, error) {
	if h.untraced() {
		return Preparation{What: "none: the server ingests what is pushed"}, Push(ctx, s, untraced(im))
	}
	if !h.traced() {
		return Preparation{What: "none: the server ingests what is pushed"}, nil
	}
	done := Preparation{What: fmt.Sprintf("foil trace, %d runs", traceRuns)}
	w := &foilWorker{site: s, foil: p.Foil, root: filepath.Join(s.Dir, "trace")}
	if err := w.Start(ctx); err != nil {
		return done, err
	}
	defer func() { _ = w.Stop() }() // the site ends what is left
	set, _, err := w.Set(ctx, im)
	if err == nil && set.Traces >= traceRuns && set.Stored > 0 {
		return done, nil
	}
	began := time.Now()
	args := []string{"trace", "--root", w.root, "--plain-http", "--probe", im.Ready.Probe, "--runs", strconv.Itoa(traceRuns), im.Ref}
	if len(im.Command) > 0 {
		args = append(append(args, "--"), im.Command...)
	}
	tracing, err := s.Start(link.Edge, nil, w.foil, args...)
	if err != nil {
		return done, err
	}
	// Whether it is ready is asked from outside, and what the answer needs is
	// part of the start: floors and measured runs have it as well.
	for asking := im.Ready.Network(); asking; {
		select {
		case <-tracing.Done:
			asking = false
		case <-time.After(50 * time.Millisecond):
			attempt, cancel := context.WithTimeout(ctx, time.Second)
			_ = im.Ready.Wait(attempt, s.Link, tracing)
			cancel()
		}
	}
	select {
	case <-tracing.Done:
	case <-ctx.Done():
		return done, errors.Join(context.Cause(ctx), tracing.Stop(syscall.SIGTERM))
	}
	if tracing.Err != nil {
		return done, fmt.Errorf("bench: trace %s: %w%s", im.Ref, tracing.Err, tracing.Said())
	}
	done.Time = time.Since(began)
	set, err = w.built(ctx, im, began)
	done.Storage = set.Stored
	return done, err
}

// traceRuns is how often a service is traced.
const traceRuns = 2

// Set asks the server, in the cloud.
func (w *foilWorker) Set(ctx context.Context, im Image) (set bundle.Service, of int64, err error) {
	report, err := w.sets(ctx, im)
	for _, set := range report.Services {
		if slices.Equal(set.Args, im.args()) {
			return set, report.ImageBytes, nil
		}
	}
	return set, report.ImageBytes, err
}

// sets are what the server has of an image's startup sets.
func (w *foilWorker) sets(ctx context.Context, im Image) (report bundle.StartupReport, err error) {
	out, err := ask(ctx, w.site, http.MethodGet, startupPath(im))
	if err == nil {
		err = json.Unmarshal(out, &report)
	}
	if err != nil {
		return report, fmt.Errorf("bench: startup sets of %s: %w", im.Ref, err)
	}
	return report, nil
}

// startupPath is where the server tells of an image's startup sets, and forgets them.
func startupPath(im Image) string {
	repository, tag, _ := strings.Cut(strings.TrimPrefix(im.Ref, RegistryAddr+"/"), ":")
	return bundle.StartupPath + "?" + url.Values{"repository": {repository}, "reference": {tag}}.Encode()
}

// own is an image where this worker pulls it.
func (w *foilWorker) own(im Image) Image {
	if w.untraced {
		return untraced(im)
	}
	return im
}

// Unlearn removes startup sets and traces from the repository of what nobody has traced.
func (w *foilWorker) Unlearn(ctx context.Context, im Image) error {
	if !w.untraced {
		return nil
	}
	return Forget(ctx, w.site, w.own(im))
}

// built waits until the server has a set that is younger than after; it builds sets in the
// background.
func (w *foilWorker) built(ctx context.Context, im Image, after time.Time) (set bundle.Service, err error) {
	for {
		set, _, err = w.Set(ctx, im)
		if err != nil || set.Stored > 0 && set.Updated.After(after) {
			return set, err
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
			return set, context.Cause(ctx)
		}
	}
}

// Startup is what the last foil run told.
func (w *foilWorker) Startup(ctx context.Context) (StartupResult, error) {
	ready, err := w.ready(ctx)
	return StartupResult{ready.StartupOrigin, ready.StartupMoved, ready.Waits, seconds(ready.Waited)}, err
}

// Reported gives it a minute: reports are sent after a while, in the background.
func (w *foilWorker) Reported(ctx context.Context, im Image) error {
	ctx, cancel := context.WithTimeoutCause(ctx, time.Minute, site.ErrTooLong)
	defer cancel()
	_, err := w.built(ctx, im, w.since)
	return err
}

func (h *Hydrofoil) Worker(s *site.Site, p Programs, dir string) Worker {
	return &foilWorker{site: s, foil: p.Foil, root: dir, connected: h.connected(), untraced: h.untraced(), reports: h.Variant == Learning, used: h.Variant == Used, proving: h.Variant == Proving}
}

type foilWorker struct {
	site *site.Site
	foil string
	root string
	// What Variant says.
	connected, untraced, reports, used, proving bool
	// More flags of the daemon.
	flags []string

	daemon *site.Process
	since  time.Time // the last provisioning began
	ref    string    // what it is of
	events *events   // of the last foil run
	run    *site.Process
	trees  int // mounted so far
}

func (w *foilWorker) Start(ctx context.Context) (err error) {
	// Reports would make the sets of later runs others than those of earlier ones.
	// The registry has no TLS: unless told otherwise a container would wait for the proof of its image.
	policy := "*=served"
	if w.proving {
		policy = "*=proven"
	}
	args := []string{"node", "--root", w.root, "--policy", policy}
	// The gate that it would have under systemd.
	if gate, _, err := kernel.ChooseGate(ctx, filepath.Dir(w.root), true); err == nil {
		args = append(args, "--gate", gate)
	}
	if !w.reports {
		args = append(args, "--report", "off")
	}
	if w.connected {
		args = append(args, "--connect", "http://"+RegistryAddr)
	}
	if w.daemon, err = w.site.Start(link.Edge, nil, w.foil, append(args, w.flags...)...); err != nil {
		return err
	}
	client := api.Dial(w.root)
	defer client.Close()
	err = started(ctx, w.daemon, "foil node", func(ctx context.Context) bool {
		status, err := client.Status(ctx)
		return err == nil && !slices.ContainsFunc(status.Servers, func(s api.ServerStatus) bool { return !s.Warm })
	})
	if err != nil || !w.used {
		return err
	}
	if err := w.use(ctx); err != nil {
		return errors.Join(err, w.Stop())
	}
	return nil
}

// use pulls and runs the small image, and removes it.
func (w *foilWorker) use(ctx context.Context) error {
	if err := pushSmall(ctx, w.site); err != nil {
		return err
	}
	if _, err := w.site.Run(ctx, link.Edge, w.foil, "run", "--root", w.root, "--rm", "--plain-http", smallRef); err != nil {
		return err
	}
	_, err := w.site.Run(ctx, link.Edge, w.foil, "rm", "--root", w.root, smallRef)
	return err
}

// Processes are the daemon and its keeper.
func (w *foilWorker) Processes() []int {
	pids := []int{w.daemon.PID()}
	client := api.Dial(w.root)
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if status, err := client.Status(ctx); err == nil && status.Keeper != 0 {
		pids = append(pids, status.Keeper)
	}
	return pids
}

// events are what one foil run has told so far.
type events struct {
	mu   sync.Mutex
	seen map[api.EventKind]api.Event // the last of each kind
}

func (e *events) get(kind api.EventKind) (api.Event, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	event, ok := e.seen[kind]
	return event, ok
}

// read notes events, and marks on the trial what happened, when it is told.
func (e *events) read(from *os.File, t *Trial) {
	defer from.Close()
	lines := bufio.NewScanner(from)
	for lines.Scan() {
		var event api.Event
		if json.Unmarshal(lines.Bytes(), &event) != nil {
			continue
		}
		if mark, ok := map[api.EventKind]Mark{api.Mounted: Pulled, api.Started: Started, api.Complete: Complete}[event.Event]; ok && t != nil && event.Err == "" {
			t.Mark(mark)
		}
		e.mu.Lock()
		e.seen[event.Event] = event
		e.mu.Unlock()
	}
}

func (w *foilWorker) Provision(ctx context.Context, im Image, t *Trial) (*Container, error) {
	read, write, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	im = w.own(im)
	args := []string{"run", "--root", w.root, "--rm", "--plain-http", "--events", "fd:3", "--probe", im.Ready.Probe, im.Ref}
	if len(im.Command) > 0 {
		args = append(append(args, "--"), im.Command...)
	}
	w.since, w.ref = time.Now(), im.Ref
	w.run, err = w.site.Start(link.Edge, []*os.File{write}, w.foil, args...)
	write.Close()
	if err != nil {
		read.Close()
		return nil, err
	}
	w.events = &events{seen: map[api.EventKind]api.Event{}}
	go w.events.read(read, t) // until all that hold the other end are gone
	p := w.run
	p.Init = func(ctx context.Context) (int, error) { return runcInit(ctx, launch.StateRoot(w.root)) }
	return &Container{p, func() error { return w.stopContainer(p) }}, nil
}

// stopContainer ends the container that p runs in the foreground.
func (w *foilWorker) stopContainer(p *site.Process) error {
	select {
	case <-p.Done:
		return nil
	default:
	}
	client := api.Dial(w.root)
	defer client.Close()
	ctx, cancel := context.WithTimeoutCause(context.Background(), 15*time.Second, site.ErrTooLong)
	defer cancel()
	list, err := client.Containers(ctx)
	for _, c := range list {
		err = errors.Join(err, kill(w.site, launch.StateRoot(w.root), c.ID, p))
	}
	return errors.Join(err, p.Stop(syscall.SIGTERM))
}

// Complete waits until every byte of the image is on the worker.
func (w *foilWorker) Complete(ctx context.Context, im Image, t *Trial) error {
	im = w.own(im)
	client := api.Dial(w.root)
	defer client.Close()
	err := w.daemon.Until(ctx, "wait until "+im.Ref+" is complete", func() bool {
		if event, ok := w.events.get(api.Complete); ok {
			return event.Err == ""
		}
		select {
		case <-w.run.Done: // a container that ends by itself takes its events along
			list, err := client.Images(ctx)
			if err != nil {
				return false
			}
			for _, image := range list {
				if image.Ref == im.Ref && image.State == "complete" {
					t.Mark(Complete)
					return true
				}
			}
			time.Sleep(5 * time.Millisecond)
		default:
		}
		return false
	})
	return err
}

// Tell notes what the event ready says, or exited if the container ended before.
func (w *foilWorker) Tell(ctx context.Context, t *Trial) error {
	event, err := w.ready(ctx)
	if err != nil {
		return err
	}
	t.ArenaReady(event.ArenaBytes)
	t.Waits(event.Waits, seconds(event.Waited))
	return w.tellReads(ctx, w.ref, t)
}

// tellReads notes on the trial when reads waited for an image.
func (w *foilWorker) tellReads(ctx context.Context, ref string, t *Trial) error {
	client := api.Dial(w.root)
	defer client.Close()
	report, err := client.PullReport(ctx, ref)
	if err != nil {
		// Builds that are compared with this one may be older than the question.
		if strings.Contains(err.Error(), "405 Method Not Allowed") {
			return nil
		}
		return fmt.Errorf("bench: ask which reads of %s waited: %w", ref, err)
	}
	t.Reads(report.Reads)
	if report.WaitMax > 0 {
		t.Longest(seconds(report.WaitMax), seconds(report.WaitBound), report.WaitsOver)
	}
	return nil
}

// ready waits for the event of that name.
func (w *foilWorker) ready(ctx context.Context) (event api.Event, err error) {
	err = w.daemon.Until(ctx, "wait for the ready event", func() bool {
		var ok bool
		if event, ok = w.events.get(api.Ready); !ok {
			event, ok = w.events.get(api.Exited)
		}
		return ok
	})
	return event, err
}

// Check compares digests, and has every byte verified if none is missing.
func (w *foilWorker) Check(ctx context.Context, im Image, complete bool) error {
	im = w.own(im)
	client := api.Dial(w.root)
	defer client.Close()
	list, err := client.Images(ctx)
	if err != nil {
		return fmt.Errorf("bench: list the worker's images: %w", err)
	}
	found := false
	for _, image := range list {
		if image.Ref == im.Ref {
			found = true
			if image.Digest != im.Built.Digest.String() {
				return fmt.Errorf("bench: the worker's %s is %s, not %s", im.Ref, image.Digest, im.Built.Digest)
			}
		}
	}
	if !found {
		return fmt.Errorf("bench: the worker does not know %s", im.Ref)
	}
	if !complete {
		return nil
	}
	_, err = w.site.Run(ctx, link.Edge, w.foil, "verify", "--root", w.root, im.Ref)
	return err
}

// Mounted calls fn with the path of an image's file tree, mounted as a container
// has it.
func (w *foilWorker) Mounted(ctx context.Context, ref string, fn func(tree string) error) error {
	client := api.Dial(w.root)
	defer client.Close()
	w.trees++
	id := fmt.Sprintf("tree-%d", w.trees)
	c, err := client.CreateContainer(ctx, api.ContainerRequest{ID: id, Ref: ref})
	if err != nil {
		return fmt.Errorf("bench: mount %s: %w", ref, err)
	}
	err = fn(c.Rootfs)
	if removeErr := client.RemoveContainer(context.WithoutCancel(ctx), id); removeErr != nil {
		err = errors.Join(err, fmt.Errorf("bench: unmount %s: %w", ref, removeErr))
	}
	return err
}

// Stop ends the daemon, and the keeper, which would otherwise wait for another.
func (w *foilWorker) Stop() error { return w.daemon.Stop(syscall.SIGTERM) }

// firstLine is the first line that a program says of itself.
func firstLine(ctx context.Context, program string, args ...string) (string, error) {
	out, err := command(ctx, program, args...)
	line, _, _ := strings.Cut(strings.TrimSpace(out), "\n")
	return line, err
}
