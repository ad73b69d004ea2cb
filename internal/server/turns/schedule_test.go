package turns

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// model drives a schedule as Turns does, and checks what schedule promises after each step.
type model struct {
	schedule
	streams []*Stream
	asking  map[*Stream]bool
	under   []*Stream // turns under way that count
	urgent  map[string]int
	tired   map[string]bool
}

func (m *model) drain(t *rapid.T) {
	for {
		x := m.next()
		if x == nil {
			break
		}
		if !m.asking[x] {
			t.Fatalf("a turn for a stream that did not ask")
		}
		delete(m.asking, x)
		m.under = append(m.under, x)
		if len(m.urgent) > 0 && len(m.under) > m.beside {
			t.Fatalf("%d turns under way beside what is urgent, at most %d", len(m.under), m.beside)
		}
		if m.urgent[x.conn] > 0 && !m.tired[x.conn] {
			t.Fatalf("a turn on %s, on which something is urgent", x.conn)
		}
		for y := range m.asking {
			if y.had < x.had && (m.urgent[y.conn] == 0 || m.tired[y.conn]) {
				t.Fatalf("a turn for who had %d bytes, while one waits who had %d", x.had, y.had)
			}
		}
	}
	for x := range m.asking {
		if blocked := m.urgent[x.conn] > 0 && !m.tired[x.conn]; !blocked && (len(m.urgent) == 0 || len(m.under) < m.beside) {
			t.Fatalf("a stream of %s waits for nothing", x.conn)
		}
	}
}

func TestSchedule(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &model{schedule: schedule{beside: rapid.IntRange(1, 4).Draw(t, "beside")}, asking: map[*Stream]bool{}, urgent: map[string]int{}, tired: map[string]bool{}}
		first := map[string]*conn{}
		conns := []string{"a", "b", "c"}
		for i := range 12 {
			m.streams = append(m.streams, &Stream{conn: conns[i%3], place: -1})
		}
		for range rapid.IntRange(1, 300).Draw(t, "steps") {
			name := rapid.SampledFrom(conns).Draw(t, "connection")
			x := rapid.SampledFrom(m.streams).Draw(t, "stream")
			switch rapid.IntRange(0, 5).Draw(t, "what") {
			case 0:
				if c := m.begin(name); c != nil {
					first[name] = c
				}
				m.urgent[name]++
			case 1:
				if m.urgent[name] > 0 {
					m.end(name)
					if m.urgent[name]--; m.urgent[name] == 0 {
						delete(m.urgent, name)
						delete(m.tired, name)
					}
				}
			case 2:
				if m.urgent[name] > 0 {
					m.tire(first[name])
					m.tired[name] = true
				}
			case 3:
				if m.asking[x] {
					m.withdraw(x)
					delete(m.asking, x)
				} else if !slices.Contains(m.under, x) {
					m.ask(x)
					m.asking[x] = true
				}
			default:
				if n := len(m.under); n > 0 {
					i := rapid.IntRange(0, n-1).Draw(t, "turn")
					m.charge(m.under[i], rapid.Int64Range(0, 256<<10).Draw(t, "bytes"))
					m.over()
					m.under = slices.Delete(m.under, i, i+1)
				}
			}
			m.drain(t)
		}
	})
}

// Whoever had nothing to send for long is not favoured for it afterwards.
func TestScheduleForgetsIdleTime(t *testing.T) {
	s := schedule{beside: 1}
	s.begin("urgent")
	busy, idle := &Stream{conn: "a", place: -1}, &Stream{conn: "b", place: -1}
	turn := func(want *Stream) {
		t.Helper()
		if x := s.next(); x != want {
			t.Fatalf("the turn of %+v, want %+v", x, want)
		}
		s.charge(want, 100)
		s.over()
		s.ask(want)
	}
	s.ask(busy)
	for range 50 {
		turn(busy)
	}
	s.ask(idle)
	for range 10 {
		turn(idle)
		turn(busy)
	}
}

// pull is a modelled one: a head of some bytes, then a rest. Times are in ticks.
type pull struct {
	stream     *Stream
	path       float64 // bytes a tick that its worker's link takes
	start      int
	head, rest float64 // bytes that are left

	begun      bool
	headAt     int // when its head had gone
	endAt      int
	chunk      float64 // of the run that is being sent
	turnAt     int     // when its turn came
	counts     bool    // its turn is under way
	asked      int     // when it asked; -1: it does not wait
	longest    int     // that it waited for a turn
	urgent     bool
	sent       float64 // of the rest
	sentAtMark float64
}

// server is a model of one: all that is under way shares its rate, evenly, but nobody gets more than his
// path takes. It tells the schedule of time as Turns does.
type server struct {
	schedule
	rate  float64 // bytes a tick
	pulls []*pull
	tick  int
	tires map[int][]*conn
	plain bool // without a schedule: nobody waits
	by    map[*Stream]*pull
}

// A tick is 5 ms.
const (
	ticksUrgent = 200
	ticksLapse  = 4
	runBytes    = 256 << 10
)

// step passes a tick, and reports whether there is anything left to do.
func (s *server) step() bool {
	for _, c := range s.tires[s.tick] {
		s.tire(c)
	}
	delete(s.tires, s.tick)
	left := false
	var sending []*pull
	for _, p := range s.pulls {
		if p.endAt > 0 {
			continue
		}
		left = true
		if s.tick < p.start {
			continue
		}
		if !p.begun {
			p.begun, p.urgent = true, true
			if c := s.begin(p.stream.conn); c != nil {
				s.tires[s.tick+ticksUrgent] = append(s.tires[s.tick+ticksUrgent], c)
			}
		}
		if p.urgent && (p.head <= 0 || s.tick-p.start >= ticksUrgent) {
			p.urgent = false
			s.end(p.stream.conn)
		}
		if p.counts && s.tick-p.turnAt >= ticksLapse {
			p.counts = false
			s.over()
		}
		switch {
		case p.head > 0 || p.chunk > 0:
			sending = append(sending, p)
		case p.rest <= 0:
			p.endAt = s.tick
		case s.plain:
			p.chunk = min(p.rest, runBytes)
			sending = append(sending, p)
		case p.asked < 0:
			p.asked = s.tick
			s.ask(p.stream)
		}
	}
	for x := s.next(); x != nil; x = s.next() {
		p := s.by[x]
		p.longest = max(p.longest, s.tick-p.asked)
		p.asked, p.turnAt, p.counts, p.chunk = -1, s.tick, true, min(p.rest, runBytes)
		sending = append(sending, p)
	}
	s.send(sending)
	s.tick++
	return left
}

// send shares a tick's bytes among those who send: the slowest paths first.
func (s *server) send(sending []*pull) {
	slices.SortStableFunc(sending, func(a, b *pull) int {
		switch {
		case a.path < b.path:
			return -1
		case a.path > b.path:
			return 1
		}
		return 0
	})
	left := s.rate
	for i, p := range sending {
		n := min(p.path, left/float64(len(sending)-i))
		left -= n
		if p.head > 0 {
			if p.head -= n; p.head <= 0 {
				p.headAt = s.tick
			}
			continue
		}
		n = min(n, p.chunk)
		p.chunk -= n
		p.rest -= n
		p.sent += n
		if p.chunk <= 0 {
			s.charge(p.stream, runBytes)
			if p.counts {
				p.counts = false
				s.over()
			}
		}
	}
}

// crowd makes workers with some services each, that start within some ticks.
func crowd(workers, services, within int, path func(worker int) float64, plain bool) *server {
	r := rand.New(rand.NewPCG(1, 2))
	s := &server{schedule: schedule{beside: 4}, rate: 1e9 / 8 / 200, tires: map[int][]*conn{}, plain: plain, by: map[*Stream]*pull{}}
	for w := range workers {
		start := 0
		if within > 0 {
			start = r.IntN(within)
		}
		for range services {
			p := &pull{stream: &Stream{conn: fmt.Sprint(w), place: -1}, path: path(w), start: start, head: 1 << 20, rest: 8 << 20, asked: -1}
			s.pulls, s.by[p.stream] = append(s.pulls, p), p
		}
	}
	return s
}

func percentile(s *server, share float64, of func(*pull) int) int {
	var all []int
	for _, p := range s.pulls {
		all = append(all, of(p))
	}
	slices.Sort(all)
	return all[int(share*float64(len(all)-1))]
}

// A thousand workers come to one server of 1 Gbit/s within half a minute, each over a path of its own: what
// they wait for first goes before others' rests, nobody starves, and no byte takes longer for
// it in all.
func TestThousandWorkers(t *testing.T) {
	path := func(w int) float64 { return []float64{10e6, 100e6, 1e9}[w%3] / 8 / 200 }
	run := func(plain bool) *server {
		s := crowd(1000, 1, 6000, path, plain)
		for s.step() {
			if s.tick > 1e6 {
				t.Fatal("it does not end")
			}
		}
		return s
	}
	with, without := run(false), run(true)
	first := func(p *pull) int { return p.headAt - p.start }
	fast := func(s *server) *server {
		return &server{pulls: slices.DeleteFunc(slices.Clone(s.pulls), func(p *pull) bool { return p.path < 100e6/8/200 })}
	}
	for _, share := range []float64{0.5, 0.9, 0.99} {
		a, b := percentile(fast(with), share, first), percentile(fast(without), share, first)
		t.Logf("head of %v of the pulls on paths of 100 Mbit/s and more: %d ms with turns, %d ms without", share, 5*a, 5*b)
		if share <= 0.9 && a*4 > b {
			t.Errorf("heads take %d ticks with turns, %d without: want a quarter at most", a, b)
		}
	}
	// Whoever asks waits for at most what his own connection may hold him up, and one lapse for every beside others.
	most := ticksUrgent + (len(with.pulls)/with.beside+2)*ticksLapse
	if n := percentile(with, 1, func(p *pull) int { return p.longest }); n > most {
		t.Errorf("somebody waited %d ticks for a turn, at most %d", n, most)
	} else {
		t.Logf("the longest wait for a turn: %d ms, at most %d ms", 5*n, 5*most)
	}
	if float64(with.tick) > 1.1*float64(without.tick) {
		t.Errorf("all of it takes %d ticks with turns, %d without", with.tick, without.tick)
	}
}

// Rests on equal paths have equally much, within a factor of two, whenever one looks, also
// while heads come all the time.
func TestRestsAreFair(t *testing.T) {
	s := crowd(200, 1, 0, func(int) float64 { return 1e9 / 8 / 200 }, false)
	old := slices.Clone(s.pulls)
	for _, p := range old {
		p.head = 0
		p.rest = 1 << 40 // they do not end
	}
	checked := 0
	for s.step() && checked < 10 {
		if s.tick%20 == 0 { // ten new ones a second
			p := &pull{stream: &Stream{conn: fmt.Sprint("new", s.tick), place: -1}, path: 100e6 / 8 / 200, start: s.tick, head: 1 << 20, asked: -1}
			s.pulls, s.by[p.stream] = append(s.pulls, p), p
		}
		if s.tick%2000 != 0 {
			continue
		}
		checked++
		least, most := 1e18, 0.0
		for _, p := range old {
			n := p.sent - p.sentAtMark
			p.sentAtMark = p.sent
			least, most = min(least, n), max(most, n)
		}
		if least <= 0 || most > 2*least {
			t.Fatalf("in ten seconds one had %.0f bytes, another %.0f", least, most)
		}
	}
}

// Services of one worker that start together share their path among their heads first.
func TestManyServicesOfOneWorker(t *testing.T) {
	s := crowd(8, 8, 0, func(int) float64 { return 100e6 / 8 / 200 / 8 }, false)
	late := 0
	for _, p := range s.pulls {
		if p.stream.conn == "0" {
			p.start = late // one after the other
			late += 50
		}
	}
	for s.step() {
		for _, p := range s.pulls {
			if p.counts && p.turnAt == s.tick-1 && s.conns[p.stream.conn] != nil && !s.conns[p.stream.conn].tired {
				t.Fatalf("a rest has a turn at %d while a head of its own connection goes", s.tick-1)
			}
		}
	}
}
