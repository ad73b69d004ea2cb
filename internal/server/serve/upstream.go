package serve

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/server/bundles"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/upstream"
)

// checkUpstream sees to it that a root serves one upstream for ever, or none:
// names mean other things elsewhere, and an accelerator's catalog knows of blobs
// that are not here.
func checkUpstream(ctx context.Context, root, url string, cat catalog.Repositories) error {
	file := filepath.Join(root, "upstream")
	b, err := os.ReadFile(file)
	was := strings.TrimSpace(string(b))
	switch {
	case errors.Is(err, fs.ErrNotExist) && url == "":
		return nil
	case errors.Is(err, fs.ErrNotExist):
		if names, err := cat.ListRepositories(ctx, "", 1); err != nil {
			return err
		} else if len(names) > 0 {
			return fmt.Errorf("%s is the root of a registry that was pushed to: name another one for the accelerator of %s", root, url)
		}
		f, err := os.Create(file)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(f, url)
		return errors.Join(err, f.Sync(), f.Close()) // its name is made durable with the root's
	case err != nil:
		return err
	case url == "":
		return fmt.Errorf("%s is the root of the accelerator of %s: name that upstream, or another root", root, was)
	case url != was:
		return fmt.Errorf("%s is the root of the accelerator of %s: name another one for %s; if that is the same registry with a new address, write it into %s", root, was, url, file)
	}
	return nil
}

// fetched has the layers of an image downloaded while get reads them. Blobs that
// turn out to be damaged here are fetched anew, once.
func fetched(front *upstream.Accelerator, get func(context.Context, *bundles.Resolved) (catalog.Rootfs, error)) func(context.Context, *bundles.Resolved) (catalog.Rootfs, error) {
	if front == nil {
		return get
	}
	return func(ctx context.Context, m *bundles.Resolved) (catalog.Rootfs, error) {
		blobs := make([]digest.Digest, len(m.Layers))
		for i, l := range m.Layers {
			blobs[i] = l.Digest
		}
		defer front.Want(ctx, blobs)()
		r, err := get(ctx, m)
		if told, ok := errors.AsType[*bundle.Error](err); ok && told.Code == bundle.CodeCorrupt {
			r, err = get(ctx, m)
		}
		front.Full(err)
		return r, err
	}
}
