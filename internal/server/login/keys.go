package login

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/durable"
)

const (
	// rotateEvery is how long a key signs, and maxRefresh how long what it signed may hold: a key is kept
	// for both, so that a new one logs nobody out.
	rotateEvery = 30 * 24 * time.Hour
	maxRefresh  = 90 * 24 * time.Hour
)

// Keys sign tokens, and verify those that they have signed. The newest signs. They are in a file
// that only the server's user may read:
//
//	{"keys": [{"id": "...", "made": "2026-11-23T10:00:00Z", "secret": "base64, 32 bytes"}]}
//
// Removing the file, and starting the server again, logs everybody out who has no password.
type Keys struct {
	path string

	mu   sync.Mutex
	keys []key // guarded by mu: the newest last
}

type key struct {
	ID     string    `json:"id"`
	Made   time.Time `json:"made"`
	Secret []byte    `json:"secret"`
}

type keyFile struct {
	Keys []key `json:"keys"`
}

// OpenKeys opens the keys in a file, whose directory is made when missing.
func OpenKeys(path string) (*Keys, error) {
	k := &Keys{path: path}
	if err := k.load(); err != nil {
		return nil, fmt.Errorf("keys of tokens %s: %w", path, err)
	}
	_, err := k.signing()
	return k, err
}

func (k *Keys) load() error {
	info, err := os.Stat(k.path)
	if errors.Is(err, fs.ErrNotExist) {
		return os.MkdirAll(filepath.Dir(k.path), 0o700)
	}
	if err != nil {
		return err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("others may read it (%v): remove it, so that new keys are made, and nobody has them", info.Mode().Perm())
	}
	b, err := os.ReadFile(k.path)
	if err != nil {
		return err
	}
	var f keyFile
	if err := json.Unmarshal(b, &f); err != nil {
		return fmt.Errorf("it is damaged: remove it, which logs everybody out: %w", err)
	}
	for _, one := range f.Keys {
		if one.ID == "" || len(one.Secret) < 32 {
			return errors.New("it is damaged: remove it, which logs everybody out")
		}
	}
	k.keys = f.Keys
	return nil
}

// signing returns the key to sign with, a new one when the last is old.
func (k *Keys) signing() (key, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := time.Now()
	if n := len(k.keys); n > 0 {
		// A clock that was ahead is no reason to sign with a key for ever.
		if age := now.Sub(k.keys[n-1].Made); age < rotateEvery && age > -rotateEvery {
			return k.keys[n-1], nil
		}
	}
	next := key{ID: rand.Text()[:12], Made: now.UTC().Truncate(time.Second), Secret: make([]byte, 32)}
	rand.Read(next.Secret)
	keys := slices.DeleteFunc(slices.Clone(k.keys), func(o key) bool { return now.Sub(o.Made) > rotateEvery+maxRefresh })
	keys = append(keys, next)
	b, err := json.Marshal(keyFile{keys})
	if err == nil {
		err = durable.Replace(k.path, b)
	}
	if err != nil {
		if n := len(k.keys); n > 0 {
			return k.keys[n-1], nil // an old key is better than none
		}
		return key{}, fmt.Errorf("keys of tokens %s: %w", k.path, err)
	}
	k.keys = keys
	return next, nil
}

// secret returns the one of a key.
func (k *Keys) secret(id string) ([]byte, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, one := range k.keys {
		if one.ID == id {
			return one.Secret, true
		}
	}
	return nil, false
}
