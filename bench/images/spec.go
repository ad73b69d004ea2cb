// Package images builds the container images that are measured, from Debian
// packages and without a container engine: real ones, in the OCI image layout,
// with layers as docker build makes them (tar, gzip level 6).
//
// images.toml declares them:
//
//   - a base is what debootstrap calls minbase: all packages that are essential
//     or required, and apt, without manuals, translations and documents (as in
//     the slim images). Its pockets are the parts of the distribution that it is
//     made of: "release", "updates", "security". Which distribution, and where it
//     is fetched from, is what the host's own apt is set up for;
//   - an image is a base and a second layer on it: packages with what they
//     depend on, installed by apt and configured in a chroot, and files. What
//     this changes is the layer, deletions included. The other keys are those of
//     the OCI image config; probe is that of `foil run`, for the benchmarks.
//
// created is the time that the image claims; no file is younger.
//
// An image that has been built is kept in the cache directory under a name that
// has a digest of its declaration, and is not built again before that changes
// or the cache is removed. Building it anew from the same packages gives the
// same digests.
package images

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
)

//go:embed images.toml
var declared []byte

// builder is part of every cached name: raise it when the same declaration
// would give another image.
const builder = 1

// Catalogue is what images.toml holds.
type Catalogue struct {
	Bases  []Base  `toml:"base"`
	Images []Image `toml:"image"`
}

// Base declares a base layer.
type Base struct {
	Name    string    `toml:"name"`
	Pockets []string  `toml:"pockets"`
	Created time.Time `toml:"created"`
}

// Image declares an image.
type Image struct {
	Name       string            `toml:"name"`
	Tag        string            `toml:"tag"`
	Base       string            `toml:"base"`
	Created    time.Time         `toml:"created"`
	Packages   []string          `toml:"packages"`
	Files      map[string]string `toml:"files"` // path to text, mode 0644
	User       string            `toml:"user"`
	Workdir    string            `toml:"workdir"`
	Env        []string          `toml:"env"`
	Entrypoint []string          `toml:"entrypoint"`
	Cmd        []string          `toml:"cmd"`
	Ports      []string          `toml:"ports"`
	Probe      string            `toml:"probe"`
}

// Declared is the catalogue of images.toml.
func Declared() (Catalogue, error) { return parse(declared) }

func parse(text []byte) (Catalogue, error) {
	var c Catalogue
	decoder := toml.NewDecoder(bytes.NewReader(text)).DisallowUnknownFields()
	if err := decoder.Decode(&c); err != nil {
		return c, fmt.Errorf("images: read declarations: %w", err)
	}
	for _, base := range c.Bases {
		for _, pocket := range base.Pockets {
			if _, known := pocketSuffix[pocket]; !known {
				return c, fmt.Errorf("images: base %s: unknown pocket %q", base.Name, pocket)
			}
		}
		if base.Name == "" || len(base.Pockets) == 0 || base.Created.IsZero() {
			return c, fmt.Errorf("images: base %q lacks a name, pockets or created", base.Name)
		}
	}
	seen := map[string]bool{}
	for _, image := range c.Images {
		ref := image.Name + ":" + image.Tag
		if image.Name == "" || image.Tag == "" || image.Created.IsZero() || seen[ref] {
			return c, fmt.Errorf("images: %q lacks a name, a tag or created, or is there twice", ref)
		}
		seen[ref] = true
		if _, err := c.base(image.Base); err != nil {
			return c, fmt.Errorf("images: %s: %w", ref, err)
		}
		for path := range image.Files {
			if !strings.HasPrefix(path, "/") || slices.Contains(strings.Split(path, "/"), "..") {
				return c, fmt.Errorf("images: %s: file %q: not an absolute path", ref, path)
			}
		}
	}
	return c, nil
}

func (c Catalogue) base(name string) (Base, error) {
	for _, base := range c.Bases {
		if base.Name == name {
			return base, nil
		}
	}
	return Base{}, fmt.Errorf("no base is called %q", name)
}

// Find gives the image that is called NAME:TAG.
func (c Catalogue) Find(ref string) (Image, error) {
	var names []string
	for _, image := range c.Images {
		if image.Name+":"+image.Tag == ref {
			return image, nil
		}
		names = append(names, image.Name+":"+image.Tag)
	}
	return Image{}, fmt.Errorf("images: %q is not declared; there are: %s", ref, strings.Join(names, ", "))
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
