// Package records writes the small files in which the daemon keeps what it must
// know after a crash, and tells old versions of them from newer ones.
package records

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"hydrofoil.dev/foil/internal/durable"
)

// Replace makes path hold data, or what it held before, whenever the daemon is
// killed. A power cut may leave an empty file, until the file and its directory
// are synced.
func Replace(path string, data []byte) error {
	f, err := stage(path, data)
	if err != nil {
		return err
	}
	return f.Put()
}

// Staged is a file that is on the disk under a name of its own, until Put gives
// it its place, or Drop removes it.
type Staged struct{ path, tmp string }

// Prefix is how names of staged files begin. After a crash they are leftovers.
const Prefix = ".tmp-"

// Stage writes data, durably, beside path.
func Stage(path string, data []byte) (Staged, error) {
	s, err := stage(path, data)
	if err != nil {
		return s, err
	}
	if err := durable.Sync(s.tmp); err != nil {
		s.Drop()
		return s, err
	}
	return s, nil
}

func stage(path string, data []byte) (s Staged, err error) {
	f, err := os.CreateTemp(filepath.Dir(path), Prefix+"*")
	if err != nil {
		return s, err
	}
	s = Staged{path, f.Name()}
	_, err = f.Write(data)
	if err := errors.Join(err, f.Close()); err != nil {
		s.Drop()
		return s, fmt.Errorf("write %s: %w", path, err)
	}
	return s, nil
}

// Path is where Put puts the file.
func (s Staged) Path() string { return s.path }

// Put gives the file its place.
func (s Staged) Put() error {
	err := os.Rename(s.tmp, s.path)
	if err != nil {
		s.Drop()
	}
	return err
}

// Drop removes the file.
func (s Staged) Drop() { _ = os.Remove(s.tmp) }

// Sum returns the SHA-256 of a file, in hex.
func Sum(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("read %s: %w", path, err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// NewerError says that an earlier daemon of this root was a newer foil. Nothing
// of it is touched.
type NewerError struct {
	path           string
	version, reads int
}

func (e *NewerError) Error() string {
	return fmt.Sprintf("%s was written by a newer foil (version %d, this one reads up to %d): start that foil again, or give this one another --root and pull the images there", e.path, e.version, e.reads)
}

// CheckVersion fails unless a record of a version can be read here: with a
// *NewerError if a newer foil wrote it. Records of older versions are brought up
// to date by who reads them.
func CheckVersion(path string, version, reads int) error {
	switch {
	case version > reads:
		return &NewerError{path, version, reads}
	case version < 1:
		return fmt.Errorf("version %d, this foil reads 1 to %d", version, reads)
	}
	return nil
}
