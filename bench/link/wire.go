package link

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// wire is a link without rate, delay and loss: a pair of virtual Ethernet devices (veth(4)), in which
// the kernel hands packets of up to 64 KiB over as they are. No emulator takes of the processors that
// both sides share. What goes by is counted from a packet socket (packet(7)) at the edge's device,
// which both directions pass before anybody receives them; it keeps their headers, and
// of what the edge sends all, which Capture reads.
type wire struct {
	tap     *os.File
	conn    syscall.RawConn
	edge    netip.Addr
	capture *capture
	epoch   time.Time

	mu     sync.Mutex
	buffer []byte
	counts [2]struct{ packets, bytes int64 } // by who has sent them
	missed int64                             // packets that the tap had no room for
}

const (
	ethernetHeader = 14
	// kept of what the edge receives: as much as the headers can be, and some payload.
	kept = ethernetHeader + 60 + 60 + 8
	// What can go by between two looks at the tap, at most: the kernel charges a packet with all of it.
	tapBuffer = 512 << 20
	// How often the tap is looked at when nobody asks.
	tapInterval = 10 * time.Millisecond
)

// newWire joins two namespaces.
func newWire(ns [2]*namespace, o Options, c *capture) (w *wire, err error) {
	cloud, edge := filepath.Base(ns[Cloud].path), filepath.Base(ns[Edge].path)
	out, err := exec.Command("ip", "link", "add", deviceName, "netns", cloud, "type", "veth", "peer", "name", deviceName, "netns", edge).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("link: make a pair of veth devices (ip of iproute2): %w: %s", err, strings.TrimSpace(string(out)))
	}
	w = &wire{edge: o.Addresses[Edge].Addr(), capture: c, epoch: time.Now(), buffer: make([]byte, ethernetHeader+maxPacket)}
	for side := range ns {
		err := ns[side].do(func() (err error) {
			if Side(side) == Edge {
				if err = w.openTap(); err != nil {
					return err
				}
			}
			return bringUp(o.Addresses[side], o.MTU)
		})
		if err != nil {
			return nil, errors.Join(fmt.Errorf("link: veth device in %s: %w", ns[side].path, err), w.close())
		}
	}
	return w, nil
}

// openTap makes the packet socket, in the namespace of the calling thread.
func (w *wire) openTap() error {
	// Without a protocol it hears nothing until it is bound.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("packet socket: %w", err)
	}
	w.tap = os.NewFile(uintptr(fd), "tap of "+deviceName)
	if w.conn, err = w.tap.SyscallConn(); err != nil {
		return err
	}
	// IPv4 only, which begins behind the Ethernet header; see linux/filter.h for the packet's type.
	const packetType = 0xfffff000 + 4
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: 12},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.ETH_P_IP, Jf: 4},
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: packetType},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.PACKET_OUTGOING, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: ethernetHeader + maxPacket},
		{Code: unix.BPF_RET | unix.BPF_K, K: kept},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
	}
	device, err := interfaceIndex(fd, deviceName)
	if err != nil {
		return err
	}
	all := uint16(unix.ETH_P_ALL)
	return errors.Join(
		os.NewSyscallError("PACKET_VNET_HDR", unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1)),
		os.NewSyscallError("SO_RCVBUFFORCE", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, tapBuffer)),
		os.NewSyscallError("SO_ATTACH_FILTER", unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})),
		os.NewSyscallError("bind", unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all<<8 | all>>8, Ifindex: device})),
	)
}

func interfaceIndex(fd int, name string) (int, error) {
	ifr, err := unix.NewIfreq(name)
	if err == nil {
		err = unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, ifr)
	}
	if err != nil {
		return 0, fmt.Errorf("SIOCGIFINDEX %s: %w", name, err)
	}
	return int(ifr.Uint32()), nil
}

// watch counts what goes by, until the tap's deadline is in the past. It looks now and then: a
// packet that goes by wakes nobody up.
func (w *wire) watch() {
	for w.conn.Read(func(uintptr) bool { return w.count() }) == nil {
		time.Sleep(tapInterval)
	}
}

// count counts what has gone by, and reports whether anything had. Whoever has received a packet finds
// it counted.
func (w *wire) count() (some bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	err := w.conn.Control(func(fd uintptr) {
		for {
			n, err := unix.Read(int(fd), w.buffer)
			if err != nil && !errors.Is(err, unix.EINTR) {
				break // EAGAIN, or that of a device that is going away
			}
			if err != nil || n < vnetHeader+ethernetHeader+20 {
				continue
			}
			some = true
			// The header of the device comes before that of Ethernet, in a packet before IP's.
			copy(w.buffer[ethernetHeader:], w.buffer[:vnetHeader])
			w.saw(w.buffer[ethernetHeader:n])
		}
		if stats, err := unix.GetsockoptTpacketStats(int(fd), unix.SOL_PACKET, unix.PACKET_STATISTICS); err == nil {
			w.missed += int64(stats.Drops)
		}
	})
	return some || err != nil
}

// saw counts a packet, whose end may be cut off behind its headers; with w.mu.
func (w *wire) saw(p packet) {
	from := Cloud
	if sender, _ := netip.AddrFromSlice(p[vnetHeader+12 : vnetHeader+16]); sender == w.edge {
		from = Edge
		w.capture.sent(p, time.Since(w.epoch))
	} else {
		w.capture.received(p)
	}
	packets, bytes := p.charge()
	w.counts[from].packets += packets
	w.counts[from].bytes += bytes
}

// charge is how many packets on the line a packet stands for, and how many bytes they have.
func (p packet) charge() (packets, bytes int64) {
	length := int64(binary.BigEndian.Uint16(p[vnetHeader+2:]))
	s := p.shape()
	if s.header == 0 {
		return 1, length
	}
	payload := length - int64(s.header)
	packets = (payload + int64(s.gso) - 1) / int64(s.gso)
	return packets, packets*int64(s.header) + payload
}

func (w *wire) stats(from Side) Stats {
	w.count()
	w.mu.Lock()
	defer w.mu.Unlock()
	return Stats{Packets: w.counts[from].packets, Bytes: w.counts[from].bytes}
}

// stop has watch end.
func (w *wire) stop() { w.tap.SetReadDeadline(time.Unix(1, 0)) }

// close is called when watch has ended. The devices go before the namespaces, which processes may keep.
func (w *wire) close() error {
	if w.tap == nil {
		return nil
	}
	w.count()
	err := w.tap.Close()
	if w.missed > 0 {
		err = errors.Join(err, fmt.Errorf("link: %d packets went by uncounted", w.missed))
	}
	return err
}

// unplug removes the pair from a namespace that has one end of it.
func unplug(ns *namespace) error {
	return ns.do(func() error {
		out, err := exec.Command("ip", "link", "delete", deviceName).CombinedOutput()
		if err != nil {
			return fmt.Errorf("link: remove %s of %s: %w: %s", deviceName, ns.path, err, strings.TrimSpace(string(out)))
		}
		return nil
	})
}
