package kernel

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// MemoryDir returns a new, empty directory in memory that is mounted nowhere (Linux 5.2). Who
// may look into this process finds it below /proc/PID/fd; closing it removes it, with all
// that is in it.
func MemoryDir() (*os.File, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsopen tmpfs: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigSetString(fs, "mode", "0700"); err != nil {
		return nil, withLog(fs, fmt.Errorf("tmpfs option mode: %w", err))
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, withLog(fs, fmt.Errorf("create tmpfs: %w", err))
	}
	mnt, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, withLog(fs, fmt.Errorf("fsmount tmpfs: %w", err))
	}
	return os.NewFile(uintptr(mnt), "tmpfs"), nil
}
