package kernel

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// AttachLoop makes a read-only block device of a file. The device goes when the
// returned descriptor and everything else that uses the device, such as a
// mount, are closed. With direct the device reads by direct, asynchronous I/O:
// a read that waits does not hold up the others; not every filesystem can.
func AttachLoop(path string, direct bool) (dev *os.File, err error) {
	// Not os.Open: the file may be served by this process, and the runtime's
	// poller would ask it something while it polls for what it asks.
	back, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(back)
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	for {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find a free loop device for %s: %w", path, err)
		}
		dev, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDONLY, 0)
		if err != nil {
			return nil, err
		}
		c := unix.LoopConfig{Fd: uint32(back), Size: 4096}
		c.Info.Flags = unix.LO_FLAGS_READ_ONLY | unix.LO_FLAGS_AUTOCLEAR
		if direct {
			c.Info.Flags |= unix.LO_FLAGS_DIRECT_IO
		}
		copy(c.Info.File_name[:len(c.Info.File_name)-1], path)
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &c)
		if err == nil {
			return dev, nil
		}
		dev.Close()
		if !errors.Is(err, unix.EBUSY) { // EBUSY: somebody else took it meanwhile
			return nil, fmt.Errorf("make a loop device of %s: %w", path, err)
		}
	}
}

// attachLoops makes a loop device of each file. Direct I/O is tried first:
// without it one read that waits holds up all others of its device.
func attachLoops(paths []string) (loops []*os.File, err error) {
	for _, p := range paths {
		l, err := AttachLoop(p, true)
		if err != nil {
			l, err = AttachLoop(p, false)
		}
		if err != nil {
			return loops, err
		}
		loops = append(loops, l)
	}
	return loops, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
