package kernel

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// filesystems are magic numbers of statfs(2) with their names.
var filesystems = map[int64]string{
	unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "XFS", unix.BTRFS_SUPER_MAGIC: "btrfs",
	unix.TMPFS_MAGIC: "tmpfs", unix.OVERLAYFS_SUPER_MAGIC: "overlayfs", unix.NFS_SUPER_MAGIC: "NFS",
	unix.FUSE_SUPER_MAGIC: "FUSE", unix.F2FS_SUPER_MAGIC: "F2FS", 0x2fc12fc1: "ZFS",
}

func fsName(magic int64) string {
	if name := filesystems[magic]; name != "" {
		return name
	}
	return fmt.Sprintf("filesystem %#x", magic)
}

// probeFilesystem tries what arenas want: sparse files with holes that can be
// punched again.
func probeFilesystem(_ context.Context, dir string) (string, error) {
	space, err := StatSpace(dir)
	if err != nil {
		return "", err
	}
	f, err := os.Create(filepath.Join(dir, "sparse"))
	if err != nil {
		return "", err
	}
	defer f.Close()
	const size, block = 1 << 40, 4096
	if err := f.Truncate(size); err != nil {
		return "", fmt.Errorf("%s: no sparse file of 1 TiB: %w", fsName(space.Type), err)
	}
	if _, err := f.WriteAt(make([]byte, block), size/2); err != nil {
		return "", err
	}
	if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, size/2, block); err != nil {
		return "", fmt.Errorf("%s: punch a hole: %w", fsName(space.Type), err)
	}
	return fsName(space.Type), nil
}

// wantSpace is the free space in bytes below which little can be pulled.
const wantSpace = 1 << 30

func probeSpace(_ context.Context, dir string) (string, error) {
	s, err := StatSpace(dir)
	if err != nil {
		return "", err
	}
	detail := fmt.Sprintf("%.1f GiB of %.1f GiB", float64(s.Free)/(1<<30), float64(s.Size)/(1<<30))
	if s.Free < wantSpace {
		return "", errors.New(detail)
	}
	return detail, nil
}

func probeErofs(_ context.Context, dir string) (string, error) {
	image, target := filepath.Join(dir, "image"), filepath.Join(dir, "mnt")
	if err := os.WriteFile(image, leastErofs(), 0o600); err != nil {
		return "", err
	}
	if err := os.Mkdir(target, 0o700); err != nil {
		return "", err
	}
	err := MountErofs(Erofs{Image: image, Target: target})
	if err == nil {
		return "", Unmount(target, true)
	}
	// The probe's paths say nothing to anybody.
	if errno := unix.Errno(0); errors.As(err, &errno) {
		err = fmt.Errorf("mount an EROFS image: %w", errno)
	}
	if errors.Is(err, unix.ENODEV) {
		return "", &missing{err.Error(), "load the module (modprobe erofs), or use a kernel with CONFIG_EROFS_FS"}
	}
	if s, statErr := StatSpace(dir); statErr == nil && noErofsOn(s.Type) {
		return "", &missing{err.Error(), "put the root directory on ext4, XFS or btrfs: EROFS images cannot be on " + fsName(s.Type)}
	}
	return "", err
}

// leastErofs is an EROFS image of an empty root directory. Package erofs of the
// worker describes the format.
func leastErofs() []byte {
	b := make([]byte, 4096)
	le := binary.LittleEndian
	sb, inode, dirents := b[1024:], b[1152:], b[1152+32:]
	le.PutUint32(sb, 0xe0f5e1e2)
	sb[12] = 12                    // block bits
	le.PutUint16(sb[14:], 1152/32) // root inode
	le.PutUint64(sb[16:], 1)       // inodes
	le.PutUint32(sb[36:], 1)       // blocks
	le.PutUint16(inode, 2<<1)      // compact, data inline
	le.PutUint16(inode[4:], 0o40755)
	le.PutUint16(inode[6:], 2) // links
	le.PutUint32(inode[8:], 2*12+3)
	for i, nameAt := range []uint16{24, 25} { // "." and ".."
		le.PutUint64(dirents[12*i:], 1152/32)
		le.PutUint16(dirents[12*i+8:], nameAt)
		dirents[12*i+10] = 2 // directory
	}
	copy(dirents[24:], "...")
	return b
}

// probePreContent marks a file. A group alone proves nothing: its class is older
// than the events (Linux 6.13 makes one). A kernel that has them, on a filesystem
// that has not, says EOPNOTSUPP.
func probePreContent(_ context.Context, dir string) (string, error) {
	err := markFile(dir)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return "", nil
	}
	return "", err
}

func probeGated(_ context.Context, dir string) (string, error) {
	err := markFile(dir)
	if errors.Is(err, unix.EINVAL) {
		return "", &missing{"the kernel has no pre-content events", preContentFix}
	}
	return "", err
}

// markFile has a group watch a file in dir.
func markFile(dir string) error {
	group, err := NewFanotifyGroup()
	if err != nil {
		return err
	}
	defer group.Close()
	f, err := os.Create(filepath.Join(dir, "arena"))
	if err != nil {
		return err
	}
	defer f.Close()
	err = MarkPreAccess(group, f)
	if err == nil {
		return UnmarkPreAccess(group, f)
	}
	if errno := unix.Errno(0); errors.As(err, &errno) {
		err = fmt.Errorf("mark a file: %w", errno)
	}
	return err
}

func probeSELinux(context.Context, string) (string, error) {
	label, err := selinux{"/"}.containerFiles()
	if label == "" && err == nil {
		return "not used", nil
	}
	return "what containers read is labelled " + label, err
}

func probeOverlay(_ context.Context, dir string) (string, error) { return "", tryOverlay(dir, nil) }

func probeMetacopy(_ context.Context, dir string) (string, error) {
	return "containers of foil run; not those of containerd, whose programs read upper directories", tryOverlay(dir, Metacopy)
}

// tryOverlay mounts an overlay, and takes it away again.
func tryOverlay(dir string, options []string) error {
	path := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"lower", "upper", "work", "mnt"} {
		if err := os.Mkdir(path(name), 0o700); err != nil {
			return err
		}
	}
	err := MountOverlay(Overlay{Lower: []string{path("lower")}, Upper: path("upper"), Work: path("work"), Target: path("mnt"), Options: options})
	if err != nil {
		return err
	}
	return Unmount(path("mnt"), true)
}
