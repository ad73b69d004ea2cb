package engines

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
)

// RegistryAddr is where the cloud's registry listens, see link.Options.
const RegistryAddr = "192.0.2.1:5000"

// Serve starts foil serve in the cloud: the registry that all engines pull from.
// Prefix is a command that runs it, such as taskset.
func Serve(ctx context.Context, s *site.Site, foil, root string, prefix ...string) (*site.Process, error) {
	args := append(prefix, foil, "serve", "--root", root, "--listen", RegistryAddr)
	p, err := s.Start(link.Cloud, nil, args[0], args[1:]...)
	if err != nil {
		return nil, err
	}
	client := cloudClient(s)
	return p, started(ctx, p, "foil serve", func(context.Context) bool {
		response, err := client.Get("http://" + RegistryAddr + "/v2/")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
}

// cloudClient is a client in the cloud.
func cloudClient(s *site.Site) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return s.Link.DialContext(ctx, link.Cloud, network, address)
		},
	}}
}

// get asks the registry for a path.
func get(ctx context.Context, s *site.Site, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+RegistryAddr+path, nil)
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	response, err := cloudClient(s).Do(req)
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", response.Status, body)
	}
	if err != nil {
		return nil, fmt.Errorf("bench: GET %s: %w", path, err)
	}
	return body, nil
}

// Push pushes an image by a standard client, in the cloud, and asks the registry
// by which digest it knows it.
func Push(ctx context.Context, s *site.Site, im Image) error {
	target := "docker://" + im.Ref
	if _, err := s.Run(ctx, link.Cloud, "skopeo", "copy", "--dest-tls-verify=false", im.Built.Source(), target); err != nil {
		return err
	}
	out, err := s.Run(ctx, link.Cloud, "skopeo", "inspect", "--tls-verify=false", "--format", "{{.Digest}}", target)
	if err != nil {
		return err
	}
	if got := strings.TrimSpace(out); got != im.Built.Digest.String() {
		return fmt.Errorf("bench: the registry's %s is %s, not %s as it was pushed", im.Ref, got, im.Built.Digest)
	}
	return nil
}

// layerBytes is the size of the compressed layers of an image in the registry.
func layerBytes(ctx context.Context, s *site.Site, ref string) (n int64, err error) {
	out, err := s.Run(ctx, link.Cloud, "skopeo", "inspect", "--tls-verify=false", "--raw", "docker://"+ref)
	if err != nil {
		return 0, err
	}
	var manifest struct {
		v1.Manifest
		Manifests []v1.Descriptor `json:"manifests"` // of an index
	}
	if err := json.Unmarshal([]byte(out), &manifest); err != nil {
		return 0, fmt.Errorf("bench: manifest of %s: %w", ref, err)
	}
	for _, m := range manifest.Manifests {
		name := ref[:strings.LastIndexByte(ref, ':')]
		below, err := layerBytes(ctx, s, name+"@"+m.Digest.String())
		if err != nil {
			return 0, err
		}
		n += below
	}
	for _, layer := range manifest.Layers {
		n += layer.Size
	}
	return n, nil
}

// Settle waits until a registry has ingested what was pushed, that is, until its
// directory has not grown for a second, and says how large it is.
func Settle(ctx context.Context, root string) (size int64, err error) {
	for still := 0; still < 4; still++ {
		now, err := site.DiskBytes(root)
		if err != nil {
			return 0, err
		}
		if now != size {
			size, still = now, 0
		}
		select {
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		case <-time.After(250 * time.Millisecond):
		}
	}
	return size, nil
}
