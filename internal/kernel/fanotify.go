package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Pre-content events: Linux 6.14. The kernel asks before it lets anybody read
// a range of a marked file, and the reader waits for the answer.

const (
	// PreAccessEventLen is the length in bytes of a pre-content event with its
	// range, as FanotifyRead sees it: metadata (24) and one range record (24).
	PreAccessEventLen = fanMetadataLen + fanRangeLen

	fanMetadataLen = 24 // struct fanotify_event_metadata
	fanRangeLen    = 24 // struct fanotify_event_info_range
	fanInfoHdrLen  = 4  // struct fanotify_event_info_header
)

// FanotifyEvent is one read that waits for an answer.
type FanotifyEvent struct {
	Mask uint64
	// Number is a descriptor of the file that is read, open in the process
	// that read the event, and also the event's name in the answer: whoever
	// holds the group may answer it under this number, even when the
	// descriptor is long closed. Negative: no descriptor could be made.
	Number int32
	PID    int32 // of the thread that reads; 0: none that can be seen from here
	// Offset and Count are the range in bytes; meaningful if Ranged. An event
	// without a range stands for the whole file.
	Offset, Count uint64
	Ranged        bool
}

// NewFanotifyGroup makes a fanotify group for pre-content events (Linux 6.14,
// CAP_SYS_ADMIN).
//
// Its queue is unlimited: the kernel lets a read through unasked when a
// limited queue is full, which over a hole would be zeros. Its marks are
// unlimited too. Events carry O_RDWR descriptors, so that whoever answers
// may fill the file through them without raising further events. Reading is
// non-blocking.
func NewFanotifyGroup() (*os.File, error) {
	fd, err := unix.FanotifyInit(
		unix.FAN_CLASS_PRE_CONTENT|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK|unix.FAN_UNLIMITED_QUEUE|unix.FAN_UNLIMITED_MARKS|unix.FAN_REPORT_TID,
		unix.O_RDWR|unix.O_LARGEFILE|unix.O_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make a fanotify group for pre-content events (Linux 6.14, root): %w", err)
	}
	return os.NewFile(uintptr(fd), "fanotify"), nil
}

// FanotifyNamesThreads reports whether events of a group name threads. Those of groups that were made
// otherwise name processes.
func FanotifyNamesThreads(group int) (bool, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", group))
	if err != nil {
		return false, fmt.Errorf("read the flags of a fanotify group: %w", err)
	}
	for line := range strings.Lines(string(b)) {
		var flags uint64
		if n, _ := fmt.Sscanf(line, "fanotify flags:%x", &flags); n == 1 {
			return flags&unix.FAN_REPORT_TID != 0, nil
		}
	}
	return false, nil
}

// Unpolled returns f under another descriptor, which the Go runtime does not wait for by
// itself, and closes f: whoever reads it waits by poll(2), on a thread of its own. A
// goroutine that the runtime wakes up when there is something to read costs a third more. The
// file stays non-blocking.
func Unpolled(f *os.File) (*os.File, error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("use %s: %w", f.Name(), err)
	}
	fd := -1
	cerr := conn.Control(func(polled uintptr) {
		if fd, err = unix.FcntlInt(polled, unix.F_DUPFD_CLOEXEC, 0); err == nil {
			err = unix.SetNonblock(fd, false)
		}
	})
	if err = errors.Join(cerr, err); err != nil {
		if fd >= 0 {
			unix.Close(fd)
		}
		return nil, fmt.Errorf("duplicate %s: %w", f.Name(), err)
	}
	// One that blocks when it is made into a file is none for the runtime's poller.
	own := os.NewFile(uintptr(fd), f.Name())
	if err := unix.SetNonblock(fd, true); err != nil {
		own.Close()
		return nil, fmt.Errorf("have %s not block: %w", f.Name(), err)
	}
	return own, f.Close()
}

// MarkPreAccess asks group before each read of file, an open regular file.
// Only descriptors opened from now on are watched; file itself is exempt. Marking twice does no
// harm. Filesystems that cannot (tmpfs, overlayfs) fail with EOPNOTSUPP;
// kernels that cannot (before 6.14) with EINVAL.
func MarkPreAccess(group, file *os.File) error {
	err := fanotifyMark(group, file, unix.FAN_MARK_ADD)
	switch {
	case errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("gate %s: its filesystem has no pre-content events; keep arenas on ext4, XFS or btrfs: %w", file.Name(), err)
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("gate %s: the kernel has no pre-content events (they came with Linux 6.14): %w", file.Name(), err)
	case err != nil:
		return fmt.Errorf("gate %s: %w", file.Name(), err)
	}
	return nil
}

// CloneMount returns a detached copy of the mount that dir is on, with dir as
// its root. Paths below /proc/self/fd/N lead through it. It goes when it is
// closed and nothing that was opened through it is open.
func CloneMount(dir string) (*os.File, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("clone the mount of %s: %w", dir, err)
	}
	return os.NewFile(uintptr(fd), dir), nil
}

// MarkPreAccessMount asks group before each read of a regular file that is
// opened from now on through mount, a copy of CloneMount. The same file opened
// by way of another mount is none of its business.
func MarkPreAccessMount(group, mount *os.File) error {
	err := withFD(group, func(g int) error {
		return withFD(mount, func(f int) error {
			return unix.FanotifyMark(g, unix.FAN_MARK_ADD|unix.FAN_MARK_MOUNT, unix.FAN_PRE_ACCESS, f, ".")
		})
	})
	if err != nil {
		return fmt.Errorf("watch reads below %s: %w", mount.Name(), err)
	}
	return nil
}

// UnmarkPreAccess takes back MarkPreAccess. Events that are already raised
// still want their answer. A file without a mark is no error.
func UnmarkPreAccess(group, file *os.File) error {
	err := fanotifyMark(group, file, unix.FAN_MARK_REMOVE)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("take %s from behind the gate: %w", file.Name(), err)
	}
	return nil
}

func fanotifyMark(group, file *os.File, how uint) error {
	return withFD(group, func(g int) error {
		return withFD(file, func(f int) error {
			return unix.FanotifyMark(g, how, unix.FAN_PRE_ACCESS, f, "")
		})
	})
}

// withFD calls fn with f's descriptor. Unlike f.Fd it leaves the descriptor's
// mode alone.
func withFD(f *os.File, fn func(fd int) error) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var ferr error
	if err := rc.Control(func(fd uintptr) { ferr = fn(int(fd)) }); err != nil {
		return err
	}
	return ferr
}

// ParseFanotifyEvents reads the events in b, as read(2) of a group returns
// them, appends them to dst, and returns it. After an error dst holds the
// events before the broken one.
func ParseFanotifyEvents(dst []FanotifyEvent, b []byte) ([]FanotifyEvent, error) {
	le := binary.NativeEndian
	for at := 0; len(b) > 0; {
		if len(b) < fanMetadataLen {
			return dst, fmt.Errorf("parse fanotify event at byte %d: %d bytes left, want at least %d", at, len(b), fanMetadataLen)
		}
		eventLen, metaLen := le.Uint32(b), int(le.Uint16(b[6:]))
		if v := b[4]; v != unix.FANOTIFY_METADATA_VERSION {
			return dst, fmt.Errorf("parse fanotify event at byte %d: version %d, want %d", at, v, unix.FANOTIFY_METADATA_VERSION)
		}
		if uint64(eventLen) > uint64(len(b)) || metaLen < fanMetadataLen || metaLen > int(eventLen) {
			return dst, fmt.Errorf("parse fanotify event at byte %d: length %d with metadata of %d, in %d bytes", at, eventLen, metaLen, len(b))
		}
		e := FanotifyEvent{
			Mask:   le.Uint64(b[8:]),
			Number: int32(le.Uint32(b[16:])),
			PID:    int32(le.Uint32(b[20:])),
		}
		for info := b[metaLen:eventLen]; len(info) > 0; {
			if len(info) < fanInfoHdrLen {
				return dst, fmt.Errorf("parse fanotify event at byte %d: information record of %d bytes", at, len(info))
			}
			n := int(le.Uint16(info[2:]))
			if n < fanInfoHdrLen || n > len(info) {
				return dst, fmt.Errorf("parse fanotify event at byte %d: information record says %d of %d bytes", at, n, len(info))
			}
			if info[0] == unix.FAN_EVENT_INFO_TYPE_RANGE {
				if n < fanRangeLen {
					return dst, fmt.Errorf("parse fanotify event at byte %d: range record of %d bytes, want %d", at, n, fanRangeLen)
				}
				e.Offset, e.Count, e.Ranged = le.Uint64(info[8:]), le.Uint64(info[16:]), true
			}
			info = info[n:]
		}
		dst = append(dst, e)
		at += int(eventLen)
		b = b[eventLen:]
	}
	return dst, nil
}

// FanotifyAllow lets the read with this number go on. It returns ENOENT when
// no such event waits.
func FanotifyAllow(group int, number int32) error {
	return fanotifyAnswer(group, number, unix.FAN_ALLOW)
}

// FanotifyDeny fails the read with this number. The kernel takes EPERM, EIO,
// EBUSY, ETXTBSY, EAGAIN, ENOSPC and EDQUOT (Linux 6.14). It returns ENOENT when
// no such event waits.
func FanotifyDeny(group int, number int32, errno syscall.Errno) error {
	return fanotifyAnswer(group, number, unix.FAN_DENY|uint32(errno)<<unix.FAN_ERRNO_SHIFT)
}

func fanotifyAnswer(group int, number int32, response uint32) error {
	r := unix.FanotifyResponse{Fd: number, Response: response}
	b := unsafe.Slice((*byte)(unsafe.Pointer(&r)), unsafe.Sizeof(r))
	for {
		_, err := unix.Write(group, b)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
