package link

import (
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// The device's name, the same in each namespace.
const deviceName = "foil0"

// From linux/if_tun.h: what user space takes from the kernel unfinished.
const (
	tunChecksum = 0x01 // TUN_F_CSUM
	tunTSO4     = 0x02 // TUN_F_TSO4
)

// openTUN makes a TUN device in ns and brings it up. Every packet that is read
// or written has a virtio_net_hdr before it, see packet.go.
func openTUN(ns *namespace, address netip.Prefix, mtu int) (tun *os.File, err error) {
	err = ns.do(func() error {
		// The namespace at open is the device's.
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open /dev/net/tun: %w", err)
		}
		ifr, err := unix.NewIfreq(deviceName)
		if err == nil {
			ifr.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
			err = unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr)
		}
		if err != nil {
			unix.Close(fd)
			return fmt.Errorf("TUNSETIFF: %w", err)
		}
		// Only now: a descriptor without a device polls as broken.
		tun = os.NewFile(uintptr(fd), deviceName)
		if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, tunChecksum|tunTSO4); err != nil {
			return fmt.Errorf("TUNSETOFFLOAD: %w", err)
		}
		// The queue that drops is ours; the device's own, in packets of
		// up to 64 KiB, must never be what is full.
		return bringUp(address, mtu, ioctl{"SIOCSIFTXQLEN", unix.SIOCSIFTXQLEN, func(ifr *unix.Ifreq) { ifr.SetUint32(10000) }})
	})
	if err != nil {
		if tun != nil {
			tun.Close()
		}
		return nil, fmt.Errorf("link: TUN device in %s: %w", ns.path, err)
	}
	return tun, nil
}

// bringUp gives the device of the calling thread's namespace its address and whatever else is asked
// for, and brings it up.
func bringUp(address netip.Prefix, mtu int, more ...ioctl) error {
	ip, mask := address.Addr().As4(), [4]byte{}
	for i := range address.Bits() {
		mask[i/8] |= 1 << (7 - i%8)
	}
	list := append([]ioctl{
		{"SIOCSIFADDR", unix.SIOCSIFADDR, func(ifr *unix.Ifreq) { ifr.SetInet4Addr(ip[:]) }},
		{"SIOCSIFNETMASK", unix.SIOCSIFNETMASK, func(ifr *unix.Ifreq) { ifr.SetInet4Addr(mask[:]) }},
		{"SIOCSIFMTU", unix.SIOCSIFMTU, func(ifr *unix.Ifreq) { ifr.SetUint32(uint32(mtu)) }},
	}, more...)
	return ioctls(deviceName, append(list, ioctl{"SIOCSIFFLAGS", unix.SIOCSIFFLAGS, func(ifr *unix.Ifreq) { ifr.SetUint16(unix.IFF_UP) }})...)
}

type ioctl struct {
	name    string
	request uint
	set     func(*unix.Ifreq)
}

// ioctls sets a device of the calling thread's namespace.
func ioctls(device string, list ...ioctl) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for _, c := range list {
		ifr, err := unix.NewIfreq(device)
		if err != nil {
			return err
		}
		c.set(ifr)
		if err := unix.IoctlIfreq(fd, c.request, ifr); err != nil {
			return fmt.Errorf("%s %s: %w", c.name, device, err)
		}
	}
	return nil
}

func setUp(device string) error {
	return ioctls(device, ioctl{"SIOCSIFFLAGS", unix.SIOCSIFFLAGS, func(ifr *unix.Ifreq) { ifr.SetUint16(unix.IFF_UP) }})
}
