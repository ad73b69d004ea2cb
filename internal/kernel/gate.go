package kernel

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Gates that a host can have.
const (
	GateFanotify = "fanotify" // pre-content events
	GateFUSE     = "fuse"     // files of a FUSE filesystem
	GateLoop     = "loop"     // the same, with loop devices below EROFS
)

// ChooseGate returns the best gate that this host can have with its root
// directory at root, and why it is not a better one.
func ChooseGate(ctx context.Context, root string) (gate, why string, err error) {
	root, err = existing(root)
	if err != nil {
		return "", "", err
	}
	dir, err := os.MkdirTemp(root, ".foil-probe-")
	if err != nil {
		return "", "", err
	}
	defer os.RemoveAll(dir)
	return chooseGate(ctx, dir)
}

func chooseGate(ctx context.Context, dir string) (gate, why string, err error) {
	sub := filepath.Join(dir, "erofs")
	if err := os.Mkdir(sub, 0o700); err != nil {
		return "", "", err
	}
	_, erofsErr := probeErofs(ctx, sub)
	_, gatedErr := probeGated(ctx, dir)
	if erofsErr == nil && gatedErr == nil {
		return GateFanotify, "", nil
	}
	fromFiles := erofsErr == nil
	if !fromFiles && !errors.Is(erofsErr, unix.ENOTBLK) {
		return "", "", erofsErr
	}
	if _, err := probeFUSE(ctx, dir); err != nil {
		return "", "", fmt.Errorf("neither pre-content events (%w) nor FUSE (%w)", gatedErr, err)
	}
	if fromFiles {
		return GateFUSE, fmt.Sprintf("no pre-content events: %v", gatedErr), nil
	}
	if _, err := probeLoop(ctx, dir); err != nil {
		return "", "", fmt.Errorf("neither EROFS from files (%w) nor loop devices (%w)", erofsErr, err)
	}
	why = "no EROFS from files: this kernel mounts it from block devices only"
	if !canResend() {
		why += "; nor does it send FUSE requests again (Linux 6.9), so reads that wait when the daemon is killed hang until the next reboot"
	}
	return GateLoop, why, nil
}

// canResend reports whether FuseResend works.
func canResend() bool {
	b, err := fuseInit()
	if err != nil {
		return false
	}
	r, err := ParseFuseRequest(b[:fuseLength(b)])
	return err == nil && r.flags2&fuseHasResend != 0
}

func probeGate(ctx context.Context, dir string) (string, error) {
	gate, why, err := chooseGate(ctx, dir)
	if err == nil && why != "" {
		gate += ": " + why
	}
	return gate, err
}
