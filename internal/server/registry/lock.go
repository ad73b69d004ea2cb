package registry

import "sync"

// keyLock is a mutex for each key. Its zero value is ready.
type keyLock struct {
	mu    sync.Mutex
	locks map[string]*keyMutex // guarded by mu
}

type keyMutex struct {
	mu    sync.Mutex
	users int // guarded by keyLock.mu
}

// lock waits until key is free, and returns what frees it.
func (l *keyLock) lock(key string) (unlock func()) {
	l.mu.Lock()
	m := l.locks[key]
	if m == nil {
		if l.locks == nil {
			l.locks = make(map[string]*keyMutex)
		}
		m = new(keyMutex)
		l.locks[key] = m
	}
	m.users++
	l.mu.Unlock()
	m.mu.Lock()
	return func() {
		m.mu.Unlock()
		l.mu.Lock()
		defer l.mu.Unlock()
		if m.users--; m.users == 0 {
			delete(l.locks, key)
		}
	}
}
