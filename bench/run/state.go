package run

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/bench/results"
	"hydrofoil.dev/foil/bench/site"
)

// state is what is on the server's side, kept in the cache from one matrix to the
// next, since pushing, preparing and measuring floors takes longer than many a
// matrix:
//
//	servers/PROGRAM/registry/          the root of foil serve
//	servers/PROGRAM/peers/ENGINE/      what an engine's own server keeps
//	servers/PROGRAM/images/NAME-TAG.json  prepared: what was pushed, as what
//
// PROGRAM is the beginning of the digest of the foil program: another program may
// store otherwise. It is used by one benchmark at a time.
type state struct {
	dir    string
	unlock func()
}

// prepared is one version of an image on the server, and everything about it that
// does not depend on a matrix. Preparations that failed are not in it.
type prepared struct {
	results.Image
	Kernel  string   `json:"kernel"`  // that the floor was measured with
	Touched []string `json:"touched"` // files of which pages were read before ready
}

// stateOf is the state for a foil program, which may not exist yet.
func stateOf(cache, foil string) (state, error) {
	program, err := os.ReadFile(foil)
	if err != nil {
		return state{}, fmt.Errorf("bench: %w", err)
	}
	return state{dir: filepath.Join(cache, "servers", fmt.Sprintf("%x", sha256.Sum256(program))[:16])}, nil
}

// open makes the state if need be, locks it, and removes those of other programs.
func (s *state) open() error {
	for _, dir := range []string{s.registry(), filepath.Join(s.dir, "images"), filepath.Join(s.dir, "peers")} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	}
	unlock, err := site.Lock(s.dir)
	if err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = fmt.Errorf("bench: another benchmark uses %s: wait for its end, or say another --cache", s.dir)
		}
		return err
	}
	s.unlock = unlock
	return site.RemoveUnlocked(filepath.Join(filepath.Dir(s.dir), "*"))
}

func (s state) registry() string { return filepath.Join(s.dir, "registry") }

// peer is where an engine's own server keeps what it has.
func (s state) peer(engine string) string { return filepath.Join(s.dir, "peers", engine) }

func (s state) path(name string) string {
	return filepath.Join(s.dir, "images", strings.ReplaceAll(name, ":", "-")+".json")
}

// image is what is known of an image, if it is on the server with this digest.
func (s state) image(name, digest string) (prepared, bool) {
	var p prepared
	text, err := os.ReadFile(s.path(name))
	if err != nil || json.Unmarshal(text, &p) != nil || p.Digest != digest {
		return prepared{}, false
	}
	return p, true
}

// put notes what is known of an image.
func (s state) put(p prepared) error {
	p.PrepareErr = nil
	text, err := json.MarshalIndent(p, "", "\t")
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	partial := s.path(p.Name) + ".partial"
	if err := os.WriteFile(partial, append(text, '\n'), 0o644); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := os.Rename(partial, s.path(p.Name)); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	return nil
}
