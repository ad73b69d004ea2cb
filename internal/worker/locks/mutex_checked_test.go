//go:build race || lockorder

package locks

import "testing"

func TestOrder(t *testing.T) {
	var rootfs, other Mutex[Rootfs]
	var store Mutex[Store]
	store.Lock()
	rootfs.Lock()
	rootfs.Unlock()
	store.Unlock()

	for name, second := range map[string]interface{ Lock() }{"an earlier rank": &store, "the same rank": &other} {
		t.Run(name, func(t *testing.T) {
			rootfs.Lock()
			defer rootfs.Unlock()
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			second.Lock()
		})
	}
	done := make(chan struct{})
	rootfs.Lock()
	go func() { // another goroutine holds nothing
		defer close(done)
		store.Lock()
		store.Unlock()
	}()
	<-done
	rootfs.Unlock()
}
