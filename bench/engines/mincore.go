package engines

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// mincore is mincore(2): which pages of the mapping are in the page cache. vec
// has a byte for each.
func mincore(mapped, vec []byte) error {
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&mapped[0])), uintptr(len(mapped)), uintptr(unsafe.Pointer(&vec[0])))
	if errno != 0 {
		return errno
	}
	return nil
}
