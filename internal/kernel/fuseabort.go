package kernel

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// AbortFuse ends a FUSE connection: all requests without an answer fail, and all that come. A connection is named by the
// minor number of its filesystem's device (Mount.Minor), which another filesystem can have as soon as this one is
// gone.
//
// Errors: fs.ErrNotExist, wrapped, when there is no such connection.
func AbortFuse(connection int) error {
	what := func(err error) error { return fmt.Errorf("abort FUSE connection %d: %w", connection, err) }
	// It is mounted in no place that could be relied on.
	control, err := unix.Fsopen("fusectl", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return what(os.NewSyscallError("fsopen fusectl", err))
	}
	defer unix.Close(control)
	if err := unix.FsconfigCreate(control); err != nil {
		return what(withLog(control, err))
	}
	mnt, err := unix.Fsmount(control, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return what(os.NewSyscallError("fsmount fusectl", err))
	}
	defer unix.Close(mnt)
	name := fmt.Sprintf("%d/abort", connection)
	fd, err := unix.Openat(mnt, name, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return what(&os.PathError{Op: "open", Path: name, Err: err})
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte("1")); err != nil {
		return what(&os.PathError{Op: "write", Path: name, Err: err})
	}
	return nil
}
