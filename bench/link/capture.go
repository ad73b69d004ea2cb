package link

import (
	"bytes"
	"encoding/binary"
	"sync"
	"time"
)

// Capture are conversations that the edge has with the cloud, counted from the
// packets at the edge's interface, as tcpdump would see them there. What is
// counted is what can be seen from outside, whatever program speaks:
//
//   - a connection is a TCP handshake that the edge begins; a SYN that is sent
//     again is the same one;
//   - a request is one of HTTP without TLS: in HTTP/1, a packet whose payload
//     begins with a method, when the one before had been answered; in HTTP/2 (by
//     prior knowledge), a HEADERS frame that opens a stream. Frames of flow
//     control and settings, and bodies, are none;
//   - a round trip is one that somebody may have waited for: the edge says
//     something (it begins a connection or a request) after it has heard something
//     (the answer to a handshake, or payload) since it last did, and not less than
//     the link's round-trip time after the last one that was counted, since what
//     comes sooner cannot have waited for its answer. Requests side by side are one
//     round trip. On a connection that speaks neither HTTP/1 nor HTTP/2 any payload
//     says something.
//
// A chain of requests each of which waits for the one before has at most this
// many links, and bytes that stream down without being asked for add none.
type Capture struct {
	Connections int64 `json:"connections,omitempty"`
	Requests    int64 `json:"requests,omitempty"`
	RoundTrips  int64 `json:"round_trips,omitempty"`
}

// Sub is what came after another count of the same link.
func (c Capture) Sub(before Capture) Capture {
	return Capture{c.Connections - before.Connections, c.Requests - before.Requests, c.RoundTrips - before.RoundTrips}
}

// capture counts what it is shown.
type capture struct {
	rtt time.Duration // of the link, or a little less

	mu     sync.Mutex
	counts Capture
	flows  map[flow]*conversation
	heard  bool          // since the edge last said something
	turned bool          // there has been a round trip, at turn
	turn   time.Duration // when the last one began that was counted
}

// flow is a connection: the edge's address and port, and the cloud's, as they are
// in the packets of the edge.
type flow [12]byte

// conversation is what the edge says on a connection.
type conversation struct {
	first    uint32 // sequence number of its SYN
	next     uint32 // of the byte that comes next
	protocol protocol
	answered bool // something has come since the last request of HTTP/1

	// Of HTTP/2: how many bytes of the preface or of a payload are to be skipped,
	// what is there of a frame's header, and the last stream that was opened.
	skip   uint32
	header []byte
	stream uint32
}

type protocol int

const (
	unknown protocol = iota // nothing has been said yet
	other
	http1
	http2
)

const (
	tcpSYN, tcpRST, tcpACK = 0x02, 0x04, 0x10

	frameHeader  = 9 // bytes, RFC 9113, 4.1
	frameHEADERS = 1
)

var (
	preface = []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") // RFC 9113, 3.4
	methods = [][]byte{[]byte("GET "), []byte("HEAD "), []byte("POST "), []byte("PUT "), []byte("PATCH "), []byte("DELETE "), []byte("OPTIONS "), []byte("CONNECT ")}
)

// A packet that is due soon is delivered at once (slack), so that what waited for
// an answer may come a little less than a round trip after its question.
func newCapture(rtt time.Duration) *capture {
	return &capture{rtt: rtt - rtt/16, flows: map[flow]*conversation{}}
}

// segment is what a packet of TCP over IPv4 says.
type segment struct {
	flow    flow // from who has sent it
	seq     uint32
	flags   byte
	payload []byte
}

// segment is that of a packet, which may stand for many on the line; false for
// anything else than TCP over IPv4 from the first fragment on.
func (p packet) segment() (s segment, ok bool) {
	if len(p) < vnetHeader+20 {
		return s, false
	}
	be, ip := binary.BigEndian, p[vnetHeader:]
	header := int(ip[0]&15) * 4
	if ip[0]>>4 != 4 || header < 20 || ip[9] != 6 || be.Uint16(ip[6:])&0x1fff != 0 {
		return s, false
	}
	ip = ip[:min(len(ip), max(int(be.Uint16(ip[2:])), header))]
	if len(ip) < header+20 {
		return s, false
	}
	tcp := ip[header:]
	offset := int(tcp[12]>>4) * 4
	if offset < 20 || len(tcp) < offset {
		return s, false
	}
	copy(s.flow[:4], ip[12:16])
	copy(s.flow[4:6], tcp[0:2])
	copy(s.flow[6:10], ip[16:20])
	copy(s.flow[10:], tcp[2:4])
	s.seq, s.flags, s.payload = be.Uint32(tcp[4:]), tcp[13], tcp[offset:]
	return s, true
}

// reverse is the same connection, seen from the other end.
func (f flow) reverse() (r flow) {
	copy(r[:6], f[6:])
	copy(r[6:], f[:6])
	return r
}

// sent is called with each packet that the edge sends, whether it arrives or not.
func (c *capture) sent(p packet, now time.Duration) {
	s, ok := p.segment()
	if !ok {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.flags&tcpRST != 0 {
		delete(c.flows, s.flow)
		return
	}
	v := c.flows[s.flow]
	if s.flags&(tcpSYN|tcpACK) == tcpSYN {
		if v == nil || v.first != s.seq {
			c.flows[s.flow] = &conversation{first: s.seq, next: s.seq + 1, answered: true}
			c.counts.Connections++
			c.speak(now)
		}
		return
	}
	if v == nil || len(s.payload) == 0 {
		return // of a connection that the cloud began, or nothing new
	}
	// What is sent again has been seen. Nothing is missing, since this is where
	// it is sent; if something is after all, it is passed over.
	end := s.seq + uint32(len(s.payload))
	if seen := int64(int32(v.next - s.seq)); seen > 0 {
		if seen >= int64(len(s.payload)) {
			return
		}
		s.payload = s.payload[seen:]
	}
	v.next = end
	requests, says := v.read(s.payload)
	c.counts.Requests += requests
	if says {
		c.speak(now)
	}
}

// received is called with each packet that reaches the edge.
func (c *capture) received(p packet) {
	s, ok := p.segment()
	if !ok {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	v := c.flows[s.flow.reverse()]
	if s.flags&tcpRST != 0 {
		delete(c.flows, s.flow.reverse())
	}
	if v != nil && (len(s.payload) > 0 || s.flags&(tcpSYN|tcpRST) != 0) {
		c.heard, v.answered = true, true
	}
}

// speak is called when the edge says something; with c.mu.
func (c *capture) speak(now time.Duration) {
	if !c.turned || c.heard && now-c.turn >= c.rtt {
		c.counts.RoundTrips++
		c.turned, c.turn = true, now
	}
	c.heard = false
}

func (c *capture) now() Capture {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.counts
}

// read takes what is said next, and tells how many requests begin in it, and
// whether it says anything that wants an answer.
func (v *conversation) read(payload []byte) (requests int64, says bool) {
	if v.protocol == unknown {
		v.protocol = protocolOf(payload)
		v.skip = uint32(len(preface))
	}
	switch v.protocol {
	case http1:
		if v.answered && startsRequest(payload) {
			v.answered = false
			return 1, true
		}
		return 0, false
	case http2:
		requests = v.readFrames(payload)
		return requests, requests > 0
	}
	return 0, true
}

// protocolOf is that of a connection's first payload.
func protocolOf(payload []byte) protocol {
	switch {
	case bytes.HasPrefix(payload, preface[:min(len(payload), len(preface))]):
		return http2
	case startsRequest(payload):
		return http1
	}
	return other
}

func startsRequest(payload []byte) bool {
	for _, method := range methods {
		if bytes.HasPrefix(payload, method) {
			return true
		}
	}
	return false
}

// readFrames counts the frames of HTTP/2 that open a stream, whatever packets they
// are cut into.
func (v *conversation) readFrames(b []byte) (opened int64) {
	for len(b) > 0 {
		if v.skip > 0 {
			n := min(int64(v.skip), int64(len(b)))
			v.skip -= uint32(n)
			b = b[n:]
			continue
		}
		n := min(frameHeader-len(v.header), len(b))
		v.header = append(v.header, b[:n]...)
		b = b[n:]
		if len(v.header) < frameHeader {
			return opened
		}
		v.skip = uint32(v.header[0])<<16 | uint32(v.header[1])<<8 | uint32(v.header[2])
		stream := binary.BigEndian.Uint32(v.header[5:]) &^ (1 << 31)
		// Trailers are HEADERS of a stream that is open already.
		if v.header[3] == frameHEADERS && stream > v.stream {
			v.stream = stream
			opened++
		}
		v.header = v.header[:0]
	}
	return opened
}
