package images

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
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

	bootstrap func(ctx context.Context, snapshot Snapshot, slim bool, dir string) error // nil: mmdebstrap's
}

// Built is an image on disk.
type Built struct {
	Layout   string // an OCI image layout directory that holds this image only
	Tag      string // its name in there
	Manifest v1.Manifest
	Config   v1.Image
	Digest   digest.Digest // of the manifest
	Probe    string        // as declared; empty if unknown
	Args     []string      // what replaces the Cmd when it is measured, as declared; nil: nothing
}

// Version is that of the software in the image; empty if unknown.
func (b *Built) Version() string { return b.Config.Config.Labels[v1.AnnotationVersion] }

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
func (b *Builder) lock(ctx context.Context) (unlock func(), err error) {
	if err := os.MkdirAll(b.Cache, 0o755); err != nil {
		return nil, fmt.Errorf("images: %w", err)
	}
	file, err := os.OpenFile(filepath.Join(b.Cache, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("images: %w", err)
	}
	for told := false; ; told = true {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { file.Close() }, nil
		}
		if errors.Is(err, unix.EWOULDBLOCK) {
			if !told {
				b.log("another process builds in %s: waiting", b.Cache)
			}
			select {
			case <-time.After(200 * time.Millisecond):
				continue
			case <-ctx.Done():
				err = context.Cause(ctx)
			}
		}
		file.Close()
		return nil, fmt.Errorf("images: lock %s: %w", file.Name(), err)
	}
}

// Build builds an image of the catalogue that is not in the cache yet.
// It needs root, and on Debian or Ubuntu mmdebstrap (and npm for some images).
func (b *Builder) Build(ctx context.Context, c Catalogue, ref string) (*Built, error) {
	image, err := c.Find(ref)
	if err != nil {
		return nil, err
	}
	built, err := b.open(c, image)
	if built != nil || err != nil {
		return built, err
	}
	unlock, err := b.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	err = b.once(b.layout(c, image), func(dir string) error {
		b.log("%s: building", ref)
		start := time.Now()
		err := b.buildImage(ctx, c, image, dir)
		b.log("%s: took %v", ref, time.Since(start).Round(time.Second))
		return err
	})
	if err != nil {
		return nil, err
	}
	return b.open(c, image)
}

// Cached gives an image of the catalogue if it has been built; else nil.
func (b *Builder) Cached(c Catalogue, ref string) (*Built, error) {
	image, err := c.Find(ref)
	if err != nil {
		return nil, err
	}
	return b.open(c, image)
}

// layout is where an image is when it has been built.
func (b *Builder) layout(c Catalogue, image Image) string {
	chain, _ := c.chain(image.Base) // Parse has looked
	return filepath.Join(b.Cache, fmt.Sprintf("%s-%s-%s", image.Name, image.Tag,
		key(c.snapshot(image.Snapshot), chain, image)))
}

// open gives nil for an image that is not there.
func (b *Builder) open(c Catalogue, image Image) (*Built, error) {
	layout := b.layout(c, image)
	if !exists(layout) {
		return nil, nil
	}
	built, err := Open(layout, image.Tag)
	if err != nil {
		return nil, err
	}
	built.Probe, built.Args = image.Probe, image.Args
	return built, nil
}

// Fetch gets an image by skopeo: ref is HOST/REPOSITORY[:TAG] of any registry, or
// anything else that skopeo can copy from, with its transport
// (docker-archive:FILE, oci:DIR:TAG). It is fetched again each time, unless it is
// named by its digest. A registry at a loopback address need not speak TLS.
func (b *Builder) Fetch(ctx context.Context, ref string) (*Built, error) {
	unlock, err := b.lock(ctx)
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

// made is a layer that has been made.
type made struct {
	Tree       string        `json:"-"` // what it holds, on top of the layers below
	Blob       string        `json:"-"` // compressed
	Descriptor v1.Descriptor `json:"descriptor"`
	DiffID     digest.Digest `json:"diffID"`
	History    v1.History    `json:"history"`
}

// base makes the layers of a base, each of which stays in the cache, as a tree to
// build on and as a blob.
func (b *Builder) base(ctx context.Context, snapshot Snapshot, chain []Base) (stack []made, err error) {
	fill := b.bootstrap
	if fill == nil {
		fill = bootstrap
	}
	for i, base := range chain {
		name := base.Name + " of " + snapshot.Name
		dir := b.baseDir(snapshot, chain[:i+1])
		if base.From == "" {
			layer, err := b.layer(filepath.Join(dir, "0"), false, snapshot.Created, func(tree string) (string, error) {
				b.log("base %s: bootstrapping %s (%s)", name, snapshot.Suite, strings.Join(snapshot.Pockets, ", "))
				by := fmt.Sprintf("bootstrap %s (%s)", snapshot.Suite, strings.Join(snapshot.Pockets, ", "))
				return by, fill(ctx, snapshot, base.Slim, tree)
			})
			if err != nil {
				return nil, err
			}
			stack = append(stack, layer)
		}
		place := func(i int) string { return filepath.Join(dir, fmt.Sprint(i)) }
		if stack, err = b.layers(ctx, place, "base "+name, snapshot, stack, base.Layers); err != nil {
			return nil, err
		}
	}
	return stack, nil
}

// layers adds layers to a stack. The i-th is made at place(i), and found there when
// an earlier run has made it.
func (b *Builder) layers(ctx context.Context, place func(i int) string, name string, snapshot Snapshot, stack []made, layers []Layer) ([]made, error) {
	for i, layer := range layers {
		made, err := b.layer(place(i), true, snapshot.Created, func(tree string) (string, error) {
			b.log("%s: layer %d of %d: %s", name, i+1, len(layers), layer.summary())
			s := step{layer: layer, upper: tree, work: tree + ".step",
				fetched: filepath.Join(b.Cache, "downloads"), created: snapshot.Created}
			for _, lower := range stack {
				s.lowers = append(s.lowers, lower.Tree)
			}
			if err := s.make(ctx); err != nil {
				return "", fmt.Errorf("images: %s: layer %d (%s): %w", name, i+1, layer.summary(), err)
			}
			return layer.summary(), nil
		})
		if err != nil {
			return nil, err
		}
		stack = append(stack, made)
	}
	return stack, nil
}

// summary is one line for logs and for the image's history.
func (l Layer) summary() string {
	var parts []string
	if len(l.Npm) > 0 {
		parts = append(parts, "npm pack "+strings.Join(l.Npm, " "))
	}
	if len(l.Packages) > 0 {
		parts = append(parts, "apt-get install "+strings.Join(l.Packages, " "))
	}
	if len(l.Files) > 0 {
		parts = append(parts, "copy "+strings.Join(slices.Sorted(maps.Keys(l.Files)), " "))
	}
	if l.Run != "" {
		parts = append(parts, "run "+strings.Join(strings.Fields(l.Run), " "))
	}
	if len(l.Pip) > 0 {
		parts = append(parts, "pip install "+strings.Join(l.Pip, " "))
	}
	line := strings.Join(parts, "; ")
	if len(line) > 160 {
		line = line[:157] + "..."
	}
	return line
}

// Prune removes images and bases from the cache that the catalogue does not declare
// (any more), and says what it removed. Downloads and fetched images stay.
func (b *Builder) Prune(ctx context.Context, c Catalogue) (removed []string, err error) {
	unlock, err := b.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	keep := map[string]bool{"lock": true, "downloads": true}
	for _, image := range c.Images {
		keep[filepath.Base(b.layout(c, image))] = true
		keep[image.Name+"-"+image.Tag+".work"] = true
		chain, err := c.chain(image.Base)
		if err != nil {
			return nil, err
		}
		for i := range chain {
			keep[filepath.Base(b.baseDir(c.snapshot(image.Snapshot), chain[:i+1]))] = true
		}
	}
	entries, err := os.ReadDir(b.Cache)
	if err != nil {
		return nil, fmt.Errorf("images: %w", err)
	}
	for _, entry := range entries {
		name := entry.Name()
		// Verify makes its directory without the lock.
		if keep[name] || strings.HasPrefix(name, "fetched-") || strings.HasPrefix(name, "verify-") {
			continue
		}
		if err := os.RemoveAll(filepath.Join(b.Cache, name)); err != nil {
			return removed, fmt.Errorf("images: %w", err)
		}
		removed = append(removed, name)
	}
	return removed, nil
}

// baseDir is where the layers of the last base of a chain are.
func (b *Builder) baseDir(snapshot Snapshot, chain []Base) string {
	return filepath.Join(b.Cache, fmt.Sprintf("base-%s-%s-%s", chain[len(chain)-1].Name, snapshot.Name, key(snapshot, chain)))
}

// layer makes a layer: its tree at path, by fill, which finds nothing there and says
// how it was made; its blob and its JSON file beside it. The latter is written last:
// without it there is no layer. overlay is as in writeLayer.
func (b *Builder) layer(path string, overlay bool, created time.Time, fill func(tree string) (by string, err error)) (made, error) {
	m := made{Tree: path, Blob: path + ".tar.gz"}
	if exists(path + ".json") {
		return m, readJSON(path+".json", &m)
	}
	if err := errors.Join(os.RemoveAll(m.Tree), os.MkdirAll(filepath.Dir(path), 0o755)); err != nil {
		return m, fmt.Errorf("images: %w", err)
	}
	by, err := fill(m.Tree)
	if err != nil {
		return m, err
	}
	file, err := os.Create(m.Blob)
	if err != nil {
		return m, fmt.Errorf("images: %w", err)
	}
	m.Descriptor, m.DiffID, err = writeLayer(file, m.Tree, overlay, created)
	if err := errors.Join(err, file.Close()); err != nil {
		return m, err
	}
	m.History = v1.History{Created: &created, CreatedBy: by}
	return m, writeJSON(path+".json", m)
}

func (b *Builder) buildImage(ctx context.Context, c Catalogue, image Image, dir string) error {
	chain, err := c.chain(image.Base)
	if err != nil {
		return err
	}
	snapshot := c.snapshot(image.Snapshot)
	stack, err := b.base(ctx, snapshot, chain)
	if err != nil {
		return err
	}
	// Layers that are done stay for the next try when this one fails, and are
	// still good for it when only later ones are declared otherwise then.
	work := filepath.Join(b.Cache, image.Name+"-"+image.Tag+".work")
	place := func(i int) string {
		return filepath.Join(work, fmt.Sprintf("%d-%s", i+1, key(snapshot, chain, image.Layers[:i+1])))
	}
	if stack, err = b.layers(ctx, place, image.Ref(), snapshot, stack, image.Layers); err != nil {
		return err
	}
	out, err := newLayout(dir)
	if err != nil {
		return err
	}
	version, err := softwareVersion(image, stack)
	if err != nil {
		return err
	}
	config := image.config(snapshot, version)
	manifest := v1.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageManifest}
	for _, layer := range stack {
		// A link: nothing changes a blob.
		if err := os.Link(layer.Blob, out.blob(layer.Descriptor.Digest)); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("images: %w", err)
		}
		manifest.Layers = append(manifest.Layers, layer.Descriptor)
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, layer.DiffID)
		config.History = append(config.History, layer.History)
	}
	if manifest.Config, err = out.addJSON(v1.MediaTypeImageConfig, config); err != nil {
		return err
	}
	descriptor, err := out.addJSON(v1.MediaTypeImageManifest, manifest)
	if err != nil {
		return err
	}
	if err := out.finish(descriptor, image.Tag); err != nil {
		return err
	}
	if err := os.RemoveAll(work); err != nil {
		return fmt.Errorf("images: %w", err)
	}
	return nil
}

// config is the image's, without what depends on its layers.
func (i Image) config(snapshot Snapshot, version string) v1.Image {
	config := v1.Image{
		Created:  &snapshot.Created,
		Platform: v1.Platform{Architecture: runtime.GOARCH, OS: "linux"},
		Config: v1.ImageConfig{
			User:       i.User,
			Env:        i.Env,
			Entrypoint: i.Entrypoint,
			Cmd:        i.Cmd,
			WorkingDir: i.Workdir,
			Labels:     map[string]string{v1.AnnotationTitle: i.Name, v1.AnnotationVersion: version},
		},
		RootFS: v1.RootFS{Type: "layers"},
	}
	if !slices.ContainsFunc(i.Env, func(entry string) bool { return strings.HasPrefix(entry, "PATH=") }) {
		config.Config.Env = append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, i.Env...)
	}
	for _, port := range i.Ports {
		if config.Config.ExposedPorts == nil {
			config.Config.ExposedPorts = map[string]struct{}{}
		}
		config.Config.ExposedPorts[port] = struct{}{}
	}
	return config
}

// softwareVersion is what the image's software calls its version.
func softwareVersion(image Image, stack []made) (string, error) {
	name, ok := strings.CutPrefix(image.Version, "dpkg:")
	if !ok {
		return image.Version, nil
	}
	for _, layer := range slices.Backward(stack) {
		status, err := os.ReadFile(filepath.Join(layer.Tree, "var/lib/dpkg/status"))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("images: %w", err)
		}
		return packageVersion(string(status), name)
	}
	return "", fmt.Errorf("images: %s: no layer has a dpkg status", image.Ref())
}

// packageVersion finds a package in a dpkg status file.
func packageVersion(status, name string) (string, error) {
	for _, paragraph := range strings.Split(status, "\n\n") {
		found, version := false, ""
		for line := range strings.Lines(paragraph) {
			key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
			switch key {
			case "Package":
				found = value == name
			case "Version":
				version = value
			}
		}
		if found {
			return version, nil
		}
	}
	return "", fmt.Errorf("images: the package %s was not installed", name)
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
		if err := writeJSON(filepath.Join(l.dir, name), value); err != nil {
			return err
		}
	}
	return nil
}

func writeJSON(path string, value any) error {
	text, err := json.Marshal(value)
	if err == nil {
		err = os.WriteFile(path, text, 0o644)
	}
	if err != nil {
		return fmt.Errorf("images: %w", err)
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
