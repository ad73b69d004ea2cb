package tcp

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// fakeSocket is in the state that it was put into last.
type fakeSocket struct {
	now    pathState
	err    error
	looks  int
	limits []uint64
	busy   bool // something is in flight
	corked atomic.Bool
}

func (f *fakeSocket) state() (pathState, error) {
	f.looks++
	return f.now, f.err
}

func (f *fakeSocket) limit(rate uint64) error {
	f.limits = append(f.limits, rate)
	return nil
}

func (f *fakeSocket) idle() (bool, error) { return !f.busy, f.err }

func (f *fakeSocket) cork(on bool) error {
	f.corked.Store(on)
	return nil
}

func TestPacer(t *testing.T) {
	const mbyte = 1 << 20
	ms := time.Millisecond
	short := pathState{rate: 10 * mbyte, trip: 300 * ms, least: 300 * ms, sent: 1000}
	with := func(s pathState, change func(*pathState)) pathState {
		change(&s)
		return s
	}
	queued := with(short, func(s *pathState) { s.trip = 420 * ms })
	long := with(short, func(s *pathState) { s.trip = 600 * ms })
	done := with(short, func(s *pathState) { s.phase = started })
	tests := []struct {
		name   string
		states []pathState
		limits []uint64
	}{
		{"nothing is in the way", []pathState{short, short}, nil},
		{"a queue, a longer one", []pathState{short, queued, long}, []uint64{11 * mbyte, 10 * mbyte}},
		{"the queue has gone, which is no proof of room", []pathState{queued, short}, []uint64{11 * mbyte, 15 * mbyte}},
		{"BBR has seen it", []pathState{queued, done, queued}, []uint64{11 * mbyte, unlimited}},
		{"BBR has seen it first", []pathState{short, done, queued}, nil},
		{"what BBR does meanwhile is its own", []pathState{
			queued, with(queued, func(s *pathState) { s.phase = pausing }), long,
		}, []uint64{11 * mbyte, 10 * mbyte}},
		{"the round trip varies on a near path", []pathState{
			with(queued, func(s *pathState) { s.least, s.trip = 5*ms, 40*ms }),
		}, nil},
		{"and while the rate is low", []pathState{
			with(queued, func(s *pathState) { s.rate = mbyte / 2 }),
		}, nil},
		{"little more than the path's", []pathState{
			with(queued, func(s *pathState) { s.trip = 360 * ms }),
		}, nil},
		{"a queue too short to be seen overflows", []pathState{
			with(short, func(s *pathState) { s.resent = 200 }),
			with(short, func(s *pathState) { s.sent, s.resent = 2000, 200 }),
		}, []uint64{10 * mbyte, 15 * mbyte}},
		{"a link that loses packets", []pathState{
			with(short, func(s *pathState) { s.resent = 50 }),
		}, nil},
		{"a first packet is lost", []pathState{
			with(short, func(s *pathState) { s.sent, s.resent = 4, 2 }),
		}, nil},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			f := new(fakeSocket)
			p := &pacer{socket: f}
			now := time.Now()
			for _, s := range test.states {
				f.now = s
				now = now.Add(paceEvery)
				p.check(now)
			}
			if d := cmp.Diff(test.limits, f.limits); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestPacerLooksSeldom(t *testing.T) {
	f := &fakeSocket{}
	p := &pacer{socket: f}
	now := time.Now()
	for i := range 100 {
		p.check(now.Add(time.Duration(i) * paceEvery / 10))
	}
	if f.looks != 10 {
		t.Errorf("looked %d times in 10 intervals", f.looks)
	}
	f.now.phase = started
	p.check(now.Add(time.Hour))
	p.check(now.Add(2 * time.Hour))
	if f.looks != 11 {
		t.Errorf("looked %d times after the end", f.looks-11)
	}
	f = &fakeSocket{err: errors.New("closed")}
	p = &pacer{socket: f}
	p.check(now)
	p.check(now.Add(time.Hour))
	if f.looks != 1 || f.limits != nil {
		t.Errorf("looked %d times at a closed connection, limits %v", f.looks, f.limits)
	}
}

// pacerOf is the pacer of a request's connection, or nil.
func pacerOf(ctx context.Context) *pacer {
	p, _ := ctx.Value(pacerKey{}).(*pacer)
	return p
}

// connection returns the server's end of a TCP connection whose congestion control
// is the one named.
func connection(t *testing.T, control string) *net.TCPConn {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	tcp := c.(*net.TCPConn)
	raw, err := tcp.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, control)
	}); cerr != nil || err != nil {
		t.Skipf("this host has no %s: %v", control, err)
	}
	return tcp
}

// What the kernel says of a new connection is understood, and it takes the limit.
func TestPacerOfBBR(t *testing.T) {
	c := connection(t, "bbr")
	p := pacerOf(ConnContext(t.Context(), c))
	if p == nil {
		t.Fatal("a connection with BBR has no pacer")
	}
	s, err := p.socket.state()
	if err != nil || s.phase != starting || s.trip <= 0 || s.resent != 0 {
		t.Errorf("state %+v, %v", s, err)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []uint64{1 << 20, unlimited} {
		if err := p.socket.limit(want); err != nil {
			t.Fatal(err)
		}
		var got uint64
		if cerr := raw.Control(func(fd uintptr) {
			got, err = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE)
		}); cerr != nil || err != nil || got != want {
			t.Errorf("limit %d is %d; %v, %v", want, got, cerr, err)
		}
	}
	c.Close()
	if _, err := p.socket.state(); err == nil {
		t.Error("a closed connection has a state")
	}
}

func TestPacerOfOthers(t *testing.T) {
	if p := pacerOf(ConnContext(t.Context(), connection(t, "reno"))); p != nil {
		t.Error("a connection with Reno has a pacer")
	}
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	if p := pacerOf(ConnContext(t.Context(), a)); p != nil {
		t.Error("a pipe has a pacer")
	}
}
