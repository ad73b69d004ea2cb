package tcp

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// bbr is a TCP connection that BBR controls.
type bbr struct{ raw syscall.RawConn }

func (b bbr) inUse() bool {
	var name string
	var err error
	cerr := b.raw.Control(func(fd uintptr) {
		name, err = unix.GetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION)
	})
	return cerr == nil && err == nil && name == "bbr"
}

// Gains are fractions of 256 (include/uapi/linux/inet_diag.h, tcp_bbr_info). That of the
// rate is 2.89 in the startup, 0 before anything has been acknowledged, below 1 while
// what was queued is drained, and 0.75 to 1.25 from then on. That of the window is 1
// while the shortest round trip is looked for.
const bbrUnit = 256

func (b bbr) state() (s pathState, err error) {
	var info *unix.TCPInfo
	var cc *unix.TCPBBRInfo
	cerr := b.raw.Control(func(fd uintptr) {
		if info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			cc, err = unix.GetsockoptTCPCCBBRInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_CC_INFO)
		}
	})
	if cerr != nil {
		return s, cerr
	}
	if err != nil {
		return s, err
	}
	s.rate = uint64(cc.Bw_hi)<<32 | uint64(cc.Bw_lo)
	s.trip = time.Duration(info.Rtt) * time.Microsecond
	s.least = time.Duration(info.Min_rtt) * time.Microsecond
	s.sent, s.resent = info.Data_segs_out, info.Total_retrans
	switch {
	case cc.Pacing_gain > 2*bbrUnit, cc.Pacing_gain == 0:
		s.phase = starting
	case cc.Cwnd_gain == bbrUnit:
		s.phase = pausing
	default:
		s.phase = started
	}
	return s, nil
}

func (b bbr) limit(rate uint64) (err error) {
	cerr := b.raw.Control(func(fd uintptr) {
		err = unix.SetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, rate)
	})
	if cerr != nil {
		return cerr
	}
	return err
}

func (b bbr) idle() (idle bool, err error) {
	cerr := b.raw.Control(func(fd uintptr) {
		var info *unix.TCPInfo
		if info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			idle = info.Unacked == 0
		}
	})
	if cerr != nil {
		return false, cerr
	}
	return idle, err
}

func (b bbr) cork(on bool) (err error) {
	value := 0
	if on {
		value = 1
	}
	cerr := b.raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_CORK, value)
	})
	if cerr != nil {
		return cerr
	}
	return err
}
