package credentials

import (
	"slices"
	"sync"
)

// most bounds the credentials that a Memory has.
const most = 256

// Memory has the credentials of pulls that run, by the name of the image's
// repository, HOST/REPOSITORY. The zero value is empty.
type Memory struct {
	mu      sync.Mutex
	entries []*entry // the oldest first
}

type entry struct {
	repository string
	credential Credential
}

// Remember keeps a credential until forget is called, or too many have come
// since.
func (m *Memory) Remember(repository string, c Credential) (forget func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := &entry{repository, c}
	if len(m.entries) >= most {
		m.entries = slices.Delete(m.entries, 0, 1)
	}
	m.entries = append(m.entries, e)
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if i := slices.Index(m.entries, e); i >= 0 {
			m.entries = slices.Delete(m.entries, i, i+1)
		}
	}
}

// For returns what was remembered last for a repository, or none.
func (m *Memory) For(repository string) Credential {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range slices.Backward(m.entries) {
		if e.repository == repository {
			return e.credential
		}
	}
	return Credential{}
}
