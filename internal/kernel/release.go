package kernel

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"
)

// Lacking reports whether err is what kernels say to what they do not know.
func Lacking(err error) bool {
	for _, e := range []error{syscall.EINVAL, syscall.ENOSYS, syscall.ENODEV, syscall.ENOTBLK, syscall.EOPNOTSUPP} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// Release names the running kernel, for people: "Linux 6.18.4".
func Release() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "of unknown version"
	}
	return "Linux " + unix.ByteSliceToString(u.Release[:])
}
