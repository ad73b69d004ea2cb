package stores

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/rootdir"
)

// Other is a store besides the root's. Its methods are safe for concurrent use.
type Other struct {
	Dir string // absolute
	id  string

	mu    sync.Mutex
	store objects.Store // guarded by mu; nil: it is away
	err   error         // guarded by mu: why
}

// NewOther returns a store that is always here, for tests.
func NewOther(name string, store objects.Store) *Other { return &Other{Dir: name, store: store} }

// Store returns its objects; nil: it is away.
func (o *Other) Store() objects.Store {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.store
}

// Err says why it is away; nil: it is not.
func (o *Other) Err() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err
}

// Look looks whether it is here. It reports whether that has changed.
func (o *Other) Look() (changed bool) {
	if o.id == "" {
		return false
	}
	err := checkMarker(o.Dir, o.id)
	o.mu.Lock()
	was := o.store
	o.mu.Unlock()
	store := was
	if err != nil {
		store = nil
	} else if was == nil {
		var dir *objects.Dir
		if dir, err = objects.OpenDir(filepath.Join(o.Dir, "objects")); err == nil {
			store = dir
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.store, o.err = store, err
	return (was == nil) != (store == nil)
}

// marker is the file store.json of a store, and record that of the root.
type marker struct {
	Store string `json:"store"` // a random name
}

type record struct {
	Stores []recorded `json:"stores"`
}

type recorded struct {
	Dir   string `json:"dir"`
	Store string `json:"store"`
}

const fileName = "store.json"

func recordFile(root string) string { return filepath.Join(root, "stores.json") }

// checkMarker says why a directory is not the store id.
func checkMarker(dir, id string) error {
	b, err := os.ReadFile(filepath.Join(dir, fileName))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("store %s is away: it has no file %s: mount its disk; if that is lost, mount an empty one, and foil server stores renew makes it the store", dir, fileName)
	}
	var m marker
	if err == nil {
		err = json.Unmarshal(b, &m)
	}
	if err != nil {
		return fmt.Errorf("store %s is away: %w", dir, err)
	}
	if m.Store != id {
		return fmt.Errorf("store %s is away: what is there is another server's, or that of another disk", dir)
	}
	return nil
}

func mark(dir, id string) error {
	b, err := json.Marshal(marker{id})
	if err != nil {
		return err
	}
	return durable.Replace(filepath.Join(dir, fileName), append(b, '\n'))
}

func readRecord(root string) (r record, err error) {
	b, err := os.ReadFile(recordFile(root))
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	if err != nil {
		return r, fmt.Errorf("read which stores the root has: %w", err)
	}
	return r, nil
}

func writeRecord(root string, r record) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return durable.Replace(recordFile(root), append(b, '\n'))
}

// empty reports whether nobody has put anything into a directory.
func empty(dir string) (bool, error) {
	list, err := os.ReadDir(dir)
	if err != nil {
		return false, err
	}
	return !slices.ContainsFunc(list, func(e fs.DirEntry) bool { return e.Name() != "lost+found" }), nil
}

// Open opens the stores of a root that somebody has locked, and makes dirs its others, in this order: those that are new must be
// empty, or not there. What is no longer among them is forgotten, and left as it is. A store that is away is no error.
func Open(root string, dirs []string) (*Set, error) {
	was, err := readRecord(root)
	if err != nil {
		return nil, err
	}
	var now record
	for _, dir := range dirs {
		r, err := admit(root, dir, was, now)
		if err != nil {
			return nil, fmt.Errorf("store %s: %w", dir, err)
		}
		now.Stores = append(now.Stores, r)
	}
	if !slices.Equal(was.Stores, now.Stores) {
		if err := writeRecord(root, now); err != nil {
			return nil, err
		}
	}
	return open(root, now)
}

// admit makes a directory a store.
func admit(root, dir string, was, now record) (r recorded, err error) {
	if dir, err = filepath.Abs(dir); err != nil {
		return r, err
	}
	top, err := filepath.Abs(root)
	if err != nil {
		return r, err
	}
	of := func(d string) func(recorded) bool { return func(r recorded) bool { return r.Dir == d } }
	switch {
	case slices.ContainsFunc(now.Stores, of(dir)):
		return r, errors.New("it is named twice")
	case dir == top || strings.HasPrefix(dir, top+"/") || strings.HasPrefix(top, dir+"/"):
		return r, errors.New("it must lie neither in the root nor around it")
	}
	if i := slices.IndexFunc(was.Stores, of(dir)); i >= 0 {
		return was.Stores[i], nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return r, err
	}
	if none, err := empty(dir); err != nil || !none {
		return r, errors.Join(err, errors.New("a new store must be empty: there is something in it"))
	}
	r = recorded{Dir: dir, Store: objects.Random()}
	return r, mark(dir, r.Store)
}

// Recorded opens the stores that a root has.
func Recorded(root string) (*Set, error) {
	r, err := readRecord(root)
	if err != nil {
		return nil, err
	}
	return open(root, r)
}

func open(root string, r record) (*Set, error) {
	dir, err := objects.OpenDir(rootdir.Objects(root))
	if err != nil {
		return nil, err
	}
	s := New(dir)
	for _, v := range r.Stores {
		o := &Other{Dir: v.Dir, id: v.Store}
		o.Look()
		s.others = append(s.others, o)
	}
	return s, nil
}

// View returns the stores that a root has for reading, also while a server uses them; those that are away are left out.
func View(root string) (*Set, error) {
	r, err := readRecord(root)
	if err != nil {
		return nil, err
	}
	dir, err := objects.ViewDir(rootdir.Objects(root))
	if err != nil {
		return nil, err
	}
	s := New(dir)
	for _, v := range r.Stores {
		if checkMarker(v.Dir, v.Store) != nil {
			continue
		}
		store, err := objects.ViewDir(filepath.Join(v.Dir, "objects"))
		if err != nil {
			return nil, err
		}
		s.others = append(s.others, NewOther(v.Dir, store))
	}
	return s, nil
}

// Renew makes an empty directory the store that was there before it: that of a new disk. A server that runs sees it, and fills it.
func Renew(root, dir string) error {
	fail := func(err error) error { return fmt.Errorf("renew store %s: %w", dir, err) }
	r, err := readRecord(root)
	if err != nil {
		return fail(err)
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return fail(err)
	}
	i := slices.IndexFunc(r.Stores, func(r recorded) bool { return r.Dir == abs })
	if i < 0 {
		return fail(fmt.Errorf("%s has no such store: foil serve --store adds one", root))
	}
	if checkMarker(abs, r.Stores[i].Store) == nil {
		return nil
	}
	none, err := empty(abs)
	if err == nil && !none {
		err = errors.New("it is not empty")
	}
	if err == nil {
		err = mark(abs, r.Stores[i].Store)
	}
	if err != nil {
		return fail(err)
	}
	return nil
}

// SameDisk reports whether two directories are on one file system: then a copy in one does not survive the other.
func SameDisk(a, b string) bool {
	var x, y unix.Stat_t
	return unix.Stat(a, &x) == nil && unix.Stat(b, &y) == nil && x.Dev == y.Dev
}
