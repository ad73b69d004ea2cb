package images

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	digest "github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

// Builder builds images, and keeps them.
type Builder struct {
	// Cache is a directory on a disk: overlayfs must take it as upper
	// directory, which tmpfs and overlayfs itself do not offer everywhere.
	Cache string
	// Log, if not nil, is told what takes long.
	Log func(string)
}

// Built is an image on disk.
type Built struct {
	Layout   string // an OCI image layout directory that holds this image only
	Tag      string // its name in there
	Manifest v1.Manifest
	Config   v1.Image
	Digest   digest.Digest // of the manifest
	Probe    string        // as declared; empty if unknown
}

// Source is what skopeo calls the image.
func (b *Built) Source() string { return "oci:" + b.Layout + ":" + b.Tag }

// LayerBytes are those of all layers, compressed.
func (b *Built) LayerBytes() (n int64) {
	for _, layer := range b.Manifest.Layers {
		n += layer.Size
	}
	return n
}

func (b *Builder) log(format string, args ...any) {
	if b.Log != nil {
		b.Log(fmt.Sprintf(format, args...))
	}
}

// lock keeps two processes from building into one cache at once.
func (b *Builder) lock() (unlock func(), err error) {
	if err := os.MkdirAll(b.Cache, 0o755); err != nil {
		return nil, fmt.Errorf("images: %w", err)
	}
	file, err := os.OpenFile(filepath.Join(b.Cache, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("images: %w", err)
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX); err != nil {
		file.Close()
		return nil, fmt.Errorf("images: lock %s: %w", file.Name(), err)
	}
	return func() { file.Close() }, nil
}

// Build builds an image of the catalogue that is not in the cache yet.
// It needs root, and on Debian or Ubuntu mmdebstrap.
func (b *Builder) Build(ctx context.Context, c Catalogue, ref string) (*Built, error) {
	image, err := c.Find(ref)
	if err != nil {
		return nil, err
	}
	base, err := c.base(image.Base)
	if err != nil {
		return nil, err
	}
	unlock, err := b.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	layout := filepath.Join(b.Cache, fmt.Sprintf("%s-%s-%s", image.Name, image.Tag, key(base, image)))
	err = b.once(layout, func(dir string) error {
		b.log("building %s", ref)
		tree, err := b.baseTree(ctx, base)
		if err != nil {
			return err
		}
		return b.buildImage(ctx, base, image, tree, dir)
	})
	if err != nil {
		return nil, err
	}
	built, err := Open(layout, image.Tag)
	if err != nil {
		return nil, err
	}
	built.Probe = image.Probe
	return built, nil
}

// Fetch gets an image by skopeo: ref is HOST/REPOSITORY[:TAG] of any registry, or
// anything else that skopeo can copy from, with its transport
// (docker-archive:FILE, oci:DIR:TAG). It is fetched again each time, unless it is
// named by its digest. A registry at a loopback address need not speak TLS.
func (b *Builder) Fetch(ctx context.Context, ref string) (*Built, error) {
	unlock, err := b.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	layout := filepath.Join(b.Cache, "fetched-"+key(ref))
	if !strings.Contains(ref, "@") {
		if err := os.RemoveAll(layout); err != nil {
			return nil, fmt.Errorf("images: %w", err)
		}
	}
	err = b.once(layout, func(dir string) error {
		b.log("fetching %s", ref)
		source, args := skopeoSource(ref)
		args = append([]string{"copy"}, append(args, source, "oci:"+dir+":fetched")...)
		if err := run(exec.CommandContext(ctx, "skopeo", args...)); err != nil {
			return fmt.Errorf("images: fetch %s: %w", ref, err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return Open(layout, "fetched")
}

// skopeoSource is what skopeo calls ref, and the options that it takes for it.
func skopeoSource(ref string) (source string, options []string) {
	// A transport ends with a colon before any slash; so does a host with a
	// port, but no transport has a number after it.
	transport, rest, ok := strings.Cut(ref, ":")
	isPort := rest != "" && rest[0] >= '0' && rest[0] <= '9' && strings.Contains(rest, "/")
	if ok && !strings.ContainsAny(transport, "/.[") && !isPort {
		return ref, nil
	}
	host, _, _ := strings.Cut(ref, "/")
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	if ip := net.ParseIP(host); host == "localhost" || ip != nil && ip.IsLoopback() {
		options = []string{"--src-tls-verify=false"}
	}
	return "docker://" + ref, options
}

// once makes a directory by fill unless it is there; half a one is never there.
func (b *Builder) once(dir string, fill func(dir string) error) error {
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	partial := dir + ".partial"
	defer os.RemoveAll(partial)
	if err := os.RemoveAll(partial); err != nil {
		return fmt.Errorf("images: %w", err)
	}
	if err := fill(partial); err != nil {
		return err
	}
	if err := os.Rename(partial, dir); err != nil {
		return fmt.Errorf("images: %w", err)
	}
	return nil
}

// baseTree is the file tree of a base, for images on top of it.
func (b *Builder) baseTree(ctx context.Context, base Base) (string, error) {
	tree := filepath.Join(b.Cache, fmt.Sprintf("base-%s-%s", base.Name, key(base)))
	err := b.once(tree, func(dir string) error {
		b.log("bootstrapping base %s (%s), which takes a minute", base.Name, strings.Join(base.Pockets, ", "))
		return bootstrap(ctx, base, dir)
	})
	return tree, err
}

func (b *Builder) buildImage(ctx context.Context, base Base, image Image, tree, layout string) error {
	work := layout + ".work"
	defer os.RemoveAll(work)
	if err := os.RemoveAll(work); err != nil {
		return fmt.Errorf("images: %w", err)
	}
	upper := filepath.Join(work, "upper")
	if err := install(ctx, image, tree, upper, work); err != nil {
		return err
	}
	out, err := newLayout(layout)
	if err != nil {
		return err
	}
	config := v1.Image{
		Created:  &image.Created,
		Platform: v1.Platform{Architecture: runtime.GOARCH, OS: "linux"},
		Config: v1.ImageConfig{
			User:       image.User,
			Env:        append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, image.Env...),
			Entrypoint: image.Entrypoint,
			Cmd:        image.Cmd,
			WorkingDir: image.Workdir,
		},
		RootFS: v1.RootFS{Type: "layers"},
	}
	for _, port := range image.Ports {
		if config.Config.ExposedPorts == nil {
			config.Config.ExposedPorts = map[string]struct{}{}
		}
		config.Config.ExposedPorts[port] = struct{}{}
	}
	manifest := v1.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageManifest}
	for _, layer := range []struct {
		root    string
		overlay bool
		created time.Time
		by      string
	}{
		{tree, false, base.Created, "base " + base.Name + ": " + strings.Join(base.Pockets, ", ")},
		{upper, true, image.Created, "install " + strings.Join(image.Packages, " ")},
	} {
		descriptor, diffID, err := out.addLayer(layer.root, layer.overlay, layer.created)
		if err != nil {
			return err
		}
		manifest.Layers = append(manifest.Layers, descriptor)
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, diffID)
		config.History = append(config.History, v1.History{Created: &layer.created, CreatedBy: layer.by})
	}
	if manifest.Config, err = out.addJSON(v1.MediaTypeImageConfig, config); err != nil {
		return err
	}
	descriptor, err := out.addJSON(v1.MediaTypeImageManifest, manifest)
	if err != nil {
		return err
	}
	return out.finish(descriptor, image.Tag)
}

// layout is an OCI image layout directory that is being written.
type layout struct{ dir string }

func newLayout(dir string) (*layout, error) {
	if err := os.MkdirAll(filepath.Join(dir, v1.ImageBlobsDir, "sha256"), 0o755); err != nil {
		return nil, fmt.Errorf("images: %w", err)
	}
	return &layout{dir}, nil
}

func (l *layout) blob(d digest.Digest) string {
	return filepath.Join(l.dir, v1.ImageBlobsDir, d.Algorithm().String(), d.Encoded())
}

func (l *layout) addLayer(root string, overlay bool, created time.Time) (_ v1.Descriptor, _ digest.Digest, err error) {
	file, err := os.Create(filepath.Join(l.dir, "layer"))
	if err != nil {
		return v1.Descriptor{}, "", fmt.Errorf("images: %w", err)
	}
	descriptor, diffID, err := writeLayer(file, root, overlay, created)
	if err := errors.Join(err, file.Close()); err != nil {
		return v1.Descriptor{}, "", err
	}
	if err := os.Rename(file.Name(), l.blob(descriptor.Digest)); err != nil {
		return v1.Descriptor{}, "", fmt.Errorf("images: %w", err)
	}
	return descriptor, diffID, nil
}

func (l *layout) addJSON(mediaType string, value any) (v1.Descriptor, error) {
	text, err := json.Marshal(value)
	if err != nil {
		return v1.Descriptor{}, fmt.Errorf("images: %w", err)
	}
	d := v1.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(text), Size: int64(len(text))}
	if err := os.WriteFile(l.blob(d.Digest), text, 0o644); err != nil {
		return v1.Descriptor{}, fmt.Errorf("images: %w", err)
	}
	return d, nil
}

func (l *layout) finish(manifest v1.Descriptor, tag string) error {
	manifest.Annotations = map[string]string{v1.AnnotationRefName: tag}
	for name, value := range map[string]any{
		v1.ImageIndexFile:  v1.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageIndex, Manifests: []v1.Descriptor{manifest}},
		v1.ImageLayoutFile: v1.ImageLayout{Version: v1.ImageLayoutVersion},
	} {
		text, err := json.Marshal(value)
		if err != nil {
			return fmt.Errorf("images: %w", err)
		}
		if err := os.WriteFile(filepath.Join(l.dir, name), text, 0o644); err != nil {
			return fmt.Errorf("images: %w", err)
		}
	}
	return nil
}

// Open reads an image of a layout directory.
func Open(dir, tag string) (*Built, error) {
	b := &Built{Layout: dir, Tag: tag}
	l := &layout{dir}
	var index v1.Index
	if err := readJSON(filepath.Join(dir, v1.ImageIndexFile), &index); err != nil {
		return nil, err
	}
	for _, descriptor := range index.Manifests {
		if descriptor.Annotations[v1.AnnotationRefName] == tag {
			b.Digest = descriptor.Digest
		}
	}
	if b.Digest == "" {
		return nil, fmt.Errorf("images: %s holds no image called %q", dir, tag)
	}
	if err := readJSON(l.blob(b.Digest), &b.Manifest); err != nil {
		return nil, err
	}
	if err := readJSON(l.blob(b.Manifest.Config.Digest), &b.Config); err != nil {
		return nil, err
	}
	return b, nil
}

func readJSON(path string, value any) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("images: %w", err)
	}
	if err := json.NewDecoder(bytes.NewReader(text)).Decode(value); err != nil {
		return fmt.Errorf("images: %s: %w", path, err)
	}
	return nil
}
