package link

import "encoding/binary"

// A packet as the TUN device gives and takes it (linux/virtio_net.h, in the
// machine's byte order, which is little-endian here):
//
//	offset 0  flags        1: checksum to be completed from csum_start on
//	       1  gso_type     0 none, 1 TCP over IPv4; 0x80 is added for ECN
//	       2  hdr_len      u16, not to be relied upon
//	       4  gso_size     u16, payload bytes of each segment
//	       6  csum_start   u16, from the IP header on
//	       8  csum_offset  u16, from csum_start on
//	      10  the IP packet
type packet []byte

const (
	vnetHeader    = 10
	vnetNeedsCsum = 1
	gsoNone       = 0
	gsoTCP4       = 1
	gsoECN        = 0x80

	maxPacket = vnetHeader + 65535

	tcpFIN, tcpPSH, tcpCWR = 0x01, 0x08, 0x80
)

// shape is how a packet falls into segments: count of them, each with header
// bytes of IP and TCP header and gso bytes of payload, the last one with less.
type shape struct {
	count       int
	ip, header  int // length of the IP header; of it and the TCP header
	gso, length int // payload bytes of a segment; of the whole IP packet
}

// shape of a packet; anything but a well-formed TCP super-packet is one segment.
func (p packet) shape() shape {
	ip := p[vnetHeader:]
	one := shape{count: 1, length: len(ip)}
	if p[1]&^gsoECN != gsoTCP4 || len(ip) < 20 || ip[0]>>4 != 4 || ip[9] != 6 {
		return one
	}
	s := shape{length: len(ip), ip: int(ip[0]&15) * 4, gso: int(binary.NativeEndian.Uint16(p[4:]))}
	if s.ip < 20 || len(ip) < s.ip+20 || s.gso == 0 {
		return one
	}
	tcp := int(ip[s.ip+12]>>4) * 4
	s.header = s.ip + tcp
	if tcp < 20 || len(ip) <= s.header {
		return one
	}
	s.count = (len(ip) - s.header + s.gso - 1) / s.gso
	return s
}

// size is the length of the IP packet that segment i is on the line.
func (s shape) size(i int) int {
	if s.count == 1 {
		return s.length
	}
	return s.header + min(s.gso, s.length-s.header-i*s.gso)
}

// slice is a packet of its own that stands for segments i to j-1 of p, in memory from take, which
// gives an empty one with room for so many bytes. The result is p itself when that is all of them.
func (p packet) slice(s shape, i, j int, take func(n int) packet) packet {
	if i == 0 && j == s.count {
		return p
	}
	from, to := s.header+i*s.gso, min(s.header+j*s.gso, s.length)
	q := take(vnetHeader + s.header + to - from)
	q = append(q, p[:vnetHeader+s.header]...)
	q = append(q, p[vnetHeader+from:vnetHeader+to]...)
	if j-i == 1 {
		q[1] = gsoNone
		binary.NativeEndian.PutUint16(q[4:], 0)
	}

	ip, tcp := q[vnetHeader:], q[vnetHeader+s.ip:]
	be := binary.BigEndian
	be.PutUint16(ip[2:], uint16(len(ip)))
	be.PutUint16(ip[4:], be.Uint16(ip[4:])+uint16(i)) // as if segmented by the sender
	be.PutUint16(ip[10:], 0)
	be.PutUint16(ip[10:], ^fold(sum(ip[:s.ip])))

	be.PutUint32(tcp[4:], be.Uint32(tcp[4:])+uint32(i*s.gso))
	if j < s.count {
		tcp[13] &^= tcpFIN | tcpPSH
	}
	if i > 0 {
		tcp[13] &^= tcpCWR
	}
	// An unfinished checksum field holds the sum of the pseudo-header.
	if p[0]&vnetNeedsCsum != 0 {
		be.PutUint16(tcp[16:], fold(sum(ip[12:20])+6+uint32(len(tcp))))
	}
	return q
}

// sum adds the 16-bit words of b, whose length is even, as RFC 1071 says.
func sum(b []byte) (s uint32) {
	for ; len(b) > 1; b = b[2:] {
		s += uint32(b[0])<<8 | uint32(b[1])
	}
	return s
}

func fold(s uint32) uint16 {
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}
