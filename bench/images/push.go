package images

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"

	digest "github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// Push pushes an image to HOST:PORT/REPOSITORY:TAG, where a registry speaks HTTP without
// TLS and takes a blob in one request, as foil serve does. What it has is not sent again.
func (b *Built) Push(ctx context.Context, target string) error {
	host, rest, _ := strings.Cut(target, "/")
	repository, tag, ok := strings.Cut(rest, ":")
	if host == "" || repository == "" || !ok || tag == "" {
		return fmt.Errorf("images: push to %q: want HOST:PORT/REPOSITORY:TAG", target)
	}
	base := "http://" + host + "/v2/" + repository
	blobs := []digest.Digest{b.Manifest.Config.Digest}
	for _, layer := range b.Manifest.Layers {
		blobs = append(blobs, layer.Digest)
	}
	for _, blob := range blobs {
		if err := b.pushBlob(ctx, base, blob); err != nil {
			return fmt.Errorf("images: push %s to %s: %w", blob, target, err)
		}
	}
	manifest, err := os.ReadFile((&layout{b.Layout}).blob(b.Digest))
	if err == nil {
		err = put(ctx, http.MethodPut, base+"/manifests/"+tag, cmp.Or(b.Manifest.MediaType, v1.MediaTypeImageManifest), bytes.NewReader(manifest), int64(len(manifest)))
	}
	if err != nil {
		return fmt.Errorf("images: push the manifest to %s: %w", target, err)
	}
	return nil
}

func (b *Built) pushBlob(ctx context.Context, base string, blob digest.Digest) error {
	head, err := http.NewRequestWithContext(ctx, http.MethodHead, base+"/blobs/"+blob.String(), nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(head)
	if err != nil {
		return err
	}
	response.Body.Close()
	if response.StatusCode == http.StatusOK {
		return nil
	}
	file, err := os.Open((&layout{b.Layout}).blob(blob))
	if err != nil {
		return err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	return put(ctx, http.MethodPost, base+"/blobs/uploads/?digest="+blob.String(), "application/octet-stream", file, info.Size())
}

// put sends a body whole; the registry has to answer that it was created.
func put(ctx context.Context, method, url, mediaType string, body io.Reader, size int64) error {
	req, err := http.NewRequestWithContext(ctx, method, url, io.NopCloser(body))
	if err != nil {
		return err
	}
	req.ContentLength = size
	req.Header.Set("Content-Type", mediaType)
	response, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	said, err := io.ReadAll(io.LimitReader(response.Body, 4<<10))
	if err == nil && response.StatusCode != http.StatusCreated {
		err = errors.New(response.Status + ": " + strings.TrimSpace(string(said)))
	}
	return err
}
