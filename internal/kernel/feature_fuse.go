package kernel

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Of struct fuse_init_in, which follows a header of 40 bytes in the first
// request.
const (
	fuseHeaderLen      = 40
	fuseFlagsAt        = fuseHeaderLen + 12
	fuseFlags2At       = fuseHeaderLen + 16
	fuseInitExt        = 1 << 30 // of flags: flags2 is there
	fusePassthrough    = 1 << 5  // of flags2: bit 37 of both
	fuseMinReadBuffer  = 8192
	fuseVersionMajorAt = fuseHeaderLen
	fuseVersionMinorAt = fuseHeaderLen + 4
)

func probeFUSE(context.Context, string) (string, error) {
	b, err := fuseInit()
	if err != nil {
		return "", err
	}
	le := binary.NativeEndian
	return fmt.Sprintf("protocol %d.%d", le.Uint32(b[fuseVersionMajorAt:]), le.Uint32(b[fuseVersionMinorAt:])), nil
}

func probePassthrough(context.Context, string) (string, error) {
	b, err := fuseInit()
	if err != nil {
		return "", err
	}
	le := binary.NativeEndian
	if le.Uint32(b[fuseFlagsAt:])&fuseInitExt == 0 || le.Uint32(b[fuseFlags2At:])&fusePassthrough == 0 {
		return "", errors.New("the kernel does not offer it")
	}
	return "", nil
}

// fuseInit makes a FUSE filesystem that is mounted nowhere and returns the
// kernel's first request, which says what it can do.
func fuseInit() ([]byte, error) {
	dev, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: "/dev/fuse", Err: err}
	}
	defer unix.Close(dev) // ends the connection
	fs, err := unix.Fsopen("fuse", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsopen fuse: %w", err)
	}
	defer unix.Close(fs)
	for _, o := range [][2]string{
		{"fd", fmt.Sprint(dev)}, {"rootmode", "40000"}, {"user_id", "0"}, {"group_id", "0"},
	} {
		if err := unix.FsconfigSetString(fs, o[0], o[1]); err != nil {
			return nil, withLog(fs, fmt.Errorf("option %s of fuse: %w", o[0], err))
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, withLog(fs, fmt.Errorf("create a FUSE filesystem: %w", err))
	}
	b := make([]byte, fuseMinReadBuffer)
	n, err := unix.Read(dev, b)
	if err != nil {
		return nil, fmt.Errorf("read from /dev/fuse: %w", err)
	}
	if n < fuseFlags2At {
		return nil, fmt.Errorf("a first FUSE request of %d bytes", n)
	}
	return b, nil
}
