package link

import (
	"fmt"
	"math/rand/v2"
	"os"
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
)

// pipe is one direction: the rate-limited queue, then the line. One goroutine
// (read) puts packets in, with the time at which each is due at the far end;
// since all take equally long on the line, that order is the order of arrival,
// and one goroutine (deliver) takes them out.
type pipe struct {
	options Options
	in, out *os.File
	alarm   *os.File // a timer, timerfd_create(2), that wakes deliver
	timer   int      // its descriptor, open until close
	epoch   time.Time

	// Owned by read: when the line will have sent what it has been given.
	busy time.Duration
	dice *rand.Rand

	mu    sync.Mutex
	fifo  []due // not yet delivered; from head on
	head  int
	alone bool // deliver sleeps without an alarm, since nothing was queued
	spare spare

	// free: the rate is not held for now, see Link.Free.
	free atomic.Bool

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

func newPipe(options Options, stream uint64, in, out *os.File) (*pipe, error) {
	p := &pipe{options: options, in: in, out: out, epoch: time.Now(), dice: rand.New(rand.NewPCG(options.Seed, stream))}
	// Unlike those of the runtime, which are a millisecond coarse when idle, such a timer is exact;
	// and no thread of its own waits for it.
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("link: timerfd: %w", err)
	}
	p.alarm, p.timer = os.NewFile(uintptr(fd), "timerfd"), fd
	return p, nil
}

func (p *pipe) now() time.Duration { return time.Since(p.epoch) }

// read takes packets from the device until its deadline is in the past.
func (p *pipe) read() {
	buffer := make(packet, maxPacket)
	for {
		n, err := p.in.Read(buffer)
		if err != nil {
			return
		}
		if n > vnetHeader {
			p.admit(buffer[:n])
		}
	}
}

// admit charges each segment of a packet to the line and queues those that
// are neither lost nor too many, in as few parts as grain allows. The packet is the
// caller's again afterwards.
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
			p.queue(pkt, s, first, end, bytes)
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
		if p.options.Rate > 0 && !p.free.Load() {
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

// queue is called with the segments first to end-1 of a packet, of so many bytes, which have just been
// charged: their last bit leaves at p.busy and arrives half a round trip later.
func (p *pipe) queue(pkt packet, s shape, first, end int, bytes int64) {
	d := due{at: p.busy + p.options.RTT/2, packets: int64(end - first), bytes: bytes}
	p.mu.Lock()
	defer p.mu.Unlock()
	if d.packet = pkt.slice(s, first, end, p.spare.take); first == 0 && end == s.count {
		d.packet = append(p.spare.take(len(pkt)), pkt...)
	}
	p.fifo = append(p.fifo, d)
	if p.alone {
		p.alone = false
		p.wake(d.at)
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

// deliver writes packets to the far device when they are due, until the alarm's deadline is in
// the past: all that are due by then at each alarm.
func (p *pipe) deliver() {
	var expired [8]byte
	var batch []due
	for {
		batch = p.due(batch[:0])
		for i := range batch {
			p.write(batch[i])
		}
		if len(batch) > 0 {
			p.reuse(batch)
			continue // others may have become due
		}
		if _, err := p.alarm.Read(expired[:]); err != nil {
			return
		}
	}
}

// due appends the packets that are due, and takes them out of the queue. If there are none it sets the
// alarm to when the next one is.
func (p *pipe) due(batch []due) []due {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	for ; p.head < len(p.fifo) && p.fifo[p.head].at <= now+slack; p.head++ {
		if late := int64(now - p.fifo[p.head].at); late > p.late.Load() {
			p.late.Store(late)
		}
		batch = append(batch, p.fifo[p.head])
	}
	switch {
	case p.head == len(p.fifo):
		p.fifo, p.head = p.fifo[:0], 0
		p.alone = len(batch) == 0
	case len(batch) == 0:
		p.wake(p.fifo[p.head].at)
	case p.head > 1024 && p.head > len(p.fifo)/2:
		// Move the rest down when most of the slice has been delivered.
		p.fifo, p.head = p.fifo[:copy(p.fifo, p.fifo[p.head:])], 0
	}
	return batch
}

// wake sets the alarm; p.mu is held, or nobody else knows of it.
func (p *pipe) wake(at time.Duration) {
	// 0 would disarm it.
	in := unix.NsecToTimespec(int64(max(at-p.now(), 1)))
	if err := unix.TimerfdSettime(p.timer, 0, &unix.ItimerSpec{Value: in}, nil); err != nil {
		panic(fmt.Sprintf("link: set a timer to %v: %v", in, err)) // it is ours, and the time is valid
	}
}

// reuse takes back the memory of packets that have been written.
func (p *pipe) reuse(batch []due) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range batch {
		p.spare.put(batch[i].packet)
		batch[i] = due{}
	}
}

// spare is memory of packets that can be used again, by size: ACKs are small, and many.
type spare [len(sizes)][]packet

var sizes = [...]int{256, 4 << 10, 16 << 10, maxPacket}

// take gives an empty packet with room for n bytes.
func (s *spare) take(n int) packet {
	for i, size := range sizes {
		if n > size {
			continue
		}
		if last := len(s[i]) - 1; last >= 0 {
			p := s[i][last]
			s[i] = s[i][:last]
			return p
		}
		return make(packet, 0, size)
	}
	return make(packet, 0, n)
}

func (s *spare) put(p packet) {
	for i, size := range sizes {
		if cap(p) == size {
			s[i] = append(s[i], p[:0])
		}
	}
}

// stop has read and deliver end.
func (p *pipe) stop() {
	p.in.SetReadDeadline(time.Unix(1, 0))
	p.alarm.SetReadDeadline(time.Unix(1, 0))
}

// close is called when read and deliver have ended.
func (p *pipe) close() error { return p.alarm.Close() }

func (p *pipe) stats() Stats {
	return Stats{
		Packets: p.packets.Load(), Bytes: p.bytes.Load(),
		Dropped: p.dropped.Load(), Lost: p.lost.Load(),
		Late: time.Duration(p.late.Load()),
	}
}
