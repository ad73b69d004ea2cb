package launch

import (
	"context"
	"fmt"

	"hydrofoil.dev/foil/internal/worker/api"
)

// Removed is one thing that Remove removed.
type Removed struct {
	Kind string `json:"kind"` // container or image
	Name string `json:"name"`
}

// Remove removes the container with the ID name, or else the image of that
// name. With force a running container is killed, and so are an image's
// containers, which go with it. What was removed is returned also when there is an
// error.
func (w *Worker) Remove(ctx context.Context, name string, force bool) ([]Removed, error) {
	containers, err := w.Client.Containers(ctx)
	if err != nil {
		return nil, err
	}
	for _, c := range containers {
		if c.ID == name {
			return w.removeContainer(ctx, nil, c.ID, force)
		}
	}
	ref, err := api.NormalRef(name)
	if err != nil {
		return nil, &api.Error{Code: api.CodeNotFound, Message: fmt.Sprintf(
			"no container %q here (foil ps -a lists them), and no image can have that name (foil images lists them)", name)}
	}
	var done []Removed
	if force {
		for _, c := range containers {
			if c.Ref != ref {
				continue
			}
			if done, err = w.removeContainer(ctx, done, c.ID, true); err != nil {
				return done, err
			}
		}
	}
	if err := w.Client.RemoveImage(ctx, ref); err != nil {
		return done, err
	}
	return append(done, Removed{"image", ref}), nil
}

func (w *Worker) removeContainer(ctx context.Context, done []Removed, id string, force bool) ([]Removed, error) {
	if force {
		if err := w.Runner.Delete(ctx, id); err != nil {
			return done, err
		}
	}
	if err := w.Client.RemoveContainer(ctx, id); err != nil {
		return done, err
	}
	return append(done, Removed{"container", id}), nil
}
