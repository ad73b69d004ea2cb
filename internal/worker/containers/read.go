package containers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/changes"
	"hydrofoil.dev/foil/internal/worker/launch"
	"hydrofoil.dev/foil/internal/worker/runner"
	"hydrofoil.dev/foil/internal/worker/store"
)

// Read returns a container, the rootfs that it is on, and where its files are. Both stay until done is called.
//
// Errors: api.CodeNotFound; api.CodeConflict when it is not mounted.
func (s *Set) Read(id string) (_ Container, _ *store.Rootfs, _ changes.Tree, done func(), err error) {
	var none Container
	fail := func(code, format string, args ...any) (Container, *store.Rootfs, changes.Tree, func(), error) {
		return none, nil, changes.Tree{}, nil, api.Errorf(code, format, args...)
	}
	s.mu.Lock()
	c := s.all[id]
	switch {
	case c == nil:
		s.mu.Unlock()
		return fail(api.CodeNotFound, "no container %s: `foil ps -a` lists them", id)
	case c.busy:
		s.mu.Unlock()
		return fail(api.CodeConflict, "container %s is just being made or removed: try again in a moment", id)
	}
	c.readers++
	read := Container{Version: c.Version, Container: c.Container, ChainID: c.ChainID, On: c.On, Traced: c.Traced}
	s.mu.Unlock()
	leave := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		c.readers--
	}
	r, release := s.opts.Store.Use(read.On)
	done = func() {
		if release != nil {
			release()
		}
		leave()
	}
	if r == nil {
		done()
		return fail(api.CodeCorrupt, "the rootfs of image %s, which container %s is on, is gone", read.Ref, id)
	}
	tree := changes.Tree{Upper: filepath.Join(read.Dir, "upper"), Lower: r.Mountpoint(), Merged: read.Rootfs}
	if read.Traced {
		tree.Lower = filepath.Join(read.Dir, tracedMount)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(tree.Merged, &st); err != nil || int64(st.Type) != unix.OVERLAYFS_SUPER_MAGIC || !r.Mount().Mounted() {
		done()
		return fail(api.CodeConflict, "the filesystem of container %s is not mounted any more: the host was started again since", id)
	}
	if tree.Mountpoints, err = mountpoints(read.Dir); err != nil {
		done()
		return none, nil, changes.Tree{}, nil, err
	}
	return read, r, tree, done, nil
}

// mountpoints are where the container's runtime has mounted something, by the configuration that it was given.
func mountpoints(dir string) (list []string, err error) {
	b, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // it was never started
	}
	var spec specs.Spec
	if err == nil {
		err = json.Unmarshal(b, &spec)
	}
	if err != nil {
		return nil, fmt.Errorf("configuration of a container: %w", err)
	}
	for _, m := range spec.Mounts {
		list = append(list, m.Destination)
	}
	return list, nil
}

// Pause has a container's processes stand still, if it runs, until resume is called, which reports whether they did.
func (s *Set) Pause(ctx context.Context, id string) (resume func() (bool, error), err error) {
	runc := runner.Runner{StateRoot: launch.StateRoot(s.opts.Root)}
	nothing := func() (bool, error) { return false, nil }
	state, err := runc.State(ctx, id)
	switch {
	case errors.Is(err, runner.ErrNotFound):
		return nothing, nil
	case err != nil:
		return nil, err
	case state.Status != "running":
		return nothing, nil
	}
	if err := runc.Pause(ctx, id); err != nil {
		return nil, err
	}
	return func() (bool, error) {
		err := runc.Resume(context.WithoutCancel(ctx), id)
		if errors.Is(err, runner.ErrNotFound) {
			err = nil // it was killed meanwhile
		}
		return true, err
	}, nil
}
