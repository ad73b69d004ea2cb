package rootdir

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/objects/s3"
)

// A root keeps its objects below itself, or in a bucket. The file "store" of a root says in which one; without it they are below. A
// bucket, or a prefix of one, belongs to one root: two catalogs would each remove what the other one needs. So each root has a
// random ID, and writes an object claims/ID, which only it may have. Whoever finds another's stays away.

// ErrClaimed is returned, wrapped, for a bucket that belongs to another root.
var ErrClaimed = errors.New("the bucket belongs to another root")

// ErrElsewhere is returned, wrapped, for what is done with objects below a root whose objects are in a bucket.
var ErrElsewhere = errors.New("its objects are in a bucket")

// claims is the prefix of the objects that say whose a bucket is.
const claims = "claims/"

// record is the file.
type record struct {
	Store string `json:"store"` // the text form of an s3.Location
	ID    string `json:"id"`
	// Claimed says that the object was written: if it is gone, somebody else has taken the bucket.
	Claimed bool `json:"claimed"`
}

// claim is the object.
type claim struct {
	Host  string    `json:"host"`
	Root  string    `json:"root"`
	Since time.Time `json:"since"`
}

func recordFile(root string) string { return filepath.Join(root, "store") }

// readRecord returns nil for a root whose objects are below it.
func readRecord(root string) (*record, error) {
	b, err := os.ReadFile(recordFile(root))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	r := new(record)
	if err == nil {
		if err = json.Unmarshal(b, r); err == nil && (r.Store == "" || objects.CheckKey(claims+r.ID) != nil) {
			err = errors.New("it lacks a store or an id")
		}
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", recordFile(root), err)
	}
	return r, nil
}

func (r *record) write(root string) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return durable.Replace(recordFile(root), append(b, '\n'))
}

// InBucket reports whether a root's objects are in a bucket, and where.
func InBucket(root string) (at string, is bool, err error) {
	r, err := readRecord(root)
	if r == nil {
		return "", false, err
	}
	return r.Store, true, nil
}

// Attached is a root's bucket.
type Attached struct {
	*s3.Bucket
	// Taken says that it was another root's until now.
	Taken bool
	id    string
}

// Attach opens the bucket of a root. at is its location; empty: the one that was recorded. A root that has none yet takes the bucket,
// which must be nobody's; take has it taken from others. The root is locked by who calls. Errors: ErrClaimed.
func Attach(ctx context.Context, root, at string, take bool, m *s3.Metrics) (*Attached, error) {
	r, err := readRecord(root)
	if err != nil {
		return nil, err
	}
	if r == nil {
		if at == "" {
			return nil, fmt.Errorf("%s is the root of no bucket", root)
		}
		for _, path := range []string{Objects(root), CatalogFile(root)} {
			if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
				return nil, errors.Join(fmt.Errorf("%s is the root of a server that keeps its objects below it: name another root for %s", root, at), err)
			}
		}
		r = &record{ID: objects.Random() + objects.Random()}
	}
	if at == "" {
		at = r.Store
	}
	location, err := s3.Parse(at)
	if err != nil {
		return nil, err
	}
	bucket, err := s3.Open(location, m)
	if err != nil {
		return nil, err
	}
	a := &Attached{Bucket: bucket, id: r.ID}
	others, own, err := a.claims(ctx)
	if err != nil {
		return nil, err
	}
	if r.Claimed && !own && !take {
		return nil, fmt.Errorf("%w: %s is not %s's any more%s, or is another bucket: name the right one; or, if no other server uses it, foil server rebuild --root %s --store %q --take makes it this root's again", ErrClaimed, at, root, by(others), root, at)
	}
	if len(others) > 0 && !take {
		return nil, fmt.Errorf("%w: %s is in use%s. If that server is gone for ever, foil server rebuild --root %s --store %q --take makes it this root's; else name another prefix", ErrClaimed, at, by(others), root, at)
	}
	if r.Store != at {
		r.Store = at
		if err := r.write(root); err != nil {
			return nil, err
		}
	}
	if own && len(others) == 0 && r.Claimed {
		return a, nil
	}
	if err := a.take(ctx, root, others, take); err != nil {
		return nil, err
	}
	r.Claimed, a.Taken = true, len(others) > 0
	return a, r.write(root)
}

// take writes the claim, and removes those of others if it may. Two who do so at once see each other.
func (a *Attached) take(ctx context.Context, root string, others map[string]claim, force bool) error {
	for id := range others {
		if err := a.Delete(ctx, claims+id); err != nil {
			return err
		}
	}
	host, _ := os.Hostname() // it is only shown
	b, err := json.Marshal(claim{Host: host, Root: root, Since: time.Now().UTC().Truncate(time.Second)})
	if err != nil {
		return err
	}
	if err := objects.Put(ctx, a, claims+a.id, b); err != nil {
		return err
	}
	others, own, err := a.claims(ctx)
	if err == nil && (len(others) > 0 || !own) {
		err = fmt.Errorf("%w: another one takes it at this moment%s: try again", ErrClaimed, by(others))
		if !force {
			err = errors.Join(err, a.Delete(ctx, claims+a.id))
		}
	}
	return err
}

// claims returns whose the bucket is besides this root's, and whether it is this root's.
func (a *Attached) claims(ctx context.Context) (others map[string]claim, own bool, err error) {
	others = map[string]claim{}
	err = a.List(ctx, claims, func(key string, _ int64) error {
		id := strings.TrimPrefix(key, claims)
		if id == a.id {
			own = true
			return nil
		}
		b, err := objects.Read(ctx, a, key, 64<<10)
		if errors.Is(err, objects.ErrNotFound) {
			return nil // it was given up just now
		}
		if err != nil {
			return err
		}
		var c claim
		_ = json.Unmarshal(b, &c) // what it says is only shown
		others[id] = c
		return nil
	})
	return others, own, err
}

// by says who the others are.
func by(others map[string]claim) string {
	s := ""
	for _, c := range others {
		s += fmt.Sprintf(", by %s on %s since %s", c.Root, c.Host, c.Since.Format(time.RFC3339))
	}
	return s
}

// Own returns nil while the bucket is this root's. Errors: ErrClaimed; the store's.
func (a *Attached) Own(ctx context.Context) error {
	_, err := a.Stat(ctx, claims+a.id)
	if errors.Is(err, objects.ErrNotFound) {
		err = fmt.Errorf("%w: it was taken from this one", ErrClaimed)
	}
	return err
}

// OpenStore opens the objects of a root that is locked by who calls. Errors: ErrClaimed.
func OpenStore(ctx context.Context, root string) (objects.Store, error) {
	_, is, err := InBucket(root)
	if err != nil {
		return nil, err
	}
	if is {
		return Attach(ctx, root, "", false, nil)
	}
	return objects.OpenDir(Objects(root))
}

// ViewStore opens the objects of a root for reading, also while a server uses it.
func ViewStore(root string) (objects.Store, error) {
	at, is, err := InBucket(root)
	if err != nil {
		return nil, err
	}
	if !is {
		return objects.ViewDir(Objects(root))
	}
	location, err := s3.Parse(at)
	if err != nil {
		return nil, err
	}
	return s3.Open(location, nil)
}
