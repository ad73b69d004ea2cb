package link

import (
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// A super-packet is split so that its parts take about this long on the
	// line each: its first segments must not wait for its last ones.
	grain = time.Millisecond
	// What is due this soon is delivered now, instead of sleeping again.
	slack = 50 * time.Microsecond
	// The longest sleep, which is how long Close may have to wait.
	nap = 50 * time.Millisecond
)

// pipe is one direction: the rate-limited queue, then the line. One goroutine
// (read) puts packets in, with the time at which each is due at the far end;
// since all take equally long on the line, that order is the order of arrival,
// and one goroutine (deliver) takes them out.
type pipe struct {
	options Options
	in, out *os.File
	epoch   time.Time

	// Owned by read: when the line will have sent what it has been given.
	busy time.Duration
	dice *rand.Rand

	mu    sync.Mutex
	fifo  []due // not yet delivered; from head on
	head  int
	ended bool
	more  sync.Cond // fifo has become longer, or ended is set; on mu

	// Called with what is sent, and with what arrives, if not nil.
	sent     func(p packet, now time.Duration)
	received func(p packet)

	packets, bytes, dropped, lost, late atomic.Int64 // see Stats
}

type due struct {
	at             time.Duration // since epoch
	packet         packet
	packets, bytes int64 // that it stands for
}

func newPipe(options Options, stream uint64, in, out *os.File) *pipe {
	p := &pipe{options: options, in: in, out: out, epoch: time.Now(), dice: rand.New(rand.NewPCG(options.Seed, stream))}
	p.more.L = &p.mu
	return p
}

func (p *pipe) now() time.Duration { return time.Since(p.epoch) }

// read takes packets from the device until its deadline is in the past.
func (p *pipe) read() {
	buffer := make([]byte, maxPacket)
	for {
		n, err := p.in.Read(buffer)
		if err != nil {
			return
		}
		if n > vnetHeader {
			p.admit(append(packet(nil), buffer[:n]...))
		}
	}
}

// admit charges each segment of a packet to the line and queues those that
// are neither lost nor too many, in as few parts as grain allows.
func (p *pipe) admit(pkt packet) {
	s := pkt.shape()
	now := p.now()
	if p.sent != nil {
		p.sent(pkt, now)
	}
	p.busy = max(p.busy, now)
	// The part that is being gathered: from which segment on, since when, and
	// how many bytes.
	first, began, bytes := 0, p.busy, int64(0)
	flush := func(end int) {
		if first < end {
			p.queue(due{packet: pkt.slice(s, first, end), packets: int64(end - first), bytes: bytes})
		}
		first, began, bytes = end, p.busy, 0
	}
	for i := range s.count {
		size := int64(s.size(i))
		if p.options.Loss > 0 && p.dice.Float64() < p.options.Loss {
			flush(i)
			first = i + 1
			p.lost.Add(1)
			continue
		}
		if p.options.Rate > 0 {
			waiting := int64(float64(p.busy-now) * float64(p.options.Rate) / 8e9)
			if waiting+size > p.options.Queue {
				flush(i)
				first = i + 1
				p.dropped.Add(1)
				continue
			}
			if p.busy-began >= grain {
				flush(i)
			}
			p.busy += time.Duration(float64(size) * 8e9 / float64(p.options.Rate))
		}
		bytes += size
	}
	flush(s.count)
}

// queue is called with what has just been charged: its last bit leaves at
// p.busy and arrives half a round trip later.
func (p *pipe) queue(d due) {
	if p.options.Rate == 0 && p.options.RTT == 0 {
		p.write(d)
		return
	}
	d.at = p.busy + p.options.RTT/2
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fifo = append(p.fifo, d)
	if len(p.fifo)-p.head == 1 {
		p.more.Signal()
	}
}

func (p *pipe) write(d due) {
	// Counted first: who has received the packet finds it counted. An error is
	// that of a device that is going away.
	p.packets.Add(d.packets)
	p.bytes.Add(d.bytes)
	if p.received != nil {
		p.received(d.packet)
	}
	p.out.Write(d.packet)
}

// deliver writes packets to the far device when they are due. It sleeps in the
// kernel (the runtime's timers are a millisecond coarse when idle), on a thread
// of its own, whose timers are exact.
func (p *pipe) deliver() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
	defer unix.Prctl(unix.PR_SET_TIMERSLACK, 0, 0, 0, 0) // 0: the default
	for {
		next, ok := p.next()
		if !ok {
			return
		}
		wait := next.at - p.now()
		for ; wait > slack; wait = next.at - p.now() {
			ts := unix.NsecToTimespec(int64(min(wait, nap)))
			unix.Nanosleep(&ts, nil)
			if p.stopped() {
				return
			}
		}
		if late := int64(-wait); late > p.late.Load() {
			p.late.Store(late)
		}
		p.write(next)
	}
}

// next waits for the packet that is due first and takes it.
func (p *pipe) next() (due, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.head == len(p.fifo) && !p.ended {
		p.fifo, p.head = p.fifo[:0], 0
		p.more.Wait()
	}
	if p.ended {
		return due{}, false
	}
	d := p.fifo[p.head]
	p.fifo[p.head] = due{}
	p.head++
	// Move the rest down when most of the slice has been delivered.
	if p.head > 1024 && p.head > len(p.fifo)/2 {
		p.fifo = p.fifo[:copy(p.fifo, p.fifo[p.head:])]
		p.head = 0
	}
	return d, true
}

func (p *pipe) stop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	p.more.Signal()
}

func (p *pipe) stopped() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ended
}

func (p *pipe) stats() Stats {
	return Stats{
		Packets: p.packets.Load(), Bytes: p.bytes.Load(),
		Dropped: p.dropped.Load(), Lost: p.lost.Load(),
		Late: time.Duration(p.late.Load()),
	}
}
