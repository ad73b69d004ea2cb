package registry

import (
	"context"
	"crypto/rand"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/server/guard"
	"hydrofoil.dev/foil/internal/server/leftover"
)

// uploads are the uploads under way, in a directory: ID.data has the bytes
// that came, ID.json a sessionState. Whatever a process knows about an upload
// is in these two files whenever no request is working on it.
type uploads struct {
	dir  string
	boot string // ID of this boot of the machine

	guard  *guard.Guard // says how many there may be
	ledger ledger

	mu   sync.Mutex
	busy map[string]*holder // guarded by mu; by upload ID
}

// holder is the request that works on an upload.
type holder struct {
	interrupt func() // makes the request stop reading its body
	done      chan struct{}
}

// sessionState is the file ID.json. The digest's state is worth as much as the
// bytes that it was made of: they are in the page cache until the machine
// stops, so a state of another boot is ignored and the data read again.
type sessionState struct {
	Repository string           `json:"repository"`
	Owner      string           `json:"owner,omitempty"`  // the subject that began it; empty: of an open server
	Network    netip.Addr       `json:"network,omitzero"` // from where
	Algorithm  digest.Algorithm `json:"algorithm"`
	Boot       string           `json:"boot"`
	Hashed     int64            `json:"hashed"` // bytes of ID.data in State
	State      []byte           `json:"state"`  // of the hash, marshalled
}

// session is one upload, held by one request.
type session struct {
	uploads *uploads
	id      string
	repo    string
	client  guard.Client
	file    *os.File // positioned at its end
	size    int64    // bytes received, all of them hashed
	alg     digest.Algorithm
	hash    hash.Hash
	release func()
}

var uploadID = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

func openUploads(dir string, g *guard.Guard) (*uploads, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("directory of uploads: %w", err)
	}
	boot, err := kernel.ReadBootID()
	if err != nil {
		return nil, fmt.Errorf("directory of uploads: %w", err)
	}
	u := &uploads{dir: dir, guard: g, boot: boot.String(), busy: make(map[string]*holder)}
	if err := u.takeStock(); err != nil {
		return nil, fmt.Errorf("directory of uploads: %w", err)
	}
	return u, nil
}

// takeStock counts the uploads that are there.
func (u *uploads) takeStock() error {
	entries, err := os.ReadDir(u.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		id, isData := strings.CutSuffix(e.Name(), ".data")
		info, err := e.Info()
		if !isData || !uploadID.MatchString(id) || err != nil {
			continue
		}
		if state, err := u.state(id); err == nil { // else it cannot be continued, and expires
			u.ledger.begin(id, guard.Client{Subject: state.Owner, Network: state.Network}, 0)
			u.ledger.set(id, info.Size())
		}
	}
	return nil
}

func (u *uploads) dataPath(id string) string  { return filepath.Join(u.dir, id+".data") }
func (u *uploads) statePath(id string) string { return filepath.Join(u.dir, id+".json") }

// acquire makes this request the only one that works on the upload. The last
// request wins: a client that comes back after its connection broke must not
// wait until the server has noticed the break as well.
func (u *uploads) acquire(ctx context.Context, id string, interrupt func()) (release func(), err error) {
	h := &holder{interrupt: interrupt, done: make(chan struct{})}
	for {
		u.mu.Lock()
		other := u.busy[id]
		if other == nil {
			u.busy[id] = h
			u.mu.Unlock()
			return func() {
				u.mu.Lock()
				delete(u.busy, id)
				u.mu.Unlock()
				close(h.done)
			}, nil
		}
		// While mu is held the other request is not over, and its connection
		// is not yet another request's.
		other.interrupt()
		u.mu.Unlock()
		select {
		case <-other.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// create begins an upload. The request holds it until close or remove.
// Errors: *guard.Beyond.
func (u *uploads) create(ctx context.Context, repo string, alg digest.Algorithm, interrupt func()) (*session, error) {
	var b [16]byte
	rand.Read(b[:])
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80 // a UUID of version 4, as the specification wants
	id := fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
	client := guard.ClientOf(ctx)
	u.guard.Dear(ctx)
	if !u.ledger.begin(id, client, u.guard.Limits().Uploads) {
		return nil, u.guard.Beyond(guard.LimitUploads, retryUploads, "too many uploads that are not finished: finish or cancel some")
	}
	release, err := u.acquire(ctx, id, interrupt)
	if err != nil {
		u.ledger.end(id)
		return nil, err
	}
	file, err := os.OpenFile(u.dataPath(id), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		u.ledger.end(id)
		release()
		return nil, fmt.Errorf("begin upload: %w", err)
	}
	s := &session{uploads: u, id: id, repo: repo, client: client, file: file, alg: alg, hash: alg.Hash(), release: release}
	if err := s.save(); err != nil {
		return nil, errors.Join(err, s.remove())
	}
	return s, nil
}

// open continues an upload. The request holds it until close or remove.
// An upload that is not there, another repository's or somebody else's, is a requestError.
func (u *uploads) open(ctx context.Context, repo, owner, id string, interrupt func()) (*session, error) {
	if _, err := u.size(repo, owner, id); err != nil {
		return nil, err
	}
	release, err := u.acquire(ctx, id, interrupt)
	if err != nil {
		return nil, err
	}
	s, err := u.load(id, release)
	if err != nil {
		release()
		if errors.Is(err, fs.ErrNotExist) { // finished meanwhile
			return nil, uploadGone(repo, id)
		}
		return nil, fmt.Errorf("continue upload %s: %w", id, err)
	}
	return s, nil
}

func uploadGone(repo, id string) error {
	return errorf(uploadUnknown, "repository %s has no upload %s: it was finished, cancelled or dropped for lack of progress; start another one", repo, id)
}

func (u *uploads) load(id string, release func()) (_ *session, err error) {
	state, err := u.state(id)
	if err != nil {
		return nil, err
	}
	file, err := os.OpenFile(u.dataPath(id), os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			file.Close()
		}
	}()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	s := &session{uploads: u, id: id, repo: state.Repository,
		client: guard.Client{Subject: state.Owner, Network: state.Network}, file: file, alg: state.Algorithm, release: release}
	s.hash = s.alg.Hash()
	if state.Boot == u.boot && state.Hashed <= info.Size() {
		if err := s.hash.(encoding.BinaryUnmarshaler).UnmarshalBinary(state.State); err != nil {
			return nil, fmt.Errorf("state of its digest: %w", err)
		}
		s.size = state.Hashed
	}
	// What came after the state was saved, or all of it.
	if _, err := file.Seek(s.size, io.SeekStart); err != nil {
		return nil, err
	}
	n, err := io.Copy(s.hash, file)
	s.size += n
	u.ledger.set(id, s.size)
	return s, err
}

func (u *uploads) state(id string) (state sessionState, err error) {
	b, err := os.ReadFile(u.statePath(id))
	if err != nil {
		return state, err
	}
	if err := json.Unmarshal(b, &state); err != nil {
		return state, fmt.Errorf("%s: %w", u.statePath(id), err)
	}
	if err := checkAlgorithm(state.Algorithm); err != nil {
		return state, fmt.Errorf("%s: %w", u.statePath(id), err)
	}
	return state, nil
}

// size returns how many bytes of an upload are here, without disturbing the
// request that may be adding to it.
func (u *uploads) size(repo, owner, id string) (int64, error) {
	if !uploadID.MatchString(id) {
		return 0, uploadGone(repo, id)
	}
	state, err := u.state(id)
	if errors.Is(err, fs.ErrNotExist) || err == nil && (state.Repository != repo || state.Owner != owner) {
		return 0, uploadGone(repo, id)
	}
	if err != nil {
		return 0, fmt.Errorf("upload %s: %w", id, err)
	}
	info, err := os.Stat(u.dataPath(id))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, uploadGone(repo, id)
	}
	if err != nil {
		return 0, fmt.Errorf("upload %s: %w", id, err)
	}
	return info.Size(), nil
}

// Write adds to the upload. Errors: *guard.Beyond, *requestError.
func (s *session) Write(p []byte) (int, error) {
	if err := s.mayGrow(len(p)); err != nil {
		return 0, err
	}
	n, err := s.file.Write(p)
	s.hash.Write(p[:n])
	s.size += int64(n)
	if n < len(p) {
		s.uploads.ledger.set(s.id, s.size)
	}
	if err != nil {
		err = fmt.Errorf("write upload %s: %w", s.id, err)
	}
	return n, err
}

// mayGrow reports whether the upload may have n bytes more.
func (s *session) mayGrow(n int) error {
	g := s.uploads.guard
	most := int64(g.Limits().UploadBytes)
	switch fits, alone := s.uploads.ledger.grow(s.id, int64(n), most); {
	case fits:
		return nil
	case alone:
		return errorf(uploadTooLarge, "an upload may have %d bytes here: have an administrator raise [limits] upload-bytes", most)
	}
	return g.Beyond(guard.LimitUploadBytes, retryUploads, "uploads that are not finished have too many bytes: finish or cancel some")
}

// use changes the algorithm of an upload, which costs reading what is there.
func (s *session) use(alg digest.Algorithm) error {
	if alg == s.alg {
		return nil
	}
	s.alg, s.hash = alg, alg.Hash()
	if _, err := io.Copy(s.hash, io.NewSectionReader(s.file, 0, s.size)); err != nil {
		return fmt.Errorf("read upload %s: %w", s.id, err)
	}
	return nil
}

// digest returns the digest of all that was received.
func (s *session) digest() digest.Digest { return digest.NewDigest(s.alg, s.hash) }

// save writes the state, so that whoever opens the upload next needs not read
// the data.
func (s *session) save() error {
	state := sessionState{Repository: s.repo, Owner: s.client.Subject, Network: s.client.Network, Algorithm: s.alg, Boot: s.uploads.boot, Hashed: s.size}
	var err error
	if state.State, err = s.hash.(encoding.BinaryMarshaler).MarshalBinary(); err != nil {
		return fmt.Errorf("save upload %s: %w", s.id, err)
	}
	b, err := json.Marshal(state)
	if err != nil {
		return fmt.Errorf("save upload %s: %w", s.id, err)
	}
	// Not synced: after a crash of the machine the state is ignored anyway.
	path := s.uploads.statePath(s.id)
	tmp := path + ".new"
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return errors.Join(fmt.Errorf("save upload %s: %w", s.id, err), os.Remove(tmp))
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("save upload %s: %w", s.id, err)
	}
	return nil
}

// close lets the upload go, for another request to continue.
func (s *session) close() error {
	defer s.release()
	return errors.Join(s.save(), s.file.Close())
}

// remove ends the upload: its files go, unless they have gone already.
func (s *session) remove() error {
	defer s.release()
	return errors.Join(s.file.Close(), s.uploads.removeFiles(s.id))
}

func (s *session) path() string { return s.uploads.dataPath(s.id) }

func (u *uploads) removeFiles(id string) error {
	u.ledger.end(id)
	var errs []error
	for _, path := range []string{u.statePath(id), u.dataPath(id), u.statePath(id) + ".new"} {
		if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove upload %s: %w", id, err)
	}
	return nil
}

// expire removes uploads that nothing was added to for long. now and up are as
// leftover.Ages.Old takes them.
func (u *uploads) expire(ctx context.Context, ages *leftover.Ages, now time.Time, up time.Duration) (ids []string, err error) {
	entries, err := os.ReadDir(u.dir)
	if err != nil {
		return nil, fmt.Errorf("drop old uploads: %w", err)
	}
	newest := make(map[string]time.Time)
	for _, e := range entries {
		id, _, _ := strings.Cut(e.Name(), ".")
		info, err := e.Info()
		if err != nil || !uploadID.MatchString(id) {
			continue // finished meanwhile, or not ours
		}
		if t := info.ModTime(); t.After(newest[id]) {
			newest[id] = t
		}
	}
	old, ahead := ages.Old(now, up, newest)
	var errs []error
	for _, id := range ahead {
		for _, path := range []string{u.statePath(id), u.dataPath(id)} {
			if err := os.Chtimes(path, now, now); !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
			}
		}
	}
	for _, id := range old {
		u.mu.Lock()
		busy := u.busy[id] != nil
		u.mu.Unlock()
		if busy {
			continue
		}
		release, err := u.acquire(ctx, id, func() {})
		if err != nil {
			return ids, errors.Join(append(errs, err)...)
		}
		errs = append(errs, u.removeFiles(id))
		release()
		ids = append(ids, id)
	}
	return ids, errors.Join(errs...)
}
