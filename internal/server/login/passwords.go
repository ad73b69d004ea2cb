package login

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/bcrypt"

	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/reread"
)

const (
	// maxCost is the highest cost of a bcrypt hash that is taken: about a second.
	maxCost = 14
	// maxWaiting is how many logins wait for a processor.
	maxWaiting = 64
	// maxVerified is how many logins are remembered that were right.
	maxVerified = 4096
	// maxPassword bounds a password, bytes. bcrypt itself reads 72.
	maxPassword = 1024
)

// users are those of an htpasswd file.
type users struct {
	file  *reread.File[*passwords]
	state *State
}

// passwords are the lines of a file.
type passwords struct {
	hashes map[string]string // by name
	lines  map[string]string // lineOf these
	// nobody is a hash that no password has, of the highest cost in the file: what a name costs that is
	// not there.
	nobody string
}

func openUsers(path string, state *State) (*users, error) {
	u := &users{state: state, file: &reread.File[*passwords]{
		Path: path, Parse: parsePasswords,
		Failed:  func(err error) { state.log.Error("passwords stay as they were", "error", err) },
		Changed: func() { state.log.Info("passwords were read again", "file", path) },
	}}
	_, err := u.file.Get()
	return u, err
}

// parsePasswords reads an htpasswd file.
func parsePasswords(b []byte) (*passwords, error) {
	p := &passwords{hashes: map[string]string{}, lines: map[string]string{}}
	highest := bcrypt.MinCost
	n := 0
	for line := range strings.Lines(string(b)) {
		n++
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, hash, ok := strings.Cut(line, ":")
		// The error must not show the line: it may be a password.
		if !ok || name == "" {
			return nil, fmt.Errorf("line %d: want NAME:HASH, as htpasswd -nB NAME prints it", n)
		}
		if strings.Contains(name, "*") {
			return nil, fmt.Errorf("line %d: a name has no stars, which rules use for others", n)
		}
		cost, err := bcrypt.Cost([]byte(hash))
		if err != nil {
			return nil, fmt.Errorf("line %d: user %s has no bcrypt hash: make one with htpasswd -nB %s", n, name, name)
		}
		if cost > maxCost {
			return nil, fmt.Errorf("line %d: the hash of user %s has cost %d, at most %d: each login would take seconds", n, name, cost, maxCost)
		}
		if _, twice := p.hashes[name]; twice {
			return nil, fmt.Errorf("line %d: user %s is there twice", n, name)
		}
		p.hashes[name], p.lines[name] = hash, lineOf(hash)
		highest = max(highest, cost)
	}
	if len(p.hashes) == 0 {
		highest = bcrypt.DefaultCost
	}
	p.nobody = fmt.Sprintf("$2a$%02d$%s", highest, strings.Repeat(".", 53))
	return p, nil
}

// identify compares a password.
func (u *users) identify(ctx context.Context, user, password string, address netip.Addr) (*Identity, error) {
	p, err := u.file.Get()
	if err != nil {
		return nil, &Error{Way: WayPassword, Message: "logins fail; the server's log says why", Reason: err}
	}
	hash, known := p.hashes[user]
	if !known {
		hash = p.nobody
	}
	id := &Identity{Subject: access.Subject{Name: "user:" + user}, Way: WayPassword, Shown: true, password: lineOf(hash)}
	v := &u.state.verifier
	key := v.key(user, hash, password)
	if known && v.remembers(key) {
		return id, nil
	}
	if err := u.state.failures.Check(address, WayPassword); err != nil {
		return nil, err
	}
	right, err := v.compare(ctx, hash, password)
	if err != nil {
		return nil, err
	}
	if !right || !known {
		u.state.failures.Add(address)
		return nil, &Error{Way: WayPassword, Message: "the name or the password is wrong"}
	}
	v.remember(key)
	return id, nil
}

// current reports whether a user's line is still the one that a token was given for.
func (u *users) current(user, line string) bool {
	p, err := u.file.Get()
	if err != nil {
		return false
	}
	now, ok := p.lines[user]
	return ok && subtle.ConstantTimeCompare([]byte(now), []byte(line)) == 1
}

// lineOf names the state of a user's line without saying what it is: the hash has 128 random bits.
func lineOf(hash string) string {
	sum := sha256.Sum256([]byte("line " + hash))
	return hex.EncodeToString(sum[:12])
}

// verifier bounds what comparing passwords costs.
type verifier struct {
	secret  [32]byte // of this process: what is remembered is of no use to another
	slots   chan struct{}
	waiting chan struct{}

	mu       *sync.Mutex
	verified map[[32]byte]struct{} // guarded by mu
}

func newVerifier() verifier {
	v := verifier{
		slots:   make(chan struct{}, max(1, runtime.GOMAXPROCS(0)/2)),
		waiting: make(chan struct{}, maxWaiting),
		mu:      new(sync.Mutex), verified: make(map[[32]byte]struct{}),
	}
	rand.Read(v.secret[:])
	return v
}

// key names a login. It holds for one hash: a line that changes is another one.
func (v *verifier) key(user, hash, password string) (key [32]byte) {
	m := hmac.New(sha256.New, v.secret[:])
	for _, s := range []string{user, hash, password} {
		m.Write(binary.BigEndian.AppendUint64(nil, uint64(len(s))))
		m.Write([]byte(s))
	}
	m.Sum(key[:0])
	return key
}

func (v *verifier) remembers(key [32]byte) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	_, ok := v.verified[key]
	return ok
}

func (v *verifier) remember(key [32]byte) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.verified) >= maxVerified {
		clear(v.verified)
	}
	v.verified[key] = struct{}{}
}

// compare computes bcrypt when it is this request's turn. Errors: *Error.
func (v *verifier) compare(ctx context.Context, hash, password string) (bool, error) {
	busy := &Error{Way: WayPassword, Message: "too many logins at once: try again", After: time.Second}
	select {
	case v.waiting <- struct{}{}:
		defer func() { <-v.waiting }()
	default:
		return false, busy
	}
	select {
	case v.slots <- struct{}{}:
		defer func() { <-v.slots }()
	case <-ctx.Done():
		return false, busy
	}
	// One that is too long is not right, but as dear.
	err := bcrypt.CompareHashAndPassword([]byte(hash), []byte(password[:min(len(password), maxPassword)]))
	if err != nil && !errors.Is(err, bcrypt.ErrMismatchedHashAndPassword) {
		return false, &Error{Way: WayPassword, Message: "the name or the password is wrong", Reason: err}
	}
	return err == nil && len(password) <= maxPassword, nil
}
