package runner

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/moby/sys/user"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// maxAccounts is the largest /etc/passwd or /etc/group that is read, in bytes.
const maxAccounts = 16 << 20

// lookUpUser resolves name (a name or UID, optionally ":" and a group name or
// GID; empty is root) by the account files of the rootfs.
func lookUpUser(rootfs, name string) (specs.User, error) {
	passwd, err := readIn(rootfs, "/etc/passwd")
	if err != nil {
		return specs.User{}, err
	}
	group, err := readIn(rootfs, "/etc/group")
	if err != nil {
		return specs.User{}, err
	}
	u, err := user.GetExecUser(name, &user.ExecUser{Home: "/"}, bytes.NewReader(passwd), bytes.NewReader(group))
	if err != nil {
		return specs.User{}, fmt.Errorf("look up user %q in the image: %w", name, err)
	}
	// The primary group is among the supplementary ones as well, so that a
	// process cannot drop it to escape a file mode that denies the group.
	out := specs.User{UID: uint32(u.Uid), GID: uint32(u.Gid), AdditionalGids: []uint32{uint32(u.Gid)}}
	for _, g := range u.Sgids {
		if g != u.Gid {
			out.AdditionalGids = append(out.AdditionalGids, uint32(g))
		}
	}
	return out, nil
}

// readIn reads a regular file as a process that has root as its root directory
// would. A missing file is empty.
func readIn(root, name string) ([]byte, error) {
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: root, Err: err}
	}
	defer unix.Close(dir)
	full := filepath.Join(root, name)
	// The image may have put a FIFO or a device there: it must not block.
	fd, err := unix.Openat2(dir, name, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NONBLOCK | unix.O_NOCTTY,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return nil, nil
	}
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: full, Err: err}
	}
	f := os.NewFile(uintptr(fd), full)
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() || st.Size() > maxAccounts {
		return nil, fmt.Errorf("%s of the image is no ordinary file of at most %d bytes", name, maxAccounts)
	}
	return io.ReadAll(io.LimitReader(f, maxAccounts))
}
