package kernel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// The little of the FUSE protocol (7.31 and later, Linux 5.4) that a read-only
// directory of regular files takes. The kernel writes a request as a header of
// 40 bytes and a body that depends on the opcode; the server answers with a
// header of 16 bytes, which names the request by its unique number, and a body.
// All numbers are in the host's byte order. Whoever holds the descriptor of
// /dev/fuse may answer, whichever process read the request.

// FuseOp is what a request asks for.
type FuseOp uint32

// Opcodes.
const (
	FuseLookup      FuseOp = 1
	FuseForget      FuseOp = 2 // no answer
	FuseGetattr     FuseOp = 3
	FuseOpen        FuseOp = 14
	FuseRead        FuseOp = 15
	FuseStatfs      FuseOp = 17
	FuseRelease     FuseOp = 18
	FuseInit        FuseOp = 26
	FuseOpendir     FuseOp = 27
	FuseReaddir     FuseOp = 28
	FuseReleasedir  FuseOp = 29
	FuseInterrupt   FuseOp = 36 // no answer, or EAGAIN: tell me again
	FuseDestroy     FuseOp = 38
	FuseBatchForget FuseOp = 42 // no answer
)

const (
	fuseInHeader  = 40
	fuseOutHeader = 16
	fuseAttrLen   = 88
	fuseReadIn    = 40

	// FuseRoot is the node of the directory that is mounted.
	FuseRoot = 1
	// FuseReadHeader is how many bytes of an answer to FuseRead come before
	// the data.
	FuseReadHeader = fuseOutHeader
	// FuseRequestLen is a buffer that every request fits in. The kernel
	// refuses to write into a shorter one.
	FuseRequestLen = 8192
	// FuseMaxRead is the most that one FuseRead asks for, in bytes.
	FuseMaxRead = 256 << 10

	// FuseBackground is how many requests that nobody waits for by name can be without an answer, the
	// most that the protocol can say: beyond, the kernel holds back all further ones, whatever file they read.
	FuseBackground = 1<<16 - 1

	fuseMajor    = 7
	fuseMinMinor = 31
	fuseMaxMinor = 40 // what this code was written against (Linux 6.9)
	fuseMaxWrite = 4096

	fuseAsyncRead = 1 << 0
	fuseAsyncDIO  = 1 << 15
	fuseParallel  = 1 << 18 // lookups in one directory
	fuseMaxPages  = 1 << 22
	fuseHasResend = 1 << 7 // of flags2

	// The kernel is not to keep pages of the file: who reads it keeps them.
	fopenDirectIO = 1 << 0
	fopenNoflush  = 1 << 5

	fuseNotifyInvalInode = 2
	fuseNotifyInvalEntry = 3
	fuseNotifyResend     = 7
)

// FuseRequest is one request. Which of the fields after PID are there depends
// on Op.
type FuseRequest struct {
	Op     FuseOp
	Unique uint64
	Node   uint64
	PID    uint32 // of the thread that waits; 0: none, or none that can be seen from here

	Name      string   // FuseLookup
	Offset    uint64   // FuseRead
	Size      uint32   // FuseRead: at most FuseMaxRead
	Flags     uint32   // FuseOpen: of open(2)
	Interrupt uint64   // FuseInterrupt: the unique number of the request whose reader has a signal
	Forget    []uint64 // FuseForget, FuseBatchForget: nodes that the kernel has dropped

	minor         uint32 // FuseInit
	readAhead     uint32
	flags, flags2 uint32
}

// ParseFuseRequest decodes one request of the kernel. Opcodes that it does not
// know have no body for it.
func ParseFuseRequest(b []byte) (FuseRequest, error) {
	le := binary.NativeEndian
	if len(b) < fuseInHeader {
		return FuseRequest{}, fmt.Errorf("a FUSE request of %d bytes", len(b))
	}
	r := FuseRequest{Op: FuseOp(le.Uint32(b[4:])), Unique: le.Uint64(b[8:]), Node: le.Uint64(b[16:]), PID: le.Uint32(b[32:])}
	if n := le.Uint32(b); uint64(n) != uint64(len(b)) {
		return r, fmt.Errorf("a FUSE request of %d bytes says that it has %d", len(b), n)
	}
	body := b[fuseInHeader:]
	least := map[FuseOp]int{
		FuseForget: 8, FuseOpen: 8, FuseRead: fuseReadIn, FuseInit: 16, FuseInterrupt: 8, FuseBatchForget: 8, FuseLookup: 2,
	}[r.Op]
	if len(body) < least {
		return r, fmt.Errorf("a FUSE request with opcode %d has a body of %d bytes", r.Op, len(body))
	}
	switch r.Op {
	case FuseLookup:
		n := bytes.IndexByte(body, 0)
		if n <= 0 {
			return r, errors.New("a FUSE request looks nothing up")
		}
		r.Name = string(body[:n])
	case FuseForget:
		r.Forget = []uint64{r.Node}
	case FuseBatchForget:
		n := int(le.Uint32(body))
		if uint64(len(body)-8) < 16*uint64(n) {
			return r, fmt.Errorf("a FUSE request that forgets %d nodes has a body of %d bytes", n, len(body))
		}
		for i := range n {
			r.Forget = append(r.Forget, le.Uint64(body[8+16*i:]))
		}
	case FuseOpen:
		r.Flags = le.Uint32(body)
	case FuseRead:
		r.Offset, r.Size = le.Uint64(body[8:]), le.Uint32(body[16:])
		if r.Size > FuseMaxRead || r.Offset > 1<<63-1-FuseMaxRead {
			return r, fmt.Errorf("a FUSE request reads %d bytes at %d", r.Size, r.Offset)
		}
	case FuseInterrupt:
		r.Interrupt = le.Uint64(body)
	case FuseInit:
		if major := le.Uint32(body); major != fuseMajor {
			return r, fmt.Errorf("the kernel speaks FUSE %d.%d", major, le.Uint32(body[4:]))
		}
		r.minor, r.readAhead, r.flags = le.Uint32(body[4:]), le.Uint32(body[8:]), le.Uint32(body[12:])
		if r.minor < fuseMinMinor {
			return r, fmt.Errorf("the kernel speaks FUSE %d.%d; %d.%d is wanted", fuseMajor, r.minor, fuseMajor, fuseMinMinor)
		}
		if r.flags&fuseInitExt != 0 && len(body) >= 20 {
			r.flags2 = le.Uint32(body[16:])
		}
	}
	return r, nil
}

// fuseLength is how long the request at the beginning of b says it is, at most
// all of b.
func fuseLength(b []byte) int {
	return int(min(uint64(binary.NativeEndian.Uint32(b)), uint64(len(b))))
}

// FuseFile is what the kernel learns about a file, or the directory.
type FuseFile struct {
	Node uint64
	Size int64
	Dir  bool
}

// appendHeader begins an answer whose body has n bytes.
func appendHeader(dst []byte, unique uint64, errno unix.Errno, n int) []byte {
	le := binary.NativeEndian
	dst = le.AppendUint32(dst, uint32(fuseOutHeader+n))
	dst = le.AppendUint32(dst, uint32(-int32(errno)))
	return le.AppendUint64(dst, unique)
}

// FuseError is the answer that a request failed, or, with errno 0, that it
// succeeded and has nothing to say.
func FuseError(dst []byte, unique uint64, errno unix.Errno) []byte {
	return appendHeader(dst, unique, errno, 0)
}

// FuseReadAnswer is what comes before n bytes of data.
func FuseReadAnswer(dst []byte, unique uint64, n int) []byte {
	return appendHeader(dst, unique, 0, n)
}

// FuseInitAnswer agrees on what both sides can do.
func FuseInitAnswer(dst []byte, r FuseRequest) []byte {
	le := binary.NativeEndian
	dst = appendHeader(dst, r.Unique, 0, 64)
	dst = le.AppendUint32(dst, fuseMajor)
	dst = le.AppendUint32(dst, min(r.minor, fuseMaxMinor))
	dst = le.AppendUint32(dst, r.readAhead)
	dst = le.AppendUint32(dst, r.flags&(fuseAsyncRead|fuseAsyncDIO|fuseParallel|fuseMaxPages|fuseInitExt))
	dst = le.AppendUint16(dst, FuseBackground)
	dst = le.AppendUint16(dst, FuseBackground) // congested, which nothing here asks for
	dst = le.AppendUint32(dst, fuseMaxWrite)
	dst = le.AppendUint32(dst, 1) // time granularity, ns
	dst = le.AppendUint16(dst, FuseMaxRead/4096)
	dst = le.AppendUint16(dst, 0) // map alignment
	dst = le.AppendUint32(dst, r.flags2&fuseHasResend)
	return append(dst, make([]byte, 28)...)
}

// fuseAttrValid is for how many seconds the kernel believes attributes: they
// do not change while a node lives.
const fuseAttrValid = 3600

func appendAttr(dst []byte, f FuseFile) []byte {
	le := binary.NativeEndian
	mode, links := uint32(unix.S_IFREG|0o400), uint32(1)
	if f.Dir {
		mode, links = unix.S_IFDIR|0o500, 2
	}
	dst = le.AppendUint64(dst, f.Node)
	dst = le.AppendUint64(dst, uint64(f.Size))
	dst = le.AppendUint64(dst, uint64(f.Size+511)/512)
	dst = append(dst, make([]byte, 3*8+3*4)...) // times
	dst = le.AppendUint32(dst, mode)
	dst = le.AppendUint32(dst, links)
	dst = append(dst, make([]byte, 3*4)...) // owner, device
	dst = le.AppendUint32(dst, 4096)
	return append(dst, make([]byte, 4)...)
}

// FuseEntryAnswer answers FuseLookup. The kernel asks for the name again each
// time; the file's attributes it believes.
func FuseEntryAnswer(dst []byte, unique uint64, f FuseFile) []byte {
	le := binary.NativeEndian
	dst = appendHeader(dst, unique, 0, 40+fuseAttrLen)
	dst = le.AppendUint64(dst, f.Node)
	dst = le.AppendUint64(dst, 0) // generation
	dst = le.AppendUint64(dst, 0) // for how long the name is valid
	dst = le.AppendUint64(dst, fuseAttrValid)
	dst = le.AppendUint64(dst, 0) // nanoseconds of both
	return appendAttr(dst, f)
}

// FuseAttrAnswer answers FuseGetattr.
func FuseAttrAnswer(dst []byte, unique uint64, f FuseFile) []byte {
	le := binary.NativeEndian
	dst = appendHeader(dst, unique, 0, 16+fuseAttrLen)
	dst = le.AppendUint64(dst, fuseAttrValid)
	dst = le.AppendUint64(dst, 0)
	return appendAttr(dst, f)
}

// FuseOpenAnswer answers FuseOpen and FuseOpendir. Reads of the file pass by
// the page cache: EROFS, or whatever reads it, has its own.
func FuseOpenAnswer(dst []byte, unique uint64) []byte {
	le := binary.NativeEndian
	dst = appendHeader(dst, unique, 0, 16)
	dst = le.AppendUint64(dst, 0)
	dst = le.AppendUint32(dst, fopenDirectIO|fopenNoflush)
	return le.AppendUint32(dst, 0)
}

// FuseStatfsAnswer answers FuseStatfs.
func FuseStatfsAnswer(dst []byte, unique uint64) []byte {
	le := binary.NativeEndian
	dst = appendHeader(dst, unique, 0, 80)
	dst = append(dst, make([]byte, 5*8)...)
	dst = le.AppendUint32(dst, 4096)
	dst = le.AppendUint32(dst, 255)
	return append(dst, make([]byte, 32)...)
}

// MountFuse mounts a new FUSE filesystem, read-only, and returns its
// connection. The filesystem ends, and with it every read that waits, when the
// last descriptor of the connection is closed. Reading it is non-blocking.
func MountFuse(target string) (*os.File, error) {
	dev, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("%w (modprobe fuse loads the module)", &os.PathError{Op: "open", Path: "/dev/fuse", Err: err})
	}
	options := []option{
		{"source", "hydrofoil", false},
		{"fd", fmt.Sprint(dev), false},
		{"rootmode", "40000", false}, {"user_id", "0", false}, {"group_id", "0", false},
		{"max_read", fmt.Sprint(FuseMaxRead), false},
	}
	if label, err := (selinux{"/"}).containerFiles(); err == nil && label != "" {
		options = append(options, option{"context", label, false})
	}
	err = mountNew("fuse", target, options, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC, unix.FsconfigCreate)
	if err != nil {
		unix.Close(dev)
		return nil, fmt.Errorf("mount FUSE at %s: %w", target, err)
	}
	// Not before: what is not mounted yet polls as an error, and the runtime
	// would remember it.
	return os.NewFile(uintptr(dev), "/dev/fuse"), nil
}

// FuseResend makes the kernel send again every request that was read and not
// answered (Linux 6.9), with another unique number. EINVAL: the kernel cannot.
func FuseResend(fd int) error {
	return fuseNotify(fd, fuseNotifyResend, nil)
}

// FuseDropName makes the kernel let go of a name in the directory, and of the
// node if nothing else uses it. It may wait for a lookup that is under way.
func FuseDropName(fd int, name string) error {
	le := binary.NativeEndian
	b := le.AppendUint64(nil, FuseRoot)
	b = le.AppendUint32(b, uint32(len(name)))
	b = le.AppendUint32(b, 0)
	return fuseNotify(fd, fuseNotifyInvalEntry, append(append(b, name...), 0))
}

// FuseKnows reports whether the kernel has the node: it is open, or was.
func FuseKnows(fd int, node uint64) (bool, error) {
	le := binary.NativeEndian
	b := le.AppendUint64(nil, node)
	b = le.AppendUint64(b, ^uint64(0)) // offset -1: attributes only
	b = le.AppendUint64(b, 0)
	err := fuseNotify(fd, fuseNotifyInvalInode, b)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	return err == nil, err
}

// fuseNotify writes what is no answer: a message with unique number 0, whose
// code is where an answer has its error.
func fuseNotify(fd int, code uint32, body []byte) error {
	le := binary.NativeEndian
	b := le.AppendUint32(nil, uint32(fuseOutHeader+len(body)))
	b = le.AppendUint32(b, code)
	b = le.AppendUint64(b, 0)
	b = append(b, body...)
	for {
		_, err := unix.Write(fd, b)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("tell FUSE (notification %d): %w", code, err)
		}
		return nil
	}
}
