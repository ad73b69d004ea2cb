// Package images builds the container images that are measured, without a
// container engine: real software in the OCI image layout, with layers as docker
// build makes them (tar, gzip level 6), one for each step.
//
// images.toml declares them:
//
//   - a snapshot is a distribution at one time: its suite, and the pockets that
//     packages are taken from ("release", "updates", "security", "backports").
//     From where they are fetched is what the host's own apt is set up for;
//   - a base is a stack of layers that several images share. One without from is
//     what debootstrap calls minbase: all packages that are essential or
//     required, and apt. slim leaves out manuals, translations and documents.
//     One with from adds its layers to those of another base;
//   - an image is a base and further layers on it. Each of its versions is built
//     on one snapshot, and gives values to the names that the image's texts use
//     as %{NAME}; %{tag} and %{suite} are always there;
//   - a layer is, in this order: npm packages, fetched as archives for run to
//     unpack ($NPM/NAME.tgz); Debian packages with what they depend on; files;
//     a shell script; Python packages. Any of them may be missing. All happens in
//     a chroot with the host's network, but without its services. What this
//     changes is the layer, deletions included;
//   - hub names images of a public registry, for who can reach one.
//
// The keys user, workdir, env, entrypoint, cmd and ports are those of the OCI
// image config. args replaces cmd when the image is measured: it is the task.
// probe tells when the container is ready, as for `foil run`.
//
// created is the time that a snapshot's images claim; no file in them is younger.
//
// What has been built is kept in the cache directory under names that have a
// digest of the declaration, and is not built again before that changes or the
// cache is removed. So are layers of an image whose building was interrupted,
// and what was downloaded for it. Building anew from the same packages gives the
// same layers, as far as the packages' own scripts do.
package images

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"hydrofoil.dev/foil/internal/worker/probe"
)

//go:embed images.toml
var declared []byte

// builder is part of every cached name: raise it when the same declaration
// would give another image.
const builder = 2

// Catalogue is what images.toml holds.
type Catalogue struct {
	Snapshots []Snapshot
	Bases     []Base
	Images    []Image // every version is one
	Hub       []Hub
}

// Snapshot declares a distribution at one time.
type Snapshot struct {
	Name    string    `toml:"name"`
	Suite   string    `toml:"suite"`
	Pockets []string  `toml:"pockets"`
	Created time.Time `toml:"created"`
}

// Base declares layers that images share.
type Base struct {
	Name   string  `toml:"name"`
	From   string  `toml:"from"` // another base; empty: this one is bootstrapped
	Slim   bool    `toml:"slim"`
	Layers []Layer `toml:"layer"`
}

// Layer declares one layer.
type Layer struct {
	Npm      []string          `toml:"npm"` // NAME@VERSION
	Packages []string          `toml:"packages"`
	Files    map[string]string `toml:"files"` // path to text; mode 0755 if it begins with #!, else 0644
	Run      string            `toml:"run"`
	Pip      []string          `toml:"pip"` // requirements
}

// Image declares one version of an image.
type Image struct {
	Name     string  `toml:"name"`
	Category string  `toml:"category"` // as in HelloBench, table 2
	Base     string  `toml:"base"`
	Layers   []Layer `toml:"layer"`
	// Version is that of the software: text, or dpkg:PACKAGE for what was installed.
	Version    string   `toml:"version_of"`
	User       string   `toml:"user"`
	Workdir    string   `toml:"workdir"`
	Env        []string `toml:"env"`
	Entrypoint []string `toml:"entrypoint"`
	Cmd        []string `toml:"cmd"`
	Ports      []string `toml:"ports"`
	Task       string   `toml:"task"` // what is measured, in words
	Args       []string `toml:"args"` // replaces Cmd when measured, unless nil
	Probe      string   `toml:"probe"`

	Tag      string `toml:"-"`
	Snapshot string `toml:"-"`
}

// Ref is NAME:TAG.
func (i Image) Ref() string { return i.Name + ":" + i.Tag }

// Hub names an image of a public registry, and how it is measured.
type Hub struct {
	Name     string   `toml:"name"` // REPOSITORY:TAG, without a host
	Category string   `toml:"category"`
	Env      []string `toml:"env"`
	Args     []string `toml:"args"`
	Probe    string   `toml:"probe"`
	Local    string   `toml:"local"` // the image here that stands for it, if any
}

// file is images.toml as it is written.
type file struct {
	Snapshots []Snapshot `toml:"snapshot"`
	Bases     []Base     `toml:"base"`
	Images    []struct {
		Image
		Versions []version `toml:"version"`
	} `toml:"image"`
	Hub []Hub `toml:"hub"`
}

type version struct {
	Tag      string            `toml:"tag"`
	Snapshot string            `toml:"snapshot"`
	Values   map[string]string `toml:"values"`
}

// Declared is the catalogue of images.toml.
func Declared() (Catalogue, error) { return Parse(declared) }

// Parse reads a catalogue, in TOML.
func Parse(text []byte) (Catalogue, error) {
	c, err := parse(text)
	if err != nil {
		return Catalogue{}, fmt.Errorf("images: read declarations: %w", err)
	}
	return c, nil
}

func parse(text []byte) (Catalogue, error) {
	var f file
	decoder := toml.NewDecoder(bytes.NewReader(text)).DisallowUnknownFields()
	if err := decoder.Decode(&f); err != nil {
		var strict *toml.StrictMissingError
		if errors.As(err, &strict) {
			return Catalogue{}, errors.New(strict.String())
		}
		return Catalogue{}, err
	}
	c := Catalogue{Snapshots: f.Snapshots, Bases: f.Bases, Hub: f.Hub}
	for _, s := range c.Snapshots {
		if s.Name == "" || s.Suite == "" || len(s.Pockets) == 0 || s.Created.IsZero() {
			return c, fmt.Errorf("snapshot %q lacks a name, a suite, pockets or created", s.Name)
		}
		for _, pocket := range s.Pockets {
			if _, known := pocketSuffix[pocket]; !known {
				return c, fmt.Errorf("snapshot %s: unknown pocket %q", s.Name, pocket)
			}
		}
	}
	for _, base := range c.Bases {
		if err := c.checkBase(base); err != nil {
			return c, fmt.Errorf("base %q: %w", base.Name, err)
		}
	}
	for _, declared := range f.Images {
		if len(declared.Versions) == 0 {
			return c, fmt.Errorf("image %q has no version", declared.Name)
		}
		for _, v := range declared.Versions {
			image, err := declared.resolve(v, c.Snapshots)
			if err == nil {
				err = c.checkImage(image)
			}
			if err != nil {
				return c, fmt.Errorf("image %s:%s: %w", declared.Name, v.Tag, err)
			}
			c.Images = append(c.Images, image)
		}
	}
	for _, hub := range c.Hub {
		if err := c.checkHub(hub); err != nil {
			return c, fmt.Errorf("hub %q: %w", hub.Name, err)
		}
	}
	return c, nil
}

func (c Catalogue) checkBase(base Base) error {
	if base.Name == "" {
		return errors.New("lacks a name")
	}
	if base.From == "" && len(base.Layers) > 0 {
		return errors.New("has layers but no from")
	}
	if base.From != "" && base.Slim {
		return errors.New("slim is for bases without from")
	}
	if err := checkLayers(base.Layers); err != nil {
		return err
	}
	_, err := c.chain(base.Name)
	return err
}

func (c Catalogue) checkImage(image Image) error {
	if !namePattern.MatchString(image.Name) || !namePattern.MatchString(image.Tag) {
		return errors.New("name and tag must be of a-z, 0-9, dot and dash")
	}
	for _, other := range c.Images {
		if other.Ref() == image.Ref() {
			return errors.New("is there twice")
		}
	}
	if _, err := c.chain(image.Base); err != nil {
		return err
	}
	if _, err := probe.Parse(image.Probe); err != nil {
		return err
	}
	return checkLayers(image.Layers)
}

func (c Catalogue) checkHub(hub Hub) error {
	repository, tag, ok := strings.Cut(hub.Name, ":")
	if !ok || repository == "" || tag == "" || strings.Contains(hub.Name, "/") {
		return errors.New("want REPOSITORY:TAG, without a host")
	}
	if hub.Local != "" && !slices.ContainsFunc(c.Images, func(i Image) bool { return i.Name == hub.Local }) {
		return fmt.Errorf("no image is called %q", hub.Local)
	}
	_, err := probe.Parse(hub.Probe)
	return err
}

var namePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]*$`)

func checkLayers(layers []Layer) error {
	for _, layer := range layers {
		if len(layer.Npm)+len(layer.Packages)+len(layer.Files)+len(layer.Pip) == 0 && layer.Run == "" {
			return errors.New("a layer is empty")
		}
		for path := range layer.Files {
			if !strings.HasPrefix(path, "/") || slices.Contains(strings.Split(path, "/"), "..") {
				return fmt.Errorf("file %q: not an absolute path", path)
			}
		}
		for _, spec := range layer.Npm {
			if strings.LastIndex(spec, "@") < 1 {
				return fmt.Errorf("npm package %q: want NAME@VERSION", spec)
			}
		}
	}
	return nil
}

// resolve puts the values of a version into a copy of the image.
func (i Image) resolve(v version, snapshots []Snapshot) (Image, error) {
	i.Tag, i.Snapshot = v.Tag, v.Snapshot
	n := slices.IndexFunc(snapshots, func(s Snapshot) bool { return s.Name == v.Snapshot })
	if n < 0 {
		return i, fmt.Errorf("no snapshot is called %q", v.Snapshot)
	}
	values := map[string]string{"tag": v.Tag, "suite": snapshots[n].Suite}
	for name, value := range v.Values {
		values[name] = value
	}
	var missing error
	text := func(s string) string {
		return placeholder.ReplaceAllStringFunc(s, func(found string) string {
			name := found[2 : len(found)-1]
			value, ok := values[name]
			if !ok {
				missing = fmt.Errorf("nothing gives %s a value", found)
			}
			return value
		})
	}
	texts := func(list []string) (out []string) {
		for _, s := range list {
			out = append(out, text(s))
		}
		return out
	}
	i.Version, i.Workdir, i.Probe, i.Task = text(i.Version), text(i.Workdir), text(i.Probe), text(i.Task)
	i.Env, i.Entrypoint, i.Cmd, i.Args = texts(i.Env), texts(i.Entrypoint), texts(i.Cmd), texts(i.Args)
	layers := i.Layers
	i.Layers = nil
	for _, l := range layers {
		files := map[string]string{}
		for path, content := range l.Files {
			files[text(path)] = text(content)
		}
		i.Layers = append(i.Layers, Layer{texts(l.Npm), texts(l.Packages), files, text(l.Run), texts(l.Pip)})
	}
	return i, missing
}

var placeholder = regexp.MustCompile(`%\{[a-z_]+\}`)

// chain gives the bases that the named one consists of, from the bottom.
func (c Catalogue) chain(name string) ([]Base, error) {
	var chain []Base
	for name != "" {
		n := slices.IndexFunc(c.Bases, func(b Base) bool { return b.Name == name })
		if n < 0 {
			return nil, fmt.Errorf("no base is called %q", name)
		}
		if len(chain) > len(c.Bases) {
			return nil, fmt.Errorf("base %q is built from itself", name)
		}
		chain = append(chain, c.Bases[n])
		name = c.Bases[n].From
	}
	if len(chain) == 0 {
		return nil, errors.New("lacks a base")
	}
	slices.Reverse(chain)
	return chain, nil
}

func (c Catalogue) snapshot(name string) Snapshot {
	for _, s := range c.Snapshots {
		if s.Name == name {
			return s
		}
	}
	panic("images: an image was declared without its snapshot") // Parse has looked
}

// Find gives the image that is called NAME:TAG.
func (c Catalogue) Find(ref string) (Image, error) {
	for _, image := range c.Images {
		if image.Ref() == ref {
			return image, nil
		}
	}
	return Image{}, c.undeclared(ref)
}

// Select gives the images of names, each NAME for all versions or NAME:TAG, in
// the order of the catalogue; without names all of them.
func (c Catalogue) Select(names []string) ([]Image, error) {
	if len(names) == 0 {
		return c.Images, nil
	}
	for _, name := range names {
		if !slices.ContainsFunc(c.Images, func(i Image) bool { return i.Name == name || i.Ref() == name }) {
			return nil, c.undeclared(name)
		}
	}
	var selected []Image
	for _, image := range c.Images {
		if slices.Contains(names, image.Name) || slices.Contains(names, image.Ref()) {
			selected = append(selected, image)
		}
	}
	return selected, nil
}

// SelectHub gives the images of a public registry that have these names,
// REPOSITORY:TAG; without names all of them.
func (c Catalogue) SelectHub(names []string) ([]Hub, error) {
	if len(names) == 0 {
		return c.Hub, nil
	}
	var selected []Hub
	for _, name := range names {
		i := slices.IndexFunc(c.Hub, func(h Hub) bool { return h.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("images: no image of a public registry is declared as %q", name)
		}
		selected = append(selected, c.Hub[i])
	}
	return selected, nil
}

func (c Catalogue) undeclared(ref string) error {
	var names []string
	for _, image := range c.Images {
		names = append(names, image.Ref())
	}
	return fmt.Errorf("images: %q is not declared; there are: %s", ref, strings.Join(names, ", "))
}

// key is a short digest of declarations, for names in the cache.
func key(declarations ...any) string {
	text, err := json.Marshal(append(declarations, builder))
	if err != nil {
		panic(err) // plain data
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:6])
}
