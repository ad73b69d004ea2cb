package engines

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"hydrofoil.dev/foil/bench/site"
)

// CRI is containerd as a kubelet uses it, with its overlayfs snapshotter or with
// Hydrofoil. A pod's sandbox, on the host's network, is made when the worker is
// started: a kubelet makes it before it pulls. What is measured begins with
// PullImage; Pulled is when that returns, and Started when StartContainer does,
// after CreateContainer.
//
// The client is this program, on a connection that is open before the clock runs,
// as a kubelet's is: there is no command to be started, as with ctr and foil run.
type CRI struct {
	Snapshotter string // overlayfs or hydrofoil
}

// FullCRI is CRI with a snapshotter of containerd's own.
type FullCRI struct{ CRI }

// Whole: a pull returns when every layer is unpacked.
func (*FullCRI) Whole() {}

func (c *CRI) Name() string { return c.Snapshotter + "-cri" }

func (c *CRI) Find(ctx context.Context, p Programs) (string, error) {
	if c.Snapshotter == hostedName {
		return findHosted(ctx, p)
	}
	t, err := findTwo(ctx, p)
	return t.version, err
}

func (c *CRI) Prepare(ctx context.Context, s *site.Site, p Programs, im Image) (Preparation, error) {
	if c.Snapshotter == hostedName {
		return (&Hydrofoil{}).Prepare(ctx, s, p, im)
	}
	return Preparation{What: "none"}, nil
}

func (c *CRI) Worker(s *site.Site, p Programs, dir string) Worker {
	w := newContainerd(s, p, filepath.Join(dir, "containerd"), c.Snapshotter)
	w.cri, w.namespace, w.hosts = true, "k8s.io", filepath.Join(dir, "certs.d")
	worker := &criWorker{containerdWorker: w}
	if c.Snapshotter == hostedName {
		worker.foil = newHosted(s, p, dir, w)
	}
	return worker
}

type criWorker struct {
	*containerdWorker
	foil    *hosted // nil with containerd's own snapshotters
	conn    *grpc.ClientConn
	images  cri.ImageServiceClient
	runtime cri.RuntimeServiceClient
	pod     *cri.PodSandboxConfig
	sandbox string // ID
}

// host is where all of a pod is: no network is made, as with the other engines.
var host = &cri.NamespaceOption{Network: cri.NamespaceMode_NODE}

// Start starts the daemons and makes a sandbox.
func (w *criWorker) Start(ctx context.Context) (err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, w.Stop())
		}
	}()
	if w.foil != nil {
		if err := w.foil.Start(ctx); err != nil {
			return err
		}
	}
	if err := w.containerdWorker.Start(ctx); err != nil {
		return err
	}
	archive := filepath.Join(w.dir, "pause.tar")
	if err := pauseCode.write(PauseRef, archive); err != nil {
		return err
	}
	// Into containerd's own snapshotter: it is none of the images measured.
	if _, err := w.ctr(ctx, "images", "import", "--local", "--snapshotter", w.snapshotter, archive); err != nil {
		return err
	}
	if w.conn, err = grpc.NewClient("unix:"+w.socket(), grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
		return fmt.Errorf("bench: connect to containerd's CRI: %w", err)
	}
	w.images, w.runtime = cri.NewImageServiceClient(w.conn), cri.NewRuntimeServiceClient(w.conn)
	err = started(ctx, w.daemon, "containerd's CRI", func(ctx context.Context) bool {
		_, err := w.runtime.Version(ctx, &cri.VersionRequest{})
		_, imageErr := w.images.ImageStatus(ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: PauseRef}})
		return err == nil && imageErr == nil
	})
	if err != nil {
		return err
	}
	w.runs++
	name := fmt.Sprintf("pod-%d", w.runs)
	w.pod = &cri.PodSandboxConfig{
		Metadata:     &cri.PodSandboxMetadata{Name: name, Namespace: "bench", Uid: name},
		LogDirectory: filepath.Join(w.dir, "pods", name),
		Linux:        &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{NamespaceOptions: host}},
	}
	made, err := w.runtime.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: w.pod})
	if err != nil {
		return fmt.Errorf("bench: RunPodSandbox: %w%s", err, w.daemon.Said())
	}
	w.sandbox = made.PodSandboxId
	return w.use(ctx)
}

// use pulls and runs the small image, and removes it.
func (w *criWorker) use(ctx context.Context) error {
	if err := pushSmall(ctx, w.site); err != nil {
		return err
	}
	spec := &cri.ImageSpec{Image: smallRef}
	if _, err := w.images.PullImage(ctx, &cri.PullImageRequest{Image: spec, SandboxConfig: w.pod}); err != nil {
		return fmt.Errorf("bench: PullImage %s: %w%s", smallRef, err, w.daemon.Said())
	}
	id, _, err := w.run(ctx, spec, nil)
	if err != nil {
		return err
	}
	if err := w.removeContainer(id); err != nil {
		return err
	}
	if _, err := w.images.RemoveImage(ctx, &cri.RemoveImageRequest{Image: spec}); err != nil {
		return fmt.Errorf("bench: RemoveImage %s: %w", smallRef, err)
	}
	return nil
}

func (w *criWorker) Processes() []int {
	pids := w.containerdWorker.Processes()
	if w.foil != nil {
		pids = append(pids, w.foil.Processes()...)
	}
	return pids
}

func (w *criWorker) Provision(ctx context.Context, im Image, t *Trial) (*Container, error) {
	spec := &cri.ImageSpec{Image: im.Ref}
	if _, err := w.images.PullImage(ctx, &cri.PullImageRequest{Image: spec, SandboxConfig: w.pod}); err != nil {
		return nil, fmt.Errorf("bench: PullImage %s: %w", im.Ref, err)
	}
	t.Mark(Pulled)
	if w.foil != nil {
		w.foil.watch(ctx, im, t)
	}
	id, name, err := w.run(ctx, spec, im.Command)
	if err != nil {
		return nil, err
	}
	t.Mark(Started)
	return w.follow(id, name, filepath.Join(w.pod.LogDirectory, name+".log"))
}

// run starts a container of an image that is here.
func (w *criWorker) run(ctx context.Context, spec *cri.ImageSpec, command []string) (id, name string, err error) {
	w.runs++
	name = fmt.Sprintf("run-%d", w.runs)
	made, err := w.runtime.CreateContainer(ctx, &cri.CreateContainerRequest{
		PodSandboxId: w.sandbox,
		Config: &cri.ContainerConfig{
			Metadata: &cri.ContainerMetadata{Name: name},
			Image:    spec,
			Args:     command,
			LogPath:  name + ".log",
			Linux:    &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{NamespaceOptions: host}},
		},
		SandboxConfig: w.pod,
	})
	if err != nil {
		return "", name, fmt.Errorf("bench: CreateContainer of %s: %w", spec.Image, err)
	}
	if _, err := w.runtime.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: made.ContainerId}); err != nil {
		return "", name, fmt.Errorf("bench: StartContainer of %s: %w%s", spec.Image, err, w.daemon.Said())
	}
	return made.ContainerId, name, nil
}

// How often a container's log is looked at, and whether it runs.
const (
	logTick    = 2 * time.Millisecond
	statusTick = 100 * time.Millisecond
)

// follow stands for a container that containerd runs.
func (w *criWorker) follow(id, name, log string) (*Container, error) {
	p, end, err := w.site.Stand(name)
	if err != nil {
		return nil, err
	}
	p.Init = func(ctx context.Context) (int, error) { return w.pid(ctx, id) }
	ctx, cancel := context.WithCancel(context.Background())
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		end(w.watchContainer(ctx, id, log, p.Log))
	}()
	return &Container{p, func() error {
		cancel()
		<-gone
		return w.removeContainer(id)
	}}, nil
}

// removeContainer stops and removes a container.
func (w *criWorker) removeContainer(id string) error {
	ctx, cancel := context.WithTimeoutCause(context.Background(), 15*time.Second, site.ErrTooLong)
	defer cancel()
	for {
		_, err := w.runtime.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: id})
		if err == nil {
			_, err = w.runtime.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: id})
		}
		if err == nil {
			return nil
		}
		// On a busy machine containerd may not have seen yet that it has
		// stopped. A kubelet asks again, too.
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("bench: remove container %s: %w", id, err)
		}
	}
}

// watchContainer copies what a container says from one file to another, until it
// has ended; the error says how, if not well.
func (w *criWorker) watchContainer(ctx context.Context, id, from, to string) error {
	log := &criLog{from: from, to: to}
	ticker := time.NewTicker(logTick)
	defer ticker.Stop()
	for asked := time.Now(); ; {
		var status *cri.ContainerStatus
		if time.Since(asked) >= statusTick {
			asked = time.Now()
			response, err := w.runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: id})
			if err != nil && ctx.Err() == nil {
				return fmt.Errorf("bench: ContainerStatus: %w", err)
			}
			status = response.GetStatus()
		}
		// After the question: what has ended has said everything.
		if err := log.copy(); err != nil {
			return err
		}
		if status.GetState() == cri.ContainerState_CONTAINER_EXITED {
			if status.ExitCode != 0 {
				return fmt.Errorf("exit status %d (%s)", status.ExitCode, status.Reason)
			}
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// criLog is a container's log as CRI has it, copied as its bare text. Each line
// is TIME STREAM TAG TEXT; with the tag P the text goes on in the next one.
type criLog struct {
	from, to string
	read     int64  // bytes of from, as far as lines were whole
	rest     []byte // of a line that is not whole
}

func (l *criLog) copy() error {
	in, err := os.Open(l.from)
	if errors.Is(err, os.ErrNotExist) {
		return nil // nothing has been said
	}
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	defer in.Close()
	new, err := io.ReadAll(io.NewSectionReader(in, l.read, 1<<40))
	if err != nil {
		return fmt.Errorf("bench: read %s: %w", l.from, err)
	}
	if len(new) == 0 {
		return nil
	}
	l.read += int64(len(new))
	var text []byte
	text, l.rest = criText(append(l.rest, new...))
	out, err := os.OpenFile(l.to, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	_, err = out.Write(text)
	if err := errors.Join(err, out.Close()); err != nil {
		return fmt.Errorf("bench: write %s: %w", l.to, err)
	}
	return nil
}

// criText is the text of the whole lines of a log, and what is left of it.
func criText(log []byte) (text, rest []byte) {
	for {
		line, after, whole := bytes.Cut(log, []byte("\n"))
		if !whole {
			return text, bytes.Clone(log)
		}
		if fields := bytes.SplitN(line, []byte(" "), 4); len(fields) == 4 {
			text = append(text, fields[3]...)
			if string(fields[2]) != "P" {
				text = append(text, '\n')
			}
		}
		log = after
	}
}

// pid is the first process of a container.
func (w *criWorker) pid(ctx context.Context, id string) (int, error) {
	response, err := w.runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: id, Verbose: true})
	if err != nil {
		return 0, fmt.Errorf("bench: ContainerStatus: %w", err)
	}
	var info struct {
		PID int `json:"pid"`
	}
	if err := json.Unmarshal([]byte(response.Info["info"]), &info); err != nil {
		return 0, fmt.Errorf("bench: ContainerStatus of %s: %w", id, err)
	}
	if info.PID == 0 {
		return 0, fmt.Errorf("bench: ContainerStatus of %s names no process", id)
	}
	return info.PID, nil
}

func (w *criWorker) Complete(ctx context.Context, im Image, t *Trial) error {
	if w.foil != nil {
		return w.foil.Complete(ctx, im, t)
	}
	return w.containerdWorker.Complete(ctx, im, t)
}

// Tell says nothing of containerd's own snapshotters: nothing waits with them.
func (w *criWorker) Tell(ctx context.Context, t *Trial) error {
	if w.foil == nil {
		return nil
	}
	return w.foil.Tell(ctx, t)
}

func (w *criWorker) Check(ctx context.Context, im Image, complete bool) error {
	err := w.containerdWorker.Check(ctx, im, complete)
	if w.foil != nil {
		err = errors.Join(err, w.foil.Check(ctx, im, complete))
	}
	return err
}

// removeSandbox removes a sandbox and its containers.
func (w *criWorker) removeSandbox(id string) error {
	ctx, cancel := context.WithTimeoutCause(context.Background(), 15*time.Second, site.ErrTooLong)
	defer cancel()
	_, err := w.runtime.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: id})
	if err == nil {
		_, err = w.runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: id})
	}
	if err != nil {
		return fmt.Errorf("bench: remove the sandbox: %w", err)
	}
	return nil
}

// Stop removes the sandbox and ends what was started.
func (w *criWorker) Stop() error {
	var errs []error
	if w.sandbox != "" {
		errs = append(errs, w.removeSandbox(w.sandbox))
		w.sandbox = ""
	}
	if w.conn != nil {
		errs = append(errs, w.conn.Close())
		w.conn = nil
	}
	if w.daemon != nil {
		errs = append(errs, w.containerdWorker.Stop())
		w.daemon = nil
	}
	if w.foil != nil && w.foil.daemon != nil {
		errs = append(errs, w.foil.Stop())
		w.foil.daemon = nil
	}
	return errors.Join(errs...)
}
