package run

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/results"
	"hydrofoil.dev/foil/bench/site"
)

// state is what is on the server's side, kept in the cache from one matrix to the
// next, since pushing, preparing and measuring floors takes longer than many a
// matrix:
//
//	servers/PROGRAM/registry/             the root of foil serve
//	servers/PROGRAM/images/NAME-TAG.json  results.Image: what was pushed, and who has prepared it
//	made/images/NAME-TAG/floor.json       floor: what the image touches, and its T*
//	made/images/NAME-TAG/tree.erofs       its files, for warm starts
//	made/images/NAME-TAG/ENGINE.json      kept: that an engine has converted the image
//	made/images/NAME-TAG/ENGINE/N/        the images that it has made of it, see engines.Save
//	made/servers/ENGINE/                  what an engine's own server keeps
//
// PROGRAM is the beginning of the digest of the foil program that serves: another program may
// store otherwise, so that it is given everything anew. What was made without it
// is made once, and what an engine has converted is pushed to the next program's
// registry as it is. It is used by one benchmark at a time.
type state struct {
	dir  string // servers/PROGRAM
	made string
}

// floor is the floor of an image, or why there is none.
type floor struct {
	Digest  string        `json:"digest"` // of the image
	Kernel  string        `json:"kernel"` // that it was measured with
	Way     int           `json:"way"`    // floorWay when it was measured
	Floor   engines.Floor `json:"floor"`
	Err     string        `json:"error,omitempty"`
	Touched []string      `json:"touched"` // files of which pages were read before ready
}

// floorWay grows when floors are measured otherwise: earlier ones are measured anew.
// 2: no program enters the namespace before runc, for which T* had 2 ms.
const floorWay = 2

// kept is what an engine has made of an image.
type kept struct {
	Digest string `json:"digest"` // of the image
	engines.Preparation
}

// stateOf is the state for a foil program, which may not exist yet.
func stateOf(cache, foil string) (state, error) {
	program, err := os.ReadFile(foil)
	if err != nil {
		return state{}, fmt.Errorf("bench: %w", err)
	}
	return state{
		dir:  filepath.Join(cache, "servers", fmt.Sprintf("%x", sha256.Sum256(program))[:16]),
		made: filepath.Join(cache, "made"),
	}, nil
}

// open makes the states of the programs that are measured, in one cache, if need be,
// locks them, and removes the registries of other programs.
func open(states ...state) (unlock func(), err error) {
	var locks []func()
	release := func() {
		for _, unlock := range slices.Backward(locks) {
			unlock()
		}
	}
	defer func() {
		if err != nil {
			release()
		}
	}()
	// Of all programs' benchmarks one at a time, since they share what was made.
	made := states[0].made
	locked := []string{made}
	for _, s := range states {
		for _, dir := range []string{s.registry(), filepath.Join(s.dir, "images"), filepath.Join(s.made, "images"), filepath.Join(s.made, "servers")} {
			if err := os.MkdirAll(dir, 0o711); err != nil {
				return nil, fmt.Errorf("bench: %w", err)
			}
		}
		if !slices.Contains(locked, s.dir) {
			locked = append(locked, s.dir)
		}
	}
	for _, dir := range locked {
		one, err := site.Lock(dir)
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = fmt.Errorf("bench: another benchmark uses %s: wait for its end, or say another --cache", filepath.Dir(made))
		}
		if err != nil {
			return nil, err
		}
		locks = append(locks, one)
	}
	return release, site.RemoveUnlocked(filepath.Join(filepath.Dir(states[0].dir), "*"))
}

func (s state) registry() string { return filepath.Join(s.dir, "registry") }

// peer is where an engine's own server keeps what it has.
func (s state) peer(engine string) string { return filepath.Join(s.made, "servers", engine) }

func (s state) path(name string) string {
	return filepath.Join(s.dir, "images", strings.ReplaceAll(name, ":", "-")+".json")
}

// of is what was made of an image.
func (s state) of(name string) string {
	return filepath.Join(s.made, "images", strings.ReplaceAll(name, ":", "-"))
}

// image is what is known of an image, if it is on the server with this digest. Its
// floor is there if it was measured; preparations that failed are not.
func (s state) image(name, digest string) (im results.Image, ok bool) {
	if !read(s.path(name), &im) || im.Digest != digest {
		return results.Image{}, false
	}
	f, _ := s.floor(name, digest)
	im.Floor, im.FloorErr = f.Floor, f.Err
	return im, true
}

// put notes what is known of an image, but for its floor.
func (s state) put(im results.Image) error {
	im.PrepareErr, im.Floor, im.FloorErr = nil, engines.Floor{}, ""
	return write(s.path(im.Name), im)
}

// tree is where the files of an image are kept, for warm starts.
func (s state) tree(name string) string { return filepath.Join(s.of(name), "tree.erofs") }

// floor is that of an image with this digest, if it was measured.
func (s state) floor(name, digest string) (f floor, ok bool) {
	if !read(filepath.Join(s.of(name), "floor.json"), &f) || f.Digest != digest {
		return floor{}, false
	}
	return f, true
}

func (s state) putFloor(name string, f floor) error {
	return write(filepath.Join(s.of(name), "floor.json"), f)
}

// keep keeps what an engine has pushed to the registry when it prepared an image.
func (s state) keep(ctx context.Context, at *site.Site, e engines.Converter, im engines.Image, p engines.Preparation) error {
	dir := filepath.Join(s.of(im.Name), e.Name())
	if err := errors.Join(os.RemoveAll(dir+".json"), os.RemoveAll(dir), os.MkdirAll(dir, 0o755)); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	for i, ref := range e.Converted(im) {
		if err := engines.Save(ctx, at, im, ref, filepath.Join(dir, strconv.Itoa(i))); err != nil {
			return err
		}
	}
	return write(dir+".json", kept{im.Built.Digest.String(), p})
}

// restore pushes what an engine of this version has made of an image before, to a
// registry that lacks it, and reports whether there was anything.
func (s state) restore(ctx context.Context, at *site.Site, e engines.Converter, im engines.Image, version string) (p engines.Preparation, ok bool, err error) {
	p, ok = s.kept(e, im, version)
	if !ok {
		return p, false, nil
	}
	dir := filepath.Join(s.of(im.Name), e.Name())
	for i, ref := range e.Converted(im) {
		if err := engines.Load(ctx, at, filepath.Join(dir, strconv.Itoa(i)), ref); err != nil {
			return p, false, err
		}
	}
	return p, true, nil
}

// kept is what an engine of this version has made of an image before, if it has.
func (s state) kept(e engines.Engine, im engines.Image, version string) (p engines.Preparation, ok bool) {
	var k kept
	ok = read(filepath.Join(s.of(im.Name), e.Name()+".json"), &k) && k.Digest == im.Built.Digest.String() && k.Version == version
	return k.Preparation, ok
}

// read reads a file of JSON, if there is one.
func read(path string, v any) bool {
	text, err := os.ReadFile(path)
	return err == nil && json.Unmarshal(text, v) == nil
}

// write writes a file that is there whole, or not at all.
func write(path string, v any) error {
	text, err := json.MarshalIndent(v, "", "\t")
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	partial := path + ".partial"
	if err := os.WriteFile(partial, append(text, '\n'), 0o644); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := os.Rename(partial, path); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	return nil
}
