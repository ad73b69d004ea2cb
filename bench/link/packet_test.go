package link

import (
	"bytes"
	"encoding/binary"
	"testing"

	"pgregory.net/rapid"
)

// superPacket is what the kernel hands over for payload sent at once.
func superPacket(options, gso int, flags byte, payload []byte) packet {
	p := make(packet, vnetHeader+20+20+options, vnetHeader+20+20+options+len(payload))
	p = append(p, payload...)
	p[0], p[1] = vnetNeedsCsum, gsoTCP4
	binary.NativeEndian.PutUint16(p[2:], uint16(40+options))
	binary.NativeEndian.PutUint16(p[4:], uint16(gso))
	binary.NativeEndian.PutUint16(p[6:], 20)
	binary.NativeEndian.PutUint16(p[8:], 16)
	be := binary.BigEndian
	ip, tcp := p[vnetHeader:], p[vnetHeader+20:]
	ip[0], ip[8], ip[9] = 0x45, 64, 6
	be.PutUint16(ip[2:], uint16(len(ip)))
	be.PutUint16(ip[4:], 0xfffe)
	copy(ip[12:], []byte{192, 0, 2, 1, 192, 0, 2, 2})
	be.PutUint16(ip[10:], ^fold(sum(ip[:20])))
	be.PutUint32(tcp[4:], 0xffffff00)
	tcp[12], tcp[13] = byte((20+options)/4)<<4, flags
	be.PutUint16(tcp[16:], fold(sum(ip[12:20])+6+uint32(len(tcp))))
	return p
}

// checkWhole fails unless p is a packet that a kernel would take.
func checkWhole(t interface{ Fatalf(string, ...any) }, p packet) {
	ip := p[vnetHeader:]
	if got := int(binary.BigEndian.Uint16(ip[2:])); got != len(ip) {
		t.Fatalf("IP length %d of a packet of %d bytes", got, len(ip))
	}
	if fold(sum(ip[:20])) != 0xffff {
		t.Fatalf("wrong IP checksum")
	}
	want := fold(sum(ip[12:20]) + 6 + uint32(len(ip)-20))
	if got := binary.BigEndian.Uint16(ip[36:]); got != want {
		t.Fatalf("pseudo-header sum %#x, want %#x", got, want)
	}
}

// Whatever way a super-packet is cut, its parts carry all of its bytes in
// order, and the flags stay where they belong.
func TestSlice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		options := 4 * rapid.IntRange(0, 10).Draw(t, "options")
		gso := rapid.IntRange(1, 1460).Draw(t, "gso")
		payload := rapid.SliceOfN(rapid.Byte(), gso+1, min(20*gso, 65000)).Draw(t, "payload")
		p := superPacket(options, gso, tcpFIN|tcpPSH|tcpCWR|0x10, payload)
		checkWhole(t, p)
		s := p.shape()
		if want := (len(payload) + gso - 1) / gso; s.count != want {
			t.Fatalf("%d segments, want %d", s.count, want)
		}
		var got []byte
		charged := 0
		for i := 0; i < s.count; {
			j := rapid.IntRange(i+1, s.count).Draw(t, "j")
			q := p.slice(s, i, j, room)
			checkWhole(t, q)
			if part := q.shape(); part.count != j-i {
				t.Fatalf("segments %d to %d: %d segments", i, j, part.count)
			}
			tcp := q[vnetHeader+20:]
			if seq := binary.BigEndian.Uint32(tcp[4:]); seq != 0xffffff00+uint32(len(got)) {
				t.Fatalf("sequence number %#x after %d bytes", seq, len(got))
			}
			if id := binary.BigEndian.Uint16(q[vnetHeader+4:]); id != 0xfffe+uint16(i) {
				t.Fatalf("IP identification %#x for segment %d", id, i)
			}
			flags := byte(0x10)
			if i == 0 {
				flags |= tcpCWR
			}
			if j == s.count {
				flags |= tcpFIN | tcpPSH
			}
			if tcp[13] != flags {
				t.Fatalf("flags %#x of segments %d to %d, want %#x", tcp[13], i, j, flags)
			}
			got = append(got, q[vnetHeader+s.header:]...)
			for ; i < j; i++ {
				charged += s.size(i)
			}
		}
		if !bytes.Equal(got, payload) {
			t.Fatal("the parts' payloads are not the whole's")
		}
		if want := len(payload) + s.count*(40+options); charged != want {
			t.Fatalf("charged %d bytes, want %d", charged, want)
		}
	})
}

func FuzzShape(f *testing.F) {
	f.Add([]byte(superPacket(12, 1448, 0x18, make([]byte, 5000))))
	f.Add([]byte{vnetHeader: 0x45})
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) <= vnetHeader || len(b) > maxPacket {
			return
		}
		p := packet(b)
		s := p.shape()
		total := 0
		for i := range s.count {
			total += s.size(i)
			p.slice(s, i, i+1, room)
		}
		if total < len(b)-vnetHeader {
			t.Fatalf("%d bytes charged for %d", total, len(b)-vnetHeader)
		}
	})
}

func room(n int) packet { return make(packet, 0, n) }
