package serve

import (
	"crypto/tls"
	"fmt"
	"os"
	"sync"
	"time"
)

// keyPair is a certificate in files that may be renewed while the server runs.
type keyPair struct {
	cert, key string // file names

	mu     sync.Mutex
	loaded *tls.Certificate // guarded by mu
	times  [2]time.Time     // guarded by mu: of the files when they were loaded
}

// get returns the certificate; if the files have changed, the new one. A pair
// that cannot be read, or does not match while it is being replaced, is no
// reason to stop serving with the old one.
func (p *keyPair) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var times [2]time.Time
	for i, name := range []string{p.cert, p.key} {
		if info, err := os.Stat(name); err == nil {
			times[i] = info.ModTime()
		}
	}
	if p.loaded != nil && times == p.times {
		return p.loaded, nil
	}
	pair, err := tls.LoadX509KeyPair(p.cert, p.key)
	if err != nil {
		if p.loaded != nil {
			return p.loaded, nil
		}
		return nil, fmt.Errorf("certificate %s with key %s: %w", p.cert, p.key, err)
	}
	p.loaded, p.times = &pair, times
	return p.loaded, nil
}
