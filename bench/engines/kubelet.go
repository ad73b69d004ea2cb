package engines

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"hydrofoil.dev/foil/bench/site"
)

// Runtime is a worker of CRI whose pods a kubelet makes, not this program. The daemon learns what runs in a
// container, and tells the server what services touch, as on a node.
type Runtime struct{ *criWorker }

// Runtime makes an empty worker that keeps everything below dir.
func (c *CRI) Runtime(s *site.Site, p Programs, dir string) *Runtime {
	w := c.Worker(s, p, dir).(*criWorker)
	if w.foil != nil {
		w.foil.reports = true
		w.foil.flags = append(w.foil.flags, "--cri-endpoint", w.socket())
	}
	return &Runtime{w}
}

// Start starts the daemons, which have run one container when it returns.
func (r *Runtime) Start(ctx context.Context) error {
	if err := r.criWorker.Start(ctx); err != nil {
		return err
	}
	err := r.removeSandbox(r.sandbox)
	r.sandbox = ""
	if err != nil {
		return errors.Join(err, r.Stop())
	}
	return nil
}

// Socket is where containerd answers.
func (r *Runtime) Socket() string { return r.socket() }

// Began is when the container of a pod began to run.
func (r *Runtime) Began(ctx context.Context, pod string) (at time.Time, err error) {
	list, err := r.runtime.ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{
		State:         &cri.ContainerStateValue{State: cri.ContainerState_CONTAINER_RUNNING},
		LabelSelector: map[string]string{"io.kubernetes.pod.name": pod},
	}})
	if err != nil {
		return at, fmt.Errorf("bench: ListContainers: %w", err)
	}
	if len(list.Containers) != 1 {
		return at, fmt.Errorf("bench: pod %s runs %d containers, not one", pod, len(list.Containers))
	}
	status, err := r.runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: list.Containers[0].Id})
	if err != nil {
		return at, fmt.Errorf("bench: ContainerStatus: %w", err)
	}
	return time.Unix(0, status.Status.StartedAt), nil
}

// RemovePods removes all pods, once no kubelet makes others.
func (r *Runtime) RemovePods(ctx context.Context) error {
	list, err := r.runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return fmt.Errorf("bench: ListPodSandbox: %w", err)
	}
	for _, p := range list.Items {
		err = errors.Join(err, r.removeSandbox(p.Id))
	}
	return err
}

// Forget has the server forget what it knows of an image's services.
func Forget(ctx context.Context, s *site.Site, im Image) error {
	w := &foilWorker{site: s}
	if _, err := ask(ctx, s, http.MethodDelete, startupPath(im)); err != nil {
		return err
	}
	report, err := w.sets(ctx, im)
	if err == nil && len(report.Services) > 0 {
		err = fmt.Errorf("bench: the server knows %d services of %s after it was told to forget them", len(report.Services), im.Ref)
	}
	return err
}

// Learned waits, for two minutes, until the server has a startup set of an image's service that is younger than since.
func Learned(ctx context.Context, s *site.Site, im Image, since time.Time) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 2*time.Minute, site.ErrTooLong)
	defer cancel()
	if _, err := (&foilWorker{site: s}).built(ctx, im, since); err != nil {
		return fmt.Errorf("bench: what was touched of %s has not come to the server as a startup set: %w", im.Ref, err)
	}
	return nil
}
