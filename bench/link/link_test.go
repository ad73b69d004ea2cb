package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func needLink(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		t.Skipf("no TUN devices: %v", err)
	}
}

func open(t testing.TB, options Options) *Link {
	t.Helper()
	needLink(t)
	l, err := New(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// transfer moves n bytes from cloud to edge over one connection, and returns what
// TCP knows of it at the cloud.
func transfer(ctx context.Context, l *Link, n int64) (took time.Duration, info *unix.TCPInfo, err error) {
	listener, err := l.Listen(Cloud, "tcp4", l.Addr(Cloud).String()+":0")
	if err != nil {
		return 0, nil, err
	}
	defer listener.Close()
	sent := make(chan error, 1)
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			sent <- err
			return
		}
		defer conn.Close()
		tcp := conn.(*net.TCPConn)
		_, err = io.CopyN(tcp, zeros{}, n)
		err = errors.Join(err, tcp.CloseWrite())
		// The edge closes when it has everything.
		_, readErr := io.Copy(io.Discard, tcp)
		var infoErr error
		info, infoErr = tcpInfo(tcp)
		sent <- errors.Join(err, readErr, infoErr)
	}()
	began := time.Now()
	conn, err := l.DialContext(ctx, Edge, "tcp4", listener.Addr().String())
	if err != nil {
		return 0, nil, err
	}
	got, err := io.Copy(io.Discard, conn)
	took = time.Since(began)
	if err == nil && got != n {
		err = fmt.Errorf("%d bytes arrived of %d", got, n)
	}
	err = errors.Join(err, conn.Close(), <-sent)
	return took, info, err
}

func tcpInfo(conn *net.TCPConn) (info *unix.TCPInfo, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	controlErr := raw.Control(func(fd uintptr) {
		info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	})
	return info, errors.Join(controlErr, os.NewSyscallError("TCP_INFO", err))
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

// Both ends of a connection learn that it was cut, and another one can be made.
func TestCut(t *testing.T) {
	if _, err := exec.LookPath("ss"); err != nil {
		t.Skip("needs ss, of iproute2")
	}
	for _, options := range []Options{{}, {RTT: time.Millisecond, Rate: 1e9}} {
		l := open(t, options)
		if err := l.Cut(t.Context()); err == nil {
			t.Error("connections were cut, and there was none")
		}
		listener, err := l.Listen(Cloud, "tcp4", l.Addr(Cloud).String()+":0")
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		far := make(chan error, 1)
		go func() {
			conn, err := listener.Accept()
			if err == nil {
				_, err = conn.Read(make([]byte, 1))
				conn.Close()
			}
			far <- err
		}()
		conn, err := l.DialContext(t.Context(), Edge, "tcp4", listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := l.Cut(t.Context()); err != nil {
			t.Skip(err)
		}
		if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
			t.Errorf("at the near end: %v", err)
		}
		if err := <-far; err == nil || errors.Is(err, io.EOF) {
			t.Errorf("at the far end: %v", err)
		}
		if _, _, err := transfer(t.Context(), l, 1000); err != nil {
			t.Errorf("another connection: %v", err)
		}
	}
}

// A link whose rate is lifted passes in a moment what would take a minute, and holds
// its rate again when it is told so.
func TestFree(t *testing.T) {
	l := open(t, Options{RTT: 4 * time.Millisecond, Rate: 1e6})
	const n = 1e6 / 8 * 60
	l.Free(true)
	took, _, err := transfer(t.Context(), l, n)
	if err != nil {
		t.Fatal(err)
	}
	if took > 30*time.Second {
		t.Errorf("%d bytes took %v, which is what the line would need", int(n), took)
	}
	l.Free(false)
	if took, _, err = transfer(t.Context(), l, 1e6/8); err != nil {
		t.Fatal(err)
	}
	if took < 400*time.Millisecond {
		t.Errorf("a second's worth took %v: the rate is not held again", took)
	}
}

// What the emulator must never do is to be faster than the link; that it is no
// slower depends on the machine, which is for Check and the benchmark to say.
func TestNoFasterThanTheLink(t *testing.T) {
	for _, rate := range []int64{5e6, 100e6, 500e6} {
		t.Run(fmt.Sprintf("%dMbit", rate/1e6), func(t *testing.T) {
			l := open(t, Options{RTT: 20 * time.Millisecond, Rate: rate})
			rtt, err := l.measureRTT(t.Context(), 5)
			if err != nil {
				t.Fatal(err)
			}
			if rtt < 20*time.Millisecond {
				t.Errorf("round trip %v", rtt)
			}
			n := rate / 8 / 2 // half a second of it
			took, _, err := transfer(t.Context(), l, n)
			if err != nil {
				t.Fatal(err)
			}
			// Less the queue, which the line empties after the last byte.
			if least := 450 * time.Millisecond; took < least {
				t.Errorf("%d bytes in %v, want at least %v", n, took, least)
			}
			s := l.Stats(Cloud)
			if s.Bytes < n+n/1448*40 || s.Packets < n/1448 {
				t.Errorf("%d bytes were sent, but counted as %+v", n, s)
			}
			t.Logf("%d bytes in %v, %+v", n, took, s)
		})
	}
}

// A link without limits has no emulator; what goes by is counted all the same. On
// a busy machine TCP sends some of it twice, so the counts are compared with TCP's
// own. A packet that is lost on its way to the tap is not counted, but is sent again.
func TestWireCounts(t *testing.T) {
	l := open(t, Options{})
	const (
		n       = 64 << 20
		headers = 20 + 32 // of IP, and of TCP with a time stamp
		other   = 5       // packets without payload: SYN, ACK and FIN, and longer headers of SYN
	)
	began := l.Stats(Cloud)
	took, tcp, err := transfer(t.Context(), l, n)
	if err != nil {
		t.Fatal(err)
	}
	s := l.Stats(Cloud)
	packets, bytes := s.Packets-began.Packets, s.Bytes-began.Bytes
	if sent, again := int64(tcp.Segs_out), int64(tcp.Total_retrans); packets > sent+other || packets < sent-again-other {
		t.Errorf("%d packets were counted, TCP sent %d, %d of them again", packets, sent, again)
	}
	if payload := bytes - packets*headers; payload < n || payload > int64(tcp.Bytes_sent)+other*8 {
		t.Errorf("%d packets of %d bytes were counted: %d bytes of payload, of which %d arrived and TCP sent %d", packets, bytes, payload, n, tcp.Bytes_sent)
	}
	if back := l.Stats(Edge); back.Packets < 3 || back.Bytes < 40*back.Packets || back.Bytes > 100*back.Packets {
		t.Errorf("on the way back: %+v", back)
	}
	t.Logf("%d bytes in %v, %d packets, %d bytes; TCP sent %d bytes again", n, took, packets, bytes, tcp.Bytes_retrans)
}

// A queue with room for little makes TCP lose segments, also out of the middle
// of super-packets; every byte arrives all the same.
func TestSmallQueueAndLoss(t *testing.T) {
	l := open(t, Options{RTT: 4 * time.Millisecond, Rate: 50e6, Queue: 20000, Loss: 0.01, Seed: 7})
	if _, _, err := transfer(t.Context(), l, 2<<20); err != nil {
		t.Fatal(err)
	}
	s := l.Stats(Cloud)
	if s.Lost == 0 {
		t.Errorf("nothing was lost: %+v", s)
	}
	t.Logf("%+v", s)
}

// UDP packets have no congestion control: what exceeds the queue is dropped.
func TestQueueDropsTail(t *testing.T) {
	l := open(t, Options{Rate: 2e5, Queue: 10 * 1500})
	conn, err := l.DialContext(t.Context(), Cloud, "udp4", l.Addr(Edge).String()+":9")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for range 100 {
		// Nobody listens: an ICMP message makes a later write fail.
		conn.Write(make([]byte, 1472))
	}
	// 10 fit at once; room for another is made every 60 ms.
	deadline := time.Now().Add(time.Minute)
	for s := l.Stats(Cloud); s.Packets < 10 || s.Dropped < 20; s = l.Stats(Cloud) {
		if time.Now().After(deadline) {
			t.Fatalf("of 100 packets at once: %+v", s)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestCommand(t *testing.T) {
	l := open(t, Options{})
	out, err := l.Command(t.Context(), Edge, "ip", "-o", "-4", "address").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if !strings.Contains(string(out), "192.0.2.2/24") || !strings.Contains(string(out), "127.0.0.1/8") {
		t.Errorf("addresses at the edge:\n%s", out)
	}
	out, err = l.Command(t.Context(), Edge, "readlink", "/proc/self/ns/mnt").Output()
	if err != nil {
		t.Fatal(err)
	}
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(string(out)); got != own {
		t.Errorf("the command's mount namespace is %s, ours is %s", got, own)
	}
	if err := l.Command(t.Context(), Edge, "no-such-program").Run(); err == nil {
		t.Error("a program that does not exist was run")
	}
}

// What Start starts is where it would be by Command, without a program before it.
func TestStart(t *testing.T) {
	l := open(t, Options{})
	where := func(cmd *exec.Cmd, start func() error) string {
		t.Helper()
		var out strings.Builder
		cmd.Stdout = &out
		if err := start(); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	links := []string{"/proc/self/ns/net", "/proc/self/ns/mnt", "/proc/self/ns/pid"}
	for _, side := range []Side{Edge, Cloud} {
		entered := l.Command(t.Context(), side, "readlink", links...)
		direct := exec.Command("readlink", links...)
		want, got := where(entered, entered.Start), where(direct, func() error { return l.Start(side, direct) })
		if got != want {
			t.Errorf("namespaces %q, want %q", got, want)
		}
	}
	if err := l.Start(Edge, exec.Command("no-such-program")); err == nil {
		t.Error("a program that does not exist was started")
	}
}

// Do must leave the caller's thread where it was, also when fn panics.
func TestDoComesBack(t *testing.T) {
	l := open(t, Options{})
	own, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was swallowed")
			}
		}()
		l.Do(Cloud, func() error { panic("in the cloud") })
	}()
	for range 50 {
		l.Do(Cloud, func() error { return nil })
		after, err := os.Readlink("/proc/thread-self/ns/net")
		if err != nil {
			t.Fatal(err)
		}
		if after != own {
			t.Fatalf("the thread is in %s instead of %s", after, own)
		}
	}
}

func TestCloseLeavesNothing(t *testing.T) {
	needLink(t)
	for _, how := range []string{"close", "context", "wire"} {
		t.Run(how, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			options := Options{RTT: 300 * time.Millisecond, Rate: 1e6}
			if how == "wire" {
				options = Options{}
			}
			l, err := New(ctx, options)
			if err != nil {
				t.Fatal(err)
			}
			// A process that runs on keeps its namespace.
			kept, err := os.Open(l.Namespace(Cloud))
			if err != nil {
				t.Fatal(err)
			}
			defer kept.Close()
			conn, err := l.DialContext(ctx, Edge, "udp4", "192.0.2.1:9")
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			conn.Write([]byte("under way when the link closes"))
			if how == "context" {
				cancel()
				// Close waits for the closing that the context has begun.
			}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			err = (&namespace{fd: int(kept.Fd())}).do(func() error {
				if left, err := net.InterfaceByName(deviceName); err == nil {
					t.Errorf("%+v is left", left)
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
			for _, side := range []Side{Cloud, Edge} {
				if _, err := os.Stat(l.Namespace(side)); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("%s is left: %v", l.Namespace(side), err)
				}
			}
		})
	}
}

func TestCollect(t *testing.T) {
	needLink(t)
	// A process of our own ID that began at another time is gone.
	ns, err := newNamespace("left")
	if err != nil {
		t.Fatal(err)
	}
	defer ns.remove()
	dead := filepath.Join(namespaceDir, fmt.Sprintf("%s%d-1-1-left", namePrefix, os.Getpid()))
	if err := os.WriteFile(dead, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(namespaceDir, namePrefix+"of-somebody")
	if err := os.WriteFile(other, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(other)
	collect()
	if _, err := os.Stat(dead); !errors.Is(err, os.ErrNotExist) {
		os.Remove(dead)
		t.Errorf("%s was not collected", dead)
	}
	for _, kept := range []string{ns.path, other} {
		if _, err := os.Stat(kept); err != nil {
			t.Errorf("%s was collected: %v", kept, err)
		}
	}
}

func TestOptions(t *testing.T) {
	for _, o := range []Options{{RTT: -1}, {Rate: -1}, {Loss: 2}, {Queue: 10}} {
		if _, err := o.withDefaults(); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
	o, err := Options{RTT: 100 * time.Millisecond, Rate: 100e6}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	if want := int64(1250000); o.Queue != want {
		t.Errorf("queue of %d bytes, want %d", o.Queue, want)
	}
}

// The rate that TCP reaches, as Mbit/s, for some settings of the link.
func BenchmarkThroughput(b *testing.B) {
	for _, c := range []struct {
		rtt  time.Duration
		rate int64
	}{
		{100 * time.Millisecond, 5e6}, {100 * time.Millisecond, 100e6}, {150 * time.Millisecond, 100e6},
		{100 * time.Millisecond, 500e6}, {time.Millisecond, 1e9}, {time.Millisecond, 0}, {0, 0},
	} {
		b.Run(fmt.Sprintf("%dMbit-%v", c.rate/1e6, c.rtt), func(b *testing.B) {
			l := open(b, Options{RTT: c.rtt, Rate: c.rate})
			var m Measurement
			for b.Loop() {
				var err error
				if m, err = l.Check(b.Context()); err != nil {
					b.Log(err)
				}
			}
			b.ReportMetric(m.Rate/1e6, "Mbit/s")
			b.ReportMetric(m.RTT.Seconds()*1e3, "ms-rtt")
			b.ReportMetric(m.Late.Seconds()*1e3, "ms-late")
		})
	}
}
