package engines

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/opencontainers/image-spec/identity"

	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
	"hydrofoil.dev/foil/internal/worker/api"
)

// HydrofoilContainerd is Hydrofoil as the snapshotter of a containerd, and as its
// mirror, as deploy/containerd says: ctr pulls and runs. Services were traced,
// and the daemon keeps a connection to the server, as with Hydrofoil.
type HydrofoilContainerd struct{}

func (*HydrofoilContainerd) Name() string { return "hydrofoil-containerd" }

func (*HydrofoilContainerd) Find(ctx context.Context, p Programs) (string, error) {
	return findHosted(ctx, p)
}

// findHosted finds foil, and a containerd that tells a snapshotter which image a
// layer is of.
func findHosted(ctx context.Context, p Programs) (string, error) {
	t, err := findTwo(ctx, p)
	if err != nil {
		return "", err
	}
	foil, err := (&Hydrofoil{}).Find(ctx, p)
	return foil + ", " + t.version, err
}

// findTwo finds containerd 2.
func findTwo(ctx context.Context, p Programs) (tools, error) {
	t, err := findContainerd(ctx, p)
	if err == nil && t.major < 2 {
		err = fmt.Errorf("bench: %s is too old: this is configured for 2.x; say --containerd", t.version)
	}
	return t, err
}

func (*HydrofoilContainerd) Prepare(ctx context.Context, s *site.Site, p Programs, im Image) (Preparation, error) {
	return (&Hydrofoil{}).Prepare(ctx, s, p, im)
}

func (*HydrofoilContainerd) Worker(s *site.Site, p Programs, dir string) Worker {
	w := newContainerd(s, p, filepath.Join(dir, "containerd"), hostedName)
	w.transfer = true
	return &hostedWorker{containerdWorker: w, foil: newHosted(s, p, dir, w)}
}

// hostedName is what containerd calls the daemon's snapshotter.
const hostedName = "hydrofoil"

// mirrorAddr is where the daemon resolves images, see deploy/containerd/hosts.toml.
const mirrorAddr = "127.0.0.1:598"

// hosted is a daemon that serves a containerd.
type hosted struct {
	*foilWorker
	containerd *containerdWorker
	last       Image      // that was provisioned
	complete   chan Point // of it: when nothing was missing
}

// newHosted makes a daemon for a containerd, and tells that of it.
func newHosted(s *site.Site, p Programs, dir string, c *containerdWorker) *hosted {
	root := filepath.Join(dir, "foil")
	c.proxy, c.hosts, c.mirror = filepath.Join(root, "run", "snapshotter.sock"), filepath.Join(dir, "certs.d"), mirrorHosts(root)
	return &hosted{containerd: c, foilWorker: &foilWorker{
		site: s, foil: p.Foil, root: root, connected: true,
		flags: []string{"--mirror-listen", mirrorAddr, "--hosts-dir", c.hosts, "--docker-config", ""},
	}}
}

// mirrorHosts is what hosts.toml says of the mirror of a root.
func mirrorHosts(root string) string {
	key := filepath.Join(root, "mirror", "key.pem")
	return fmt.Sprintf("[host.%q]\ncapabilities = [\"pull\", \"resolve\"]\nca = %q\nclient = %q", "https://"+mirrorAddr, key, key)
}

// Start starts the daemon; its snapshotter and its mirror answer when it returns.
func (h *hosted) Start(ctx context.Context) error {
	if err := h.foilWorker.Start(ctx); err != nil {
		return err
	}
	err := started(ctx, h.daemon, "foil node's mirror", func(ctx context.Context) bool {
		conn, err := h.site.Link.DialContext(ctx, link.Edge, "tcp4", mirrorAddr)
		if err != nil {
			return false
		}
		conn.Close()
		conn, err = net.Dial("unix", h.containerd.proxy)
		if err != nil {
			return false
		}
		conn.Close()
		return true
	})
	if err != nil {
		return errors.Join(err, h.Stop())
	}
	return nil
}

// image is what the daemon has of an image, by whatever name.
func (h *hosted) image(ctx context.Context, client *api.Client, im Image) (image api.Image, ok bool) {
	list, err := client.Images(ctx)
	if err != nil {
		return image, false
	}
	for _, image := range list {
		if image.Digest == im.Built.Digest.String() {
			return image, true
		}
	}
	return image, false
}

// watch begins to look, until ctx ends, when an image is complete.
func (h *hosted) watch(ctx context.Context, im Image, t *Trial) {
	h.last, h.complete = im, make(chan Point, 1)
	go func(complete chan<- Point) {
		client := api.Dial(h.root)
		defer client.Close()
		ticker := time.NewTicker(tick)
		defer ticker.Stop()
		for {
			if image, ok := h.image(ctx, client, im); ok && image.State == "complete" {
				complete <- t.Now()
				return
			}
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
		}
	}(h.complete)
}

// Complete waits until every byte of the image is on the worker.
func (h *hosted) Complete(ctx context.Context, im Image, t *Trial) error {
	select {
	case p := <-h.complete:
		t.mark(Complete, p)
		return nil
	case <-h.daemon.Done:
		return errors.Join(fmt.Errorf("bench: foil node ended before %s was complete%s", im.Ref, h.daemon.Said()), h.daemon.Err)
	case <-ctx.Done():
		return fmt.Errorf("bench: wait until %s is complete: %w%s", im.Ref, context.Cause(ctx), h.daemon.Said())
	}
}

// Tell notes when reads waited, and of those that are told how many did until ready.
func (h *hosted) Tell(ctx context.Context, t *Trial) error {
	client := api.Dial(h.root)
	defer client.Close()
	image, ok := h.image(ctx, client, h.last)
	if !ok {
		return fmt.Errorf("bench: the worker does not have %s (%s)%s", h.last.Ref, h.last.Built.Digest, h.daemon.Said())
	}
	if err := h.tellReads(ctx, image.Ref, t); err != nil {
		return err
	}
	t.waitsUntilReady()
	return nil
}

// Check sees to it that the image came lazily, and has every byte verified if none
// is missing.
func (h *hosted) Check(ctx context.Context, im Image, complete bool) error {
	client := api.Dial(h.root)
	defer client.Close()
	image, ok := h.image(ctx, client, im)
	if !ok {
		return fmt.Errorf("bench: the worker does not have %s (%s)%s", im.Ref, im.Built.Digest, h.daemon.Said())
	}
	chain := identity.ChainID(im.Built.Config.RootFS.DiffIDs).String()
	info, err := h.containerd.ctr(ctx, "snapshots", "--snapshotter", hostedName, "info", chain)
	if err != nil {
		return err
	}
	if !strings.Contains(info, `"hydrofoil.dev/path": "lazy"`) {
		return fmt.Errorf("bench: %s did not come lazily: %s", im.Ref, info)
	}
	if !complete {
		return nil
	}
	_, err = h.site.Run(ctx, link.Edge, h.foil, "verify", "--root", h.root, image.Ref)
	return err
}

type hostedWorker struct {
	*containerdWorker
	foil *hosted
}

func (w *hostedWorker) Start(ctx context.Context) error {
	if err := w.foil.Start(ctx); err != nil {
		return err
	}
	if err := w.containerdWorker.Start(ctx); err != nil {
		return errors.Join(err, w.foil.Stop())
	}
	return nil
}

func (w *hostedWorker) Processes() []int {
	return append(w.containerdWorker.Processes(), w.foil.Processes()...)
}

func (w *hostedWorker) Provision(ctx context.Context, im Image, t *Trial) (*Container, error) {
	if err := w.Pull(ctx, im.Ref); err != nil {
		return nil, err
	}
	t.Mark(Pulled)
	w.foil.watch(ctx, im, t)
	return w.start(ctx, w.tools.ctr, im.Ref, im.Command, t)
}

func (w *hostedWorker) Complete(ctx context.Context, im Image, t *Trial) error {
	return w.foil.Complete(ctx, im, t)
}

func (w *hostedWorker) Tell(ctx context.Context, t *Trial) error { return w.foil.Tell(ctx, t) }

func (w *hostedWorker) Check(ctx context.Context, im Image, complete bool) error {
	return errors.Join(w.containerdWorker.Check(ctx, im, complete), w.foil.Check(ctx, im, complete))
}

func (w *hostedWorker) Stop() error {
	return errors.Join(w.containerdWorker.Stop(), w.foil.Stop())
}

// writeHosts writes the registry's hosts.toml below a directory, as
// deploy/containerd has it; hosts are those that are asked first, if any.
func writeHosts(dir, hosts string) error {
	path := filepath.Join(dir, strings.Replace(RegistryAddr, ":", "_", 1)+"_", "hosts.toml")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if hosts == "" {
		hosts = fmt.Sprintf("[host.%q]\ncapabilities = [\"pull\", \"resolve\"]", "http://"+RegistryAddr)
	}
	text := fmt.Sprintf("server = %q\n%s\n", "http://"+RegistryAddr, hosts)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	return nil
}
