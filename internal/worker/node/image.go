package node

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/worker/api"
)

// image is what the worker remembers of one reference: a file
// images/<hex of the reference's SHA-256>.json.
type image struct {
	Version  int           `json:"version"`
	Ref      string        `json:"ref"` // canonical
	Platform string        `json:"platform,omitempty"`
	Plain    bool          `json:"plain_http,omitempty"`
	Digest   digest.Digest `json:"digest"` // of the manifest
	Manifest []byte        `json:"manifest"`
	Config   []byte        `json:"config"`
	ChainID  digest.Digest `json:"chain_id"`
	Created  time.Time     `json:"created"`
	// Entrypoint, Args and NoStartup are those of the pull that brings it, so that
	// a new daemon asks for the same startup set. Records of before they were noted
	// have none: the image's own service.
	Entrypoint []string `json:"entrypoint,omitzero"`
	Args       []string `json:"args,omitzero"`
	NoStartup  bool     `json:"no_startup,omitempty"`
	// Why is the last failure of its pull; empty while it is well.
	Why string `json:"-"`
	// used is when it was used last: the record's time of change on the disk.
	// Guarded by Node.mu.
	used time.Time
}

const imageVersion = 1

func (n *Node) imagePath(ref string) string {
	h := sha256.Sum256([]byte(ref))
	return filepath.Join(n.opts.Root, "images", hex.EncodeToString(h[:])+".json")
}

// stageImage brings an image's record to the disk, but not to its place.
func (n *Node) stageImage(img *image) (staged, error) {
	b, err := json.Marshal(img)
	if err != nil {
		return staged{}, err
	}
	return stage(n.imagePath(img.Ref), b)
}

// loadImages reads every image record. One that cannot be read harms only
// itself: it is reported and set aside.
func (n *Node) loadImages() (map[string]*image, error) {
	dir := filepath.Join(n.opts.Root, "images")
	names, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	images := make(map[string]*image)
	for _, e := range names {
		path := filepath.Join(dir, e.Name())
		if strings.HasPrefix(e.Name(), ".tmp-") {
			_ = os.Remove(path)
			continue
		}
		if !strings.HasSuffix(e.Name(), ".json") {
			continue
		}
		img, err := loadImage(path)
		if err == nil && n.imagePath(img.Ref) != path {
			err = fmt.Errorf("it is the record of %s", img.Ref)
		}
		if newer := (*newerError)(nil); errors.As(err, &newer) {
			return nil, errorf(api.CodeUnsupported, "%w", err)
		}
		if err != nil {
			n.Warn("image record %s cannot be used (%v); it was set aside as %s.bad: pull the image again", path, err, e.Name())
			_ = os.Rename(path, path+".bad")
			continue
		}
		images[img.Ref] = img
	}
	return images, nil
}

func loadImage(path string) (*image, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	img := new(image)
	if err := json.Unmarshal(b, img); err != nil {
		return nil, err
	}
	if fi, err := os.Stat(path); err == nil {
		img.used = fi.ModTime()
	}
	if err := checkVersion(path, img.Version, imageVersion); err != nil {
		return nil, err
	}
	return img, errors.Join(img.Digest.Validate(), img.ChainID.Validate())
}
