package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Erofs is an EROFS image to be mounted from a file, without a loop device
// (Linux 6.12).
type Erofs struct {
	Image string // path of the image
	// Devices are the paths of its extra devices, in the order of its device
	// table. There may be thousands: the options of mount(2) end at a page, so
	// the mount is made by fsconfig(2).
	Devices []string
	Target  string // existing directory
	// Loop puts a loop device below the image and each device, for kernels that
	// mount EROFS from block devices only (before Linux 6.12). Loop devices pass
	// by a fanotify gate.
	Loop bool
	// Beneath puts the mount below the one that is at Target (Linux 6.5), which
	// hides it until it is unmounted: so a mount is replaced and the path never
	// without one.
	Beneath bool
	// ReadAhead is the read-ahead of the mount in KiB; nil leaves the kernel's.
	// Setting it needs sysfs and is done before the mount can be seen. With Loop
	// it is that of the image's loop device, which keeps it.
	ReadAhead *int
	// ReadAheadFile, when not nil, is set to the path of the file by which the
	// read-ahead of the mount can be set later. Finding it needs sysfs.
	ReadAheadFile *string
}

// DefaultReadAhead is the kernel's read-ahead of a mount, KiB.
const DefaultReadAhead = 128

// SetReadAhead sets the read-ahead of a mount by the file that
// Erofs.ReadAheadFile named, KiB. Files that are open keep the one that they were opened with.
func SetReadAhead(file string, kib int) error {
	if err := os.WriteFile(file, strconv.AppendInt(nil, int64(kib), 10), 0); err != nil {
		return fmt.Errorf("set read-ahead: %w", err)
	}
	return nil
}

// DiskReadAhead returns the read-ahead of files on the disk below path, KiB. A
// filesystem on more than one device has none that is told here.
func DiskReadAhead(path string) (int, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, fmt.Errorf("read-ahead of the disk below %s: %w", path, err)
	}
	device := fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev))
	text, err := os.ReadFile(device + "/queue/read_ahead_kb")
	if errors.Is(err, os.ErrNotExist) {
		// A partition has its disk's; the kernel follows the link before the dots.
		text, err = os.ReadFile(device + "/../queue/read_ahead_kb")
	}
	if err != nil {
		return 0, fmt.Errorf("read-ahead of the disk below %s: %w", path, err)
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

// MountErofs mounts read-only, and without set-user-ID bits, file capabilities and device
// nodes: an image of anybody's is no way to root, or to a disk, for who can reach the
// mount. An overlay on it has mount flags of its own: in a container they work.
// Under SELinux the files get the label that lets containers read them. The error holds
// what the kernel logged.
func MountErofs(e Erofs) error {
	what := fmt.Sprintf("mount EROFS image %s at %s", e.Image, e.Target)
	source, devices := e.Image, e.Devices
	for _, path := range append([]string{e.Image}, e.Devices...) {
		if err := (selinux{"/"}).share(path); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	if e.Loop {
		loops, err := attachLoops(append([]string{e.Image}, e.Devices...))
		// The mount holds them from then on.
		defer closeAll(loops)
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		devices = nil
		for _, l := range loops[1:] {
			devices = append(devices, l.Name())
		}
		source = loops[0].Name()
		name := filepath.Join("/sys/block", filepath.Base(source), "queue/read_ahead_kb")
		if e.ReadAhead != nil {
			if err := SetReadAhead(name, *e.ReadAhead); err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
		}
		if e.ReadAheadFile != nil {
			*e.ReadAheadFile = name
		}
	}
	options := []option{{"source", source, true}}
	if e.Loop {
		// Else the devices are opened for writing.
		options = append(options, option{"ro", "", false})
	}
	for _, d := range devices {
		options = append(options, option{"device", d, true})
	}
	create := func(fs int) error {
		if e.ReadAhead == nil && e.ReadAheadFile == nil || e.Loop {
			return unix.FsconfigCreate(fs)
		}
		name, err := createNamed(fs, "erofs")
		if err == nil && e.ReadAhead != nil {
			err = SetReadAhead(name, *e.ReadAhead)
		}
		if err == nil && e.ReadAheadFile != nil {
			*e.ReadAheadFile = name
		}
		return err
	}
	flags := 0
	if e.Beneath {
		flags = moveMountBeneath
	}
	mount := func() error {
		return mountMoved("erofs", e.Target, options, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOATIME|powerless, flags, create)
	}
	err := mount()
	for try := time.Duration(1); errors.Is(err, errWhichBDI) && try <= 30; try++ {
		time.Sleep(try * time.Millisecond)
		err = mount()
	}
	if err == nil {
		return nil
	}
	// Filesystems whose files the kernel does not read page by page say the
	// same as a kernel that cannot do it at all.
	if s, statErr := StatSpace(e.Image); statErr == nil && noErofsOn(s.Type) {
		return fmt.Errorf("%s: an image cannot be on %s; keep it on ext4, XFS or btrfs: %w", what, fsName(s.Type), err)
	}
	if errors.Is(err, unix.ENOTBLK) {
		return fmt.Errorf("%s: this kernel mounts EROFS from block devices only; file-backed mounts need Linux 6.12: %w", what, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// powerless are the attributes of mounts in which files give nobody any rights.
const powerless = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV

// Restrict takes from a mount that an earlier version has made what MountErofs gives none.
func Restrict(target string) error {
	attr := unix.MountAttr{Attr_set: powerless}
	if err := unix.MountSetattr(unix.AT_FDCWD, target, unix.AT_SYMLINK_NOFOLLOW, &attr); err != nil {
		return fmt.Errorf("mount %s anew, nosuid and nodev: %w", target, err)
	}
	return nil
}

// SetErofsDirect makes the EROFS filesystem that is mounted at target read its
// devices past the page cache, where their own filesystem can (Linux 6.15; not
// over loop devices). What it keeps of them it keeps once, in its own files'
// page cache, and a read costs no read-ahead of the device besides its own. Where
// ReadsPagesDirectly says no of a device, reads would fail.
func SetErofsDirect(target string) error {
	fs, err := unix.Fspick(unix.AT_FDCWD, target, unix.FSPICK_CLOEXEC|unix.FSPICK_SYMLINK_NOFOLLOW)
	if err != nil {
		return fmt.Errorf("read the devices of the EROFS mount %s directly: %w", target, err)
	}
	defer unix.Close(fs)
	if err = unix.FsconfigSetFlag(fs, "directio"); err == nil {
		err = unix.FsconfigReconfigure(fs)
	}
	if err != nil {
		return fmt.Errorf("read the devices of the EROFS mount %s directly: %w", target, err)
	}
	return nil
}

// ReadsPagesDirectly reports whether a file can be read past the page cache a
// page at a time. A filesystem that does not say counts as one that cannot.
func ReadsPagesDirectly(path string) (bool, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_DIOALIGN, &st); err != nil {
		return false, fmt.Errorf("statx %s: %w", path, err)
	}
	page := uint32(os.Getpagesize())
	fits := func(align uint32) bool { return align > 0 && align <= page }
	return st.Mask&unix.STATX_DIOALIGN != 0 && fits(st.Dio_mem_align) && fits(st.Dio_offset_align), nil
}

// noErofsOn reports whether a filesystem is known not to carry images.
func noErofsOn(magic int64) bool {
	return magic == unix.TMPFS_MAGIC || magic == unix.RAMFS_MAGIC || magic == unix.OVERLAYFS_SUPER_MAGIC
}

// Overlay is an overlay filesystem to be mounted.
type Overlay struct {
	Lower  []string // uppermost first; at least one
	Upper  string   // empty, together with Work: read-only
	Work   string   // empty directory on the filesystem of Upper
	Target string   // existing directory
	// Options are further ones, "name" or "name=value".
	Options []string
}

// Metacopy are options of an Overlay by which changes of metadata copy no data up, and directories can be renamed.
var Metacopy = []string{"metacopy=on", "redirect_dir=on"}

// MountOverlay mounts o.
func MountOverlay(o Overlay) error {
	what := "mount overlay at " + o.Target
	create := unix.FsconfigCreate
	rest := make([]option, 0, 2+len(o.Options))
	if o.Upper != "" {
		rest = append(rest, option{"upperdir", o.Upper, true}, option{"workdir", o.Work, true})
	}
	for _, opt := range o.Options {
		name, value, _ := strings.Cut(opt, "=")
		rest = append(rest, option{name, value, false})
	}
	options := make([]option, 0, len(o.Lower)+len(rest))
	for _, l := range o.Lower {
		options = append(options, option{"lowerdir+", l, true})
	}
	err := mountNew("overlay", o.Target, append(options, rest...), 0, create)
	if errors.Is(err, unix.EINVAL) && !slices.ContainsFunc(o.Lower, func(l string) bool { return strings.ContainsAny(l, `:\,`) }) {
		// lowerdir+ is new in Linux 6.8. The older option is a list, in which
		// some characters would need escapes that differ between kernels.
		err = mountNew("overlay", o.Target, append([]option{{"lowerdir", strings.Join(o.Lower, ":"), false}}, rest...), 0, create)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// option is one call of fsconfig; without a value it is a flag.
type option struct {
	name, value string
	path        bool // value is the path of something that exists
}

// moveMountBeneath is MOVE_MOUNT_BENEATH of move_mount(2).
const moveMountBeneath = 0x200

// maxOption is the longest value that fsconfig takes, in bytes.
const maxOption = 255

// mountNew makes a filesystem by the calls that are new since Linux 5.2, and
// attaches it to target.
func mountNew(fstype, target string, options []option, attrs int, create func(fs int) error) error {
	return mountMoved(fstype, target, options, attrs, 0, create)
}

// mountMoved is mountNew with flags of move_mount(2).
func mountMoved(fstype, target string, options []option, attrs, move int, create func(fs int) error) error {
	fs, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("fsopen %s: %w", fstype, err)
	}
	defer unix.Close(fs)
	for _, o := range options {
		if o.path && len(o.value) > maxOption {
			fd, err := unix.Open(o.value, unix.O_PATH|unix.O_CLOEXEC, 0)
			if err != nil {
				return fmt.Errorf("option %s: %w", o.name, &os.PathError{Op: "open", Path: o.value, Err: err})
			}
			defer unix.Close(fd)
			o.value = fmt.Sprintf("/proc/self/fd/%d", fd)
		}
		if o.value == "" {
			err = unix.FsconfigSetFlag(fs, o.name)
		} else {
			err = unix.FsconfigSetString(fs, o.name, o.value)
		}
		if err != nil {
			return withLog(fs, fmt.Errorf("option %s=%s: %w", o.name, o.value, err))
		}
	}
	if err := create(fs); err != nil {
		return withLog(fs, fmt.Errorf("create: %w", err))
	}
	mnt, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attrs)
	if err != nil {
		return withLog(fs, fmt.Errorf("fsmount: %w", err))
	}
	defer unix.Close(mnt)
	if err := unix.MoveMount(mnt, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH|move); err != nil {
		return fmt.Errorf("move_mount: %w", err)
	}
	return nil
}

// withLog adds the messages that the kernel left in the filesystem context.
func withLog(fs int, err error) error {
	var buf [4096]byte
	for {
		// Each read returns one message, "e text" for an error; ENODATA at the end.
		n, readErr := unix.Read(fs, buf[:])
		if readErr != nil || n <= 0 {
			return err
		}
		_, text, _ := strings.Cut(strings.TrimSpace(string(buf[:n])), " ")
		err = fmt.Errorf("%w: %s", err, text)
	}
}

const bdiDir = "/sys/class/bdi"

// bdiCreate makes superblocks of this process one by one, so that the bdi that
// appears is known to be the new one's.
var bdiCreate sync.Mutex

// createNamed creates the superblock and returns the file that sets the read-ahead
// of its backing-device-info. Nothing in the kernel's interfaces leads from a mount to
// its bdi when that is not named by device numbers (EROFS: "erofs-N"): it is
// the one that was not there before. When another process made one in the same
// moment, which is whose cannot be told: errWhichBDI, and the caller makes
// another superblock.
func createNamed(fs int, fstype string) (string, error) {
	bdiCreate.Lock()
	defer bdiCreate.Unlock()
	before, err := bdis(fstype)
	if err != nil {
		return "", err
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return "", err
	}
	after, err := bdis(fstype)
	if err != nil {
		return "", err
	}
	after = slices.DeleteFunc(after, func(name string) bool { return slices.Contains(before, name) })
	if len(after) != 1 {
		return "", errWhichBDI
	}
	return filepath.Join(bdiDir, after[0], "read_ahead_kb"), nil
}

var errWhichBDI = errors.New("others mount the same just now, and which backing device is whose cannot be told: try again")

func bdis(fstype string) ([]string, error) {
	names, err := filepath.Glob(filepath.Join(bdiDir, fstype+"-*"))
	if err != nil {
		return nil, err
	}
	for i := range names {
		names[i] = filepath.Base(names[i])
	}
	return names, nil
}

// Unmount unmounts target. With lazy it is detached at once, and goes when its
// last user does; without, a busy mount is an EBUSY. Symbolic links are not
// followed.
func Unmount(target string, lazy bool) error {
	flags := unix.UMOUNT_NOFOLLOW
	if lazy {
		flags |= unix.MNT_DETACH
	}
	if err := unix.Unmount(target, flags); err != nil {
		return fmt.Errorf("unmount %s: %w", target, err)
	}
	return nil
}

// Mount is one mount of this mount namespace.
type Mount struct {
	ID, Parent int
	Target     string
	Type       string // of filesystem, e.g. "erofs"
	Source     string // EROFS: the image's path, as it was given
	Options    string // of the filesystem: for overlay lowerdir=... and so on
	Minor      int    // number of its device
}

// Mounts lists the mounts at or below dir, in the order in which the kernel
// lists them: what is mounted over something comes after it.
func Mounts(dir string) ([]Mount, error) {
	infos, err := mountinfo.GetMounts(mountinfo.PrefixFilter(filepath.Clean(dir)))
	if err != nil {
		return nil, fmt.Errorf("list mounts below %s: %w", dir, err)
	}
	mounts := make([]Mount, len(infos))
	for i, m := range infos {
		mounts[i] = Mount{ID: m.ID, Parent: m.Parent, Target: m.Mountpoint, Type: m.FSType, Source: m.Source, Options: m.VFSOptions, Minor: m.Minor}
	}
	return mounts, nil
}

// Space is how much room the filesystem of a path has.
type Space struct {
	Size, Free int64  // bytes; Free is what is left for ordinary users
	Files      uint64 // free inodes; 0 where the filesystem has no limit
	Type       int64  // magic number, as statfs(2) gives it
}

// StatSpace returns the room of the filesystem that holds path.
func StatSpace(path string) (Space, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return Space{}, fmt.Errorf("statfs %s: %w", path, err)
	}
	return Space{
		Size:  int64(st.Blocks) * st.Bsize,
		Free:  int64(st.Bavail) * st.Bsize,
		Files: st.Ffree,
		Type:  st.Type,
	}, nil
}
