// Package origin says which registries are walls to each other, names rootfs so that two origins never
// mean one, and says what has to be known of an origin's images before they start.
//
// An origin is the registry that an image's name has. A mirror, an accelerator, an entry of hosts.toml is the
// registry that it stands for. What came for an image of one origin is never used for another one's, unless an
// administrator put the two into one group.
package origin

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
)

// Key names one rootfs on a worker, in hex as a digest: the SHA-256 of its origin, chain ID and the digest of its TOC.
// Versions that knew no origins named a rootfs by its chain ID: that is the key of those that they left.
type Key digest.Digest

// KeyOf is the key of what came for an image of a registry.
func KeyOf(registry string, chain, toc digest.Digest) Key {
	h := sha256.Sum256([]byte(registry + "\n" + chain.String() + "\n" + toc.String()))
	return Key(digest.NewDigestFromBytes(digest.SHA256, h[:]))
}

// KeyOfName is the key whose Encoded is a name.
func KeyOfName(name string) Key { return Key(digest.NewDigestFromEncoded(digest.SHA256, name)) }

// Encoded is the key in hex, 64 digits.
func (k Key) Encoded() string { return digest.Digest(k).Encoded() }

// Validate returns an error unless k is a key.
func (k Key) Validate() error {
	if _, err := hex.DecodeString(strings.TrimPrefix(string(k), "sha256:")); err != nil || len(k) != len("sha256:")+64 {
		return fmt.Errorf("%q names no rootfs", string(k))
	}
	return nil
}

// Of is the origin of an image by its name, in the normal form of package api.
func Of(name string) string {
	named, err := reference.ParseNamed(name)
	if err != nil {
		return ""
	}
	return reference.Domain(named)
}

// Groups are registries that an administrator has trust each other. The zero value has none.
type Groups struct{ group map[string]int }

// ParseGroups reads groups: each is a list of registries, HOST[:PORT], separated by spaces.
func ParseGroups(list []string) (Groups, error) {
	g := Groups{group: make(map[string]int)}
	for i, group := range list {
		names := strings.Fields(group)
		if len(names) < 2 {
			return Groups{}, fmt.Errorf("group %q: name at least two registries, with a space between them", group)
		}
		for _, name := range names {
			if strings.Contains(name, "/") || Of(name+"/some/image") != name {
				return Groups{}, fmt.Errorf("group %q: %q is no registry: write HOST or HOST:PORT, as image names have it", group, name)
			}
			if _, twice := g.group[name]; twice {
				return Groups{}, fmt.Errorf("registry %s is named twice: write one group of all that trust each other", name)
			}
			g.group[name] = i
		}
	}
	return g, nil
}

// Same reports whether what came for a's images may be used for b's. An origin that is not known, "", is no
// one's.
func (g Groups) Same(a, b string) bool {
	if a == "" || b == "" {
		return false
	}
	if a == b {
		return true
	}
	x, ok := g.group[a]
	y, too := g.group[b]
	return ok && too && x == y
}

// Walls counts the origins among some registries: those of one group are one.
func (g Groups) Walls(registries []string) int {
	var each []string
	for _, r := range registries {
		known := false
		for _, other := range each {
			known = known || g.Same(r, other)
		}
		if !known {
			each = append(each, r)
		}
	}
	return len(each)
}
