package engines

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	digest "github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/bench/images"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
)

// RegistryAddr is where the cloud's registry listens, see link.Options.
const RegistryAddr = "192.0.2.1:5000"

// Serve starts foil serve in the cloud: the registry that all engines pull from.
// Prefix is a command that runs it, such as taskset.
func Serve(ctx context.Context, s *site.Site, foil, root string, prefix ...string) (*site.Process, error) {
	args := append(prefix, foil, "serve", "--root", root, "--listen", RegistryAddr, "--insecure-open")
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
		// With logins it answers, and lets nobody in.
		return response.StatusCode == http.StatusOK || response.StatusCode == http.StatusUnauthorized
	})
}

// At calls fn with a site in dir that has a link, and a registry that keeps everything below root.
func At(ctx context.Context, dir string, o link.Options, p Programs, root string, fn func(*site.Site) error) (err error) {
	l, err := link.New(context.WithoutCancel(ctx), o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	s := &site.Site{Dir: dir, Link: l}
	server, err := Serve(ctx, s, p.Serves(), root)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop(syscall.SIGTERM)) }()
	return fn(s)
}

// Services builds declared images, NAME:TAG, unless they are in the cache, all of which must be ready by what they answer
// over a network.
func Services(ctx context.Context, cache string, names []string, log func(string)) (all []Image, err error) {
	catalogue, err := images.Declared()
	if err != nil {
		return nil, err
	}
	builder := images.Builder{Cache: filepath.Join(cache, "images"), Log: log}
	for _, name := range names {
		built, err := builder.Build(ctx, catalogue, name)
		if err != nil {
			return nil, err
		}
		ready, err := site.ParseReadiness(built.Probe, strings.HasPrefix(name, "redis:"))
		if err != nil {
			return nil, err
		}
		if !ready.Network() {
			return nil, fmt.Errorf("bench: %s is ready by %s: only services that answer over a network are started here", name, built.Probe)
		}
		all = append(all, Image{Name: name, Ref: RegistryAddr + "/" + name, Built: built, Ready: ready, Command: built.Args})
	}
	return all, nil
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

// ask asks the registry, in the cloud, for a path.
func ask(ctx context.Context, s *site.Site, method, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+RegistryAddr+path, nil)
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	response, err := cloudClient(s).Do(req)
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK && response.StatusCode != http.StatusNoContent {
		err = fmt.Errorf("%s: %s", response.Status, body)
	}
	if err != nil {
		return nil, fmt.Errorf("bench: %s %s: %w", method, path, err)
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

// stored is one manifest of a saved image, by digest.
type stored struct {
	Digest    digest.Digest `json:"digest"`
	MediaType string        `json:"media_type"`
}

// Save copies an image, or an index and what it leads to, from the registry to a
// directory: blobs and manifests as files by digest, and manifests.json, which
// lists the manifests, the topmost last. What the pushed image has is left out.
func Save(ctx context.Context, s *site.Site, im Image, ref, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	host, rest, _ := strings.Cut(ref, "/")
	repository, reference, _ := strings.Cut(rest, ":")
	base := "http://" + host + "/v2/" + repository
	known := map[digest.Digest]bool{im.Built.Manifest.Config.Digest: true}
	for _, layer := range im.Built.Manifest.Layers {
		known[layer.Digest] = true
	}
	var list []stored
	var save func(reference string) error
	save = func(reference string) error {
		body, mediaType, err := exchange(ctx, s, http.MethodGet, base+"/manifests/"+reference, nil, http.StatusOK)
		if err != nil {
			return err
		}
		var manifest struct {
			Config    *v1.Descriptor  `json:"config"`
			Layers    []v1.Descriptor `json:"layers"`
			Manifests []v1.Descriptor `json:"manifests"`
		}
		if err := json.Unmarshal(body, &manifest); err != nil {
			return fmt.Errorf("bench: manifest %s of %s: %w", reference, ref, err)
		}
		for _, below := range manifest.Manifests {
			if err := save(below.Digest.String()); err != nil {
				return err
			}
		}
		if manifest.Config != nil {
			manifest.Layers = append(manifest.Layers, *manifest.Config)
		}
		for _, blob := range manifest.Layers {
			if known[blob.Digest] {
				continue
			}
			known[blob.Digest] = true
			data, _, err := exchange(ctx, s, http.MethodGet, base+"/blobs/"+blob.Digest.String(), nil, http.StatusOK)
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, blob.Digest.Encoded()), data, 0o644)
			}
			if err != nil {
				return err
			}
		}
		d := digest.FromBytes(body)
		list = append(list, stored{d, mediaType})
		return os.WriteFile(filepath.Join(dir, d.Encoded()), body, 0o644)
	}
	if err := save(reference); err != nil {
		return fmt.Errorf("bench: save %s: %w", ref, err)
	}
	text, err := json.Marshal(list)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "manifests.json"), text, 0o644)
	}
	if err != nil {
		return fmt.Errorf("bench: save %s: %w", ref, err)
	}
	return nil
}

// Load pushes what Save has written, to a registry that has the image itself.
func Load(ctx context.Context, s *site.Site, dir, ref string) error {
	host, rest, _ := strings.Cut(ref, "/")
	repository, tag, _ := strings.Cut(rest, ":")
	base := "http://" + host + "/v2/" + repository
	text, err := os.ReadFile(filepath.Join(dir, "manifests.json"))
	if err != nil {
		return fmt.Errorf("bench: load %s: %w", ref, err)
	}
	var list []stored
	if err := json.Unmarshal(text, &list); err != nil || len(list) == 0 {
		return fmt.Errorf("bench: load %s: %s/manifests.json lists no manifest (%w); remove it, and the image is prepared anew", ref, dir, err)
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("bench: load %s: %w", ref, err)
	}
	for _, file := range files {
		if slices.ContainsFunc(list, func(m stored) bool { return m.Digest.Encoded() == file.Name() }) || file.Name() == "manifests.json" {
			continue
		}
		data, err := os.ReadFile(filepath.Join(dir, file.Name()))
		if err == nil {
			_, _, err = exchange(ctx, s, http.MethodPost, base+"/blobs/uploads/?digest="+digest.FromBytes(data).String(), data, http.StatusCreated)
		}
		if err != nil {
			return fmt.Errorf("bench: load %s: %w", ref, err)
		}
	}
	for i, m := range list {
		body, err := os.ReadFile(filepath.Join(dir, m.Digest.Encoded()))
		name := m.Digest.String()
		if i == len(list)-1 {
			name = tag
		}
		if err == nil {
			_, _, err = exchange(ctx, s, http.MethodPut, base+"/manifests/"+name, body, http.StatusCreated, m.MediaType)
		}
		if err != nil {
			return fmt.Errorf("bench: load %s: %w", ref, err)
		}
	}
	return nil
}

// exchange sends one request to the registry, and gives the answer and its type.
func exchange(ctx context.Context, s *site.Site, method, url string, body []byte, status int, mediaType ...string) (answer []byte, answered string, err error) {
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return nil, "", fmt.Errorf("bench: %w", err)
	}
	req.Header.Set("Accept", "*/*")
	req.Header.Set("Content-Type", "application/octet-stream")
	for _, t := range mediaType {
		req.Header.Set("Content-Type", t)
	}
	response, err := cloudClient(s).Do(req)
	if err != nil {
		return nil, "", fmt.Errorf("bench: %w", err)
	}
	defer response.Body.Close()
	answer, err = io.ReadAll(response.Body)
	if err == nil && response.StatusCode != status {
		err = fmt.Errorf("%s: %s", response.Status, answer)
	}
	if err != nil {
		return nil, "", fmt.Errorf("bench: %s %s: %w", method, url, err)
	}
	return answer, response.Header.Get("Content-Type"), nil
}
