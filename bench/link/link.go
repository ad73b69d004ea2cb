// Package link joins two network namespaces by an emulated wide-area link, so
// that a registry and a worker on one machine are as far apart as one likes.
//
// A link without rate, delay and loss is a pair of the kernel's virtual Ethernet devices
// (see wire). Otherwise each namespace has a TUN device; what leaves one enters the other later:
//
//	cloud: foil0 ─▶ admit ─▶ queue (Rate, Queue) ─▶ line (RTT/2) ─▶ foil0 :edge
//	                  └─ drop: Loss, or the queue is full
//
// Only whole packets are touched: handshakes, slow start, pacing, queueing
// delay and retransmission are the kernel's own. The devices offer checksum and
// TCP segmentation offload, so that the kernel hands over packets of up to
// 64 KiB, each standing for many of MTU size; such a packet is charged to rate,
// queue and loss as the segments that it stands for, and split where they part.
// That is what lets one core carry gigabits.
//
// What is counted and charged is IP packets; no Ethernet framing is added.
//
// Both namespaces have their own loopback, no IPv6, TCP buffers that may grow
// to 64 MiB, and no memory of earlier connections (tcp_no_metrics_save), so
// that one run does not help the next.
//
// It needs root, and /dev/net/tun.
package link

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"sync"
	"time"
)

// Side is one end of a link.
type Side int

const (
	Cloud Side = iota // where the registry is
	Edge              // where the worker is
)

// Other is the far side.
func (s Side) Other() Side { return 1 - s }

// Options describe a link. The zero value is one without limits or delay.
type Options struct {
	// RTT is the round-trip time that the link adds, half of it each way.
	RTT time.Duration
	// Rate is each direction's, in bits a second; 0 is no limit.
	Rate int64
	// Queue is how many bytes may wait for the line, in each direction; what
	// exceeds it is dropped (drop tail). 0 is one round trip's worth, at least
	// 64 full packets. Without a Rate nothing waits.
	Queue int64
	// Loss is the probability, 0 to 1, that a packet is lost; Seed makes the
	// losses of a run the same ones as those of another.
	Loss float64
	Seed uint64
	// Names are those of the namespaces, "cloud" and "edge" if empty. The
	// kernel's names have a prefix that makes them unique, see Namespace.
	Names [2]string
	// Addresses are those of both sides, IPv4 in one subnet; 192.0.2.1/24 and
	// 192.0.2.2/24 (RFC 5737) if zero.
	Addresses [2]netip.Prefix
	// MTU is 1500 if 0.
	MTU int
}

func (o Options) withDefaults() (Options, error) {
	for i, name := range []string{"cloud", "edge"} {
		if o.Names[i] == "" {
			o.Names[i] = name
		}
	}
	for i, prefix := range []string{"192.0.2.1/24", "192.0.2.2/24"} {
		if !o.Addresses[i].IsValid() {
			o.Addresses[i] = netip.MustParsePrefix(prefix)
		}
		if !o.Addresses[i].Addr().Is4() {
			return o, fmt.Errorf("link: address %v: only IPv4 is emulated", o.Addresses[i])
		}
	}
	if o.MTU == 0 {
		o.MTU = 1500
	}
	if o.Queue == 0 {
		o.Queue = max(o.Rate/8*int64(o.RTT)/int64(time.Second), 64*int64(o.MTU))
	}
	if o.RTT < 0 || o.Rate < 0 || o.Queue < int64(o.MTU) || o.Loss < 0 || o.Loss > 1 {
		return o, fmt.Errorf("link: RTT %v, rate %d, queue %d, loss %v: out of range", o.RTT, o.Rate, o.Queue, o.Loss)
	}
	return o, nil
}

// Link is a running link. Close it.
type Link struct {
	options Options
	ns      [2]*namespace
	tun     [2]*os.File
	pipe    [2]*pipe // pipe[s] carries what side s sends
	wire    *wire    // in place of both, if nothing is emulated
	capture *capture
	running sync.WaitGroup
	close   func() error // once
	unwatch func() bool
}

// New makes the namespaces and joins them. When ctx ends the link is closed,
// so a program that turns signals into the end of ctx leaves nothing behind;
// what a killed program left is removed by the next New.
func New(ctx context.Context, options Options) (_ *Link, err error) {
	options, err = options.withDefaults()
	if err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("link: network namespaces need root")
	}
	collect()
	l := &Link{options: options, capture: newCapture(options.RTT)}
	l.close = sync.OnceValue(l.shutdown)
	defer func() {
		if err != nil {
			l.Close()
		}
	}()
	for side := range l.ns {
		if l.ns[side], err = newNamespace(options.Names[side]); err != nil {
			return nil, err
		}
	}
	if options.Rate == 0 && options.RTT == 0 && options.Loss == 0 {
		if l.wire, err = newWire(l.ns, options, l.capture); err != nil {
			return nil, err
		}
		l.running.Go(l.wire.watch)
		l.unwatch = context.AfterFunc(ctx, func() { l.Close() })
		return l, nil
	}
	for side := range l.ns {
		if l.tun[side], err = openTUN(l.ns[side], options.Addresses[side], options.MTU); err != nil {
			return nil, err
		}
	}
	for side := range l.pipe {
		if l.pipe[side], err = newPipe(options, uint64(side), l.tun[side], l.tun[1-side]); err != nil {
			return nil, err
		}
	}
	l.pipe[Edge].sent, l.pipe[Cloud].received = l.capture.sent, l.capture.received
	for _, p := range l.pipe {
		l.running.Go(p.read)
		l.running.Go(p.deliver)
	}
	l.unwatch = context.AfterFunc(ctx, func() { l.Close() })
	return l, nil
}

// Close stops the link and removes the namespaces' names. Processes that run
// in a namespace keep it, cut off, until they end: end them first.
func (l *Link) Close() error {
	if l.unwatch != nil {
		l.unwatch()
	}
	return l.close()
}

func (l *Link) shutdown() error {
	if l.wire != nil {
		l.wire.stop()
	}
	for _, p := range l.pipe {
		if p != nil {
			p.stop()
		}
	}
	l.running.Wait()
	var errs []error
	if l.wire != nil {
		errs = append(errs, l.wire.close(), unplug(l.ns[Edge]))
	}
	for _, p := range l.pipe {
		if p != nil {
			errs = append(errs, p.close())
		}
	}
	for side := range l.ns {
		if l.tun[side] != nil {
			errs = append(errs, l.tun[side].Close())
		}
		if l.ns[side] != nil {
			errs = append(errs, l.ns[side].remove())
		}
	}
	return errors.Join(errs...)
}

// Addr is the address of a side.
func (l *Link) Addr(side Side) netip.Addr { return l.options.Addresses[side].Addr() }

// Namespace is the path of a side's namespace, for nsenter --net=PATH. The last
// element of it is what `ip netns` calls it.
func (l *Link) Namespace(side Side) string { return l.ns[side].path }

// Do runs fn in a side's network namespace: sockets opened by fn, in fn's own
// goroutine, belong to it wherever they are used later.
func (l *Link) Do(side Side, fn func() error) error { return l.ns[side].do(fn) }

// Command is a command that will run in a side's network namespace; all other
// namespaces, mounts above all, stay the caller's (`ip netns exec` would give it
// private mounts). The process keeps its ID when it becomes name.
func (l *Link) Command(ctx context.Context, side Side, name string, args ...string) *exec.Cmd {
	path, err := exec.LookPath(name)
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + l.ns[side].path, "--", path}, args...)...)
	if err != nil {
		cmd.Err = err
	}
	return cmd
}

// Start starts a command in a side's network namespace, as Command's do once they
// run, but at once: no program comes before it that is read from the disk first,
// and whose time would be counted as the command's.
func (l *Link) Start(side Side, cmd *exec.Cmd) error { return l.Do(side, cmd.Start) }

// DialContext connects from a side to an IP address and port.
func (l *Link) DialContext(ctx context.Context, side Side, network, address string) (conn net.Conn, err error) {
	err = l.Do(side, func() error {
		var d net.Dialer
		conn, err = d.DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// Listen listens at a side's IP address and port.
func (l *Link) Listen(side Side, network, address string) (listener net.Listener, err error) {
	err = l.Do(side, func() error {
		listener, err = net.Listen(network, address)
		return err
	})
	return listener, err
}

// Cut ends all TCP connections of the edge with the cloud: both ends learn of it at once, as
// from a proxy that is restarted. It needs CONFIG_INET_DIAG_DESTROY, which
// distributions' kernels have.
func (l *Link) Cut(ctx context.Context) error {
	cmd := l.Command(ctx, Edge, "ss", "--kill", "--no-header", "--tcp", "dst", l.Addr(Cloud).String())
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("link: cut the connections: %w: %s", err, bytes.TrimSpace(out))
	}
	if len(bytes.TrimSpace(out)) == 0 {
		return errors.New("link: cut the connections: there is none, or the kernel cannot (CONFIG_INET_DIAG_DESTROY)")
	}
	return nil
}

// Stats count one direction since New.
type Stats struct {
	Packets int64 // of at most MTU size, that arrived at the far side
	Bytes   int64 // of them, IP headers included
	Dropped int64 // packets for which the queue had no room
	Lost    int64 // packets lost by chance, as Options.Loss says
	// Late is by how much the most belated packet came too late, because the
	// machine had no time for the emulator.
	Late time.Duration
}

// Stats says what became of what a side sent.
func (l *Link) Stats(from Side) Stats {
	if l.wire != nil {
		return l.wire.stats(from)
	}
	return l.pipe[from].stats()
}

// Capture counts the edge's conversations with the cloud since New.
func (l *Link) Capture() Capture {
	if l.wire != nil {
		l.wire.count()
	}
	return l.capture.now()
}

// Free lets packets pass without a limit of the rate, or holds it again. Delay and
// losses stay. It is for what lies between two measurements.
func (l *Link) Free(free bool) {
	for _, p := range l.pipe {
		if p != nil {
			p.free.Store(free)
		}
	}
}

// Options are those of New, with the defaults filled in.
func (l *Link) Options() Options { return l.options }
