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

// Systemd reports whether systemd is this host's service manager (sd_booted(3)), and its services have the same
// mounts as this process.
func Systemd() bool {
	st, err := os.Stat("/run/systemd/system")
	if err != nil || !st.IsDir() {
		return false
	}
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return false
	}
	its, err := os.Readlink("/proc/1/ns/mnt")
	return err == nil && own == its
}

// ChooseGate returns the best gate that this host can have with its root
// directory at root, and why it is not a better one.
//
// kept says that somebody has the gate's descriptors when daemon and keeper are killed together: the service
// manager. Without one a fanotify gate is gone then, and reads of absent bytes return zeros; a FUSE gate fails
// them. So it is the better one, although each read of present bytes costs more.
func ChooseGate(ctx context.Context, root string, kept bool) (gate, why string, err error) {
	root, err = existing(root)
	if err != nil {
		return "", "", err
	}
	dir, err := os.MkdirTemp(root, ".foil-probe-")
	if err != nil {
		return "", "", err
	}
	defer os.RemoveAll(dir)
	return chooseGate(ctx, dir, kept)
}

func chooseGate(ctx context.Context, dir string, kept bool) (gate, why string, err error) {
	sub := filepath.Join(dir, "erofs")
	if err := os.Mkdir(sub, 0o700); err != nil {
		return "", "", err
	}
	_, erofsErr := probeErofs(ctx, sub)
	_, gatedErr := probeGated(ctx, dir)
	if erofsErr == nil && gatedErr == nil {
		if kept {
			return GateFanotify, "", nil
		}
		if _, err := probeFUSE(ctx, dir); err != nil {
			return GateFanotify, fmt.Sprintf("no FUSE (%v), whose gate fails reads: if daemon and keeper are killed together, reads of absent bytes return zeros", err), nil
		}
		return GateFUSE, "no service manager keeps the gate: if daemon and keeper were killed together, reads at a fanotify gate would return zeros; at this one they fail; containers that began before an image was complete read through the daemon until they end", nil
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
	gate, why, err := chooseGate(ctx, dir, Systemd())
	if err == nil && why != "" {
		gate += ": " + why
	}
	return gate, err
}
