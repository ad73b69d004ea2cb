package kernel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// FirstFlightFix is what to do where a process may not do this.
const FirstFlightFix = "give foil CAP_BPF and CAP_NET_ADMIN where a cgroup2 is mounted at its place (Linux 5.15), or set the window of the route (ip route change ... initcwnd N); --first-rate 0 is content with Linux's"

const (
	// linuxFlight is how many packets Linux sends before anything was acknowledged (RFC 6928).
	linuxFlight = 10
	// mostFlight bounds what FirstFlight makes of that: 4 MiB.
	mostFlight = 2900
	// packetBytes are those of a packet on Ethernet, without headers.
	packetBytes = 1448
)

// FirstFlight has each connection that l accepts send before anything was acknowledged what a path of so many bytes a second
// holds: rate times the round trip of the handshake, up to 4 MiB, and no less than what the route says, which is 10 packets unless
// somebody has set it. No socket option does that, only a BPF program of the process's cgroup (version 2), or the route. The program
// looks at connections of l's port and network alone. It goes when what is returned is closed, and with the process in any case.
//
// Errors: unix.EPERM without CAP_BPF and CAP_NET_ADMIN; an error where no cgroup2 is mounted, or before Linux 5.15.
func FirstFlight(l *net.TCPListener, rate int64) (io.Closer, error) {
	c, err := firstFlight(l, rate)
	if err != nil {
		return nil, fmt.Errorf("larger first flight: %w", err)
	}
	return c, nil
}

func probeFirstFlight(ctx context.Context, _ string) (string, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	c, err := FirstFlight(l.(*net.TCPListener), 1e6)
	if err != nil {
		return "", err
	}
	return "", c.Close()
}

func firstFlight(l *net.TCPListener, rate int64) (io.Closer, error) {
	raw, err := l.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cookie uint64
	cerr := raw.Control(func(fd uintptr) {
		cookie, err = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	})
	if err := errors.Join(cerr, err); err != nil {
		return nil, fmt.Errorf("which network it listens in: %w", err)
	}
	dir, err := ownCgroup2()
	if err != nil {
		return nil, err
	}
	group, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer group.Close()
	program, err := loadSockOps(firstFlightProgram(cookie, l.Addr().(*net.TCPAddr).Port, rate))
	if err != nil {
		return nil, err
	}
	defer program.Close()
	// The link goes when its last descriptor does, and the program with it.
	attr := struct{ program, group, kind, flags uint32 }{uint32(program.Fd()), uint32(group.Fd()), unix.BPF_CGROUP_SOCK_OPS, 0}
	link, err := bpf(unix.BPF_LINK_CREATE, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	if err != nil {
		return nil, fmt.Errorf("attach a BPF program to %s: %w", dir, err)
	}
	return link, nil
}

// bpfInstruction is one instruction, as the kernel reads it.
type bpfInstruction struct {
	code   uint8
	to     uint8 // register, and in the upper half that from which it comes
	offset int16
	value  int32
}

// firstFlightProgram sets the initial window of what is accepted on a port of a network:
//
//	if op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB && local_port == port && netns_cookie == cookie {
//		packets = srtt_us / divisor // srtt_us is eight times the round trip
//		if packets > linuxFlight {
//			bpf_setsockopt(IPPROTO_TCP, TCP_BPF_IW, min(packets, mostFlight))
//		}
//	}
//	return 1
func firstFlightProgram(cookie uint64, port int, rate int64) []bpfInstruction {
	const (
		offsetOp, offsetPort, offsetTrip = 0, 68, 80 // of struct bpf_sock_ops; all in the host's order
		helperSetsockopt                 = 49
		helperNetnsCookie                = 122
		load, store                      = unix.BPF_LDX | unix.BPF_MEM | unix.BPF_W, unix.BPF_STX | unix.BPF_MEM | unix.BPF_W
		load64                           = unix.BPF_LD | unix.BPF_IMM | unix.BPF_DW // two instructions
		set, copied                      = unix.BPF_ALU64 | unix.BPF_MOV | unix.BPF_K, unix.BPF_ALU64 | unix.BPF_MOV | unix.BPF_X
		add, divide                      = unix.BPF_ALU64 | unix.BPF_ADD | unix.BPF_K, unix.BPF_ALU64 | unix.BPF_DIV | unix.BPF_K
		unless, unlessEqual              = unix.BPF_JMP | unix.BPF_JNE | unix.BPF_K, unix.BPF_JMP | unix.BPF_JNE | unix.BPF_X
		ifAtMost                         = unix.BPF_JMP | unix.BPF_JLE | unix.BPF_K
		call, exit                       = unix.BPF_JMP | unix.BPF_CALL, unix.BPF_JMP | unix.BPF_EXIT
		r0, r1, r2, r3, r4, r5, r6, r7   = 0, 1, 2, 3, 4, 5, 6, 7
		fp                               = 10
		from                             = 4 // shift
	)
	divisor := min(max(1, 8e6*packetBytes/max(1, rate)), math.MaxInt32)
	return []bpfInstruction{
		{copied, r6 | r1<<from, 0, 0},
		{load, r2 | r1<<from, offsetOp, 0},
		{unless, r2, 19, unix.BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB},
		{load, r2 | r1<<from, offsetPort, 0},
		{unless, r2, 17, int32(port)},
		{call, 0, 0, helperNetnsCookie},
		{load64, r2, 0, int32(uint32(cookie))},
		{0, 0, 0, int32(uint32(cookie >> 32))},
		{unlessEqual, r0 | r2<<from, 13, 0},
		{load, r7 | r6<<from, offsetTrip, 0},
		{divide, r7, 0, int32(divisor)},
		{ifAtMost, r7, 10, linuxFlight},
		{ifAtMost, r7, 1, mostFlight},
		{set, r7, 0, mostFlight},
		{store, fp | r7<<from, -4, 0},
		{copied, r1 | r6<<from, 0, 0},
		{set, r2, 0, unix.IPPROTO_TCP},
		{set, r3, 0, unix.TCP_BPF_IW},
		{copied, r4 | fp<<from, 0, 0},
		{add, r4, 0, -4},
		{set, r5, 0, 4},
		{call, 0, 0, helperSetsockopt},
		{set, r0, 0, 1},
		{exit, 0, 0, 0},
	}
}

// loadSockOps has the kernel check and take a program for events of sockets.
func loadSockOps(instructions []bpfInstruction) (*os.File, error) {
	license := []byte("none\x00") // none of the helpers asks for one
	said := make([]byte, 16<<10)
	attr := struct {
		kind, count           uint32
		instructions, license uint64
		level, size           uint32
		said                  uint64
		version, flags        uint32
		name                  [16]byte
		device, attach        uint32
	}{
		kind: unix.BPF_PROG_TYPE_SOCK_OPS, count: uint32(len(instructions)),
		instructions: uint64(uintptr(unsafe.Pointer(&instructions[0]))), license: uint64(uintptr(unsafe.Pointer(&license[0]))),
		level: 1, size: uint32(len(said)), said: uint64(uintptr(unsafe.Pointer(&said[0]))),
		attach: unix.BPF_CGROUP_SOCK_OPS,
	}
	copy(attr.name[:], "foil_flight")
	f, err := bpf(unix.BPF_PROG_LOAD, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	runtime.KeepAlive(instructions)
	runtime.KeepAlive(license)
	runtime.KeepAlive(said)
	if err != nil {
		return nil, fmt.Errorf("load a BPF program: %w: %s", err, unix.ByteSliceToString(said))
	}
	return f, nil
}

// bpf is the system call, of a command that makes a descriptor.
func bpf(command uintptr, attr unsafe.Pointer, size uintptr) (*os.File, error) {
	fd, _, errno := unix.Syscall(unix.SYS_BPF, command, uintptr(attr), size)
	if errno != 0 {
		return nil, errno
	}
	return os.NewFile(fd, "bpf"), nil
}
