package link

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// made is a packet of a connection from the edge's port to the cloud's 5000, or
// back if port is negative.
func made(port int, flags byte, seq uint32, payload string) packet {
	p := make(packet, vnetHeader+20+20, vnetHeader+40+len(payload))
	p = append(p, payload...)
	be, ip, tcp := binary.BigEndian, p[vnetHeader:], p[vnetHeader+20:]
	ip[0], ip[8], ip[9] = 0x45, 64, 6
	be.PutUint16(ip[2:], uint16(len(ip)))
	edge, cloud := []byte{192, 0, 2, 2}, []byte{192, 0, 2, 1}
	if port > 0 {
		copy(ip[12:], edge)
		copy(ip[16:], cloud)
		be.PutUint16(tcp[0:], uint16(port))
		be.PutUint16(tcp[2:], 5000)
	} else {
		copy(ip[12:], cloud)
		copy(ip[16:], edge)
		be.PutUint16(tcp[0:], 5000)
		be.PutUint16(tcp[2:], uint16(-port))
	}
	be.PutUint32(tcp[4:], seq)
	tcp[12], tcp[13] = 5<<4, flags
	return p
}

// frame is one of HTTP/2.
func frame(kind byte, stream uint32, payload string) string {
	b := []byte{byte(len(payload) >> 16), byte(len(payload) >> 8), byte(len(payload)), kind, 0, 0, 0, 0, 0}
	binary.BigEndian.PutUint32(b[5:], stream)
	return string(b) + payload
}

const get = "GET /v2/ HTTP/1.1\r\nHost: x\r\n\r\n"

// event is a packet and when it passes, in milliseconds.
type event struct {
	at int
	packet
}

func TestCapture(t *testing.T) {
	const syn, synAck, ack = tcpSYN, tcpSYN | tcpACK, tcpACK
	h2 := string(preface) + frame(4, 0, "settin") // SETTINGS
	fragment := made(1, ack, 101, get)
	fragment[vnetHeader+7] = 1 // not the first one
	for _, c := range []struct {
		name   string
		events []event
		want   Capture
	}{
		{"nothing", nil, Capture{}},
		{"a handshake, whose SYN is sent again", []event{
			{0, made(1, syn, 100, "")}, {90, made(1, syn, 100, "")}, {100, made(-1, synAck, 7, "")}, {100, made(1, ack, 101, "")},
		}, Capture{1, 0, 1}},
		{"another connection of the same port", []event{
			{0, made(1, syn, 100, "")}, {100, made(-1, synAck, 7, "")}, {200, made(1, syn, 900, "")},
		}, Capture{2, 0, 2}},
		{"handshake, request, answer, request", []event{
			{0, made(1, syn, 100, "")}, {100, made(-1, synAck, 7, "")},
			{100, made(1, ack, 101, get)}, {200, made(-1, ack, 8, "HTTP/1.1 200 OK")}, {210, made(-1, ack, 23, "body")},
			{211, made(1, ack, 101+uint32(len(get)), get)},
		}, Capture{1, 2, 3}},
		{"a request that is sent again, whole and in part", []event{
			{0, made(1, syn, 100, "")}, {100, made(-1, synAck, 7, "")},
			{100, made(1, ack, 101, get)}, {300, made(1, ack, 101, get)}, {500, made(1, ack, 101, get+"more")},
		}, Capture{1, 1, 2}},
		{"sequence numbers that wrap", []event{
			{0, made(1, syn, 0xfffffffe, "")}, {100, made(-1, synAck, 7, "")},
			{100, made(1, ack, 0xffffffff, get)}, {200, made(-1, ack, 8, "HTTP/1.1 200 OK")},
			{300, made(1, ack, 0xffffffff, get)}, {400, made(1, ack, uint32(len(get))-1, get)},
		}, Capture{1, 2, 3}},
		{"a body that looks like a request", []event{
			{0, made(1, syn, 100, "")}, {100, made(-1, synAck, 7, "")},
			{100, made(1, ack, 101, "POST / HTTP/1.1\r\n\r\n")}, {101, made(1, ack, 120, "GET me")},
		}, Capture{1, 1, 2}},
		{"two connections side by side are one round trip each time", []event{
			{0, made(1, syn, 100, "")}, {1, made(2, syn, 500, "")}, {100, made(-1, synAck, 7, "")},
			{100, made(1, ack, 101, get)}, {101, made(-2, synAck, 7, "")}, {101, made(2, ack, 501, get)},
		}, Capture{2, 2, 2}},
		{"what comes too soon has not waited for an answer", []event{
			{0, made(1, syn, 100, "")}, {100, made(-1, synAck, 7, "")}, {100, made(1, ack, 101, string(preface)+frame(frameHEADERS, 1, "h"))},
			{200, made(-1, ack, 8, "stream")}, {220, made(1, ack, 135, frame(frameHEADERS, 3, "h"))},
			{230, made(-1, ack, 14, "stream")}, {250, made(1, ack, 145, frame(frameHEADERS, 5, "h"))},
			{260, made(-1, ack, 20, "stream")}, {320, made(1, ack, 155, frame(frameHEADERS, 7, "h"))},
		}, Capture{1, 4, 4}},
		{"HTTP/2: settings and flow control say nothing", []event{
			{0, made(1, syn, 100, "")}, {100, made(-1, synAck, 7, "")}, {100, made(1, ack, 101, h2)},
			{200, made(-1, ack, 8, "settings")}, {300, made(1, ack, 101+uint32(len(h2)), frame(8, 0, "1234"))},
			{400, made(1, ack, 114+uint32(len(h2)), frame(frameHEADERS, 1, "header")+frame(0, 1, "body")+frame(frameHEADERS, 1, "trailer"))},
		}, Capture{1, 1, 2}},
		{"HTTP/2 in pieces", []event{
			{0, made(1, syn, 100, "")}, {100, made(-1, synAck, 7, "")}, {100, made(1, ack, 101, h2[:10])}, {100, made(1, ack, 111, h2[10:30])},
			{100, made(1, ack, 131, h2[30:]+frame(frameHEADERS, 1, "header")[:3])}, {100, made(1, ack, 134+uint32(len(h2))-30, frame(frameHEADERS, 1, "header")[3:])},
		}, Capture{1, 1, 2}},
		{"what is not HTTP", []event{
			{0, made(1, syn, 100, "")}, {100, made(-1, synAck, 7, "")}, {100, made(1, ack, 101, "\x16\x03\x01")},
			{200, made(-1, ack, 8, "hello")}, {200, made(1, ack, 104, "\x17")},
		}, Capture{1, 0, 3}},
		{"a connection that is refused, and then one that is not", []event{
			{0, made(1, syn, 100, "")}, {100, made(-1, tcpRST|tcpACK, 0, "")}, {101, made(2, syn, 100, "")}, {102, made(1, ack, 101, get)},
		}, Capture{2, 0, 2}},
		{"a connection of the cloud's", []event{
			{0, made(-1, syn, 100, "")}, {100, made(1, synAck, 7, "")}, {100, made(1, ack, 8, get)},
		}, Capture{}},
		{"a fragment", []event{
			{0, made(1, syn, 100, "")}, {100, made(-1, synAck, 7, "")}, {100, fragment},
		}, Capture{1, 0, 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			counter := newCapture(100 * time.Millisecond)
			for _, e := range c.events {
				if bytes.Equal(e.packet[vnetHeader+12:vnetHeader+16], []byte{192, 0, 2, 2}) {
					counter.sent(e.packet, time.Duration(e.at)*time.Millisecond)
				} else {
					counter.received(e.packet)
				}
			}
			if diff := cmp.Diff(c.want, counter.now()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// However a stream of frames is cut, the same requests are in it.
func TestFramesInPieces(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text, want := string(preface), int64(0)
		for range rapid.IntRange(0, 20).Draw(t, "frames") {
			kind := rapid.Byte().Draw(t, "kind")
			stream := uint32(2*want + 1)
			if kind == frameHEADERS {
				want++
			}
			text += frame(kind, stream, string(rapid.SliceOfN(rapid.Byte(), 0, 300).Draw(t, "payload")))
		}
		v := conversation{}
		var got int64
		for len(text) > 0 {
			n := rapid.IntRange(1, len(text)).Draw(t, "piece")
			requests, _ := v.read([]byte(text[:n]))
			got += requests
			text = text[n:]
		}
		if got != want {
			t.Fatalf("%d requests, want %d", got, want)
		}
	})
}

func FuzzCapture(f *testing.F) {
	f.Add([]byte(made(1, tcpSYN, 100, "")), []byte(made(1, tcpACK, 101, get)))
	f.Add([]byte(made(1, tcpSYN, 100, "")), []byte(made(1, tcpACK, 101, string(preface)+frame(frameHEADERS, 1, "x"))))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		c := newCapture(time.Millisecond)
		for i, p := range [][]byte{a, b, b, a} {
			c.sent(p, time.Duration(i)*time.Second)
			c.received(p)
		}
		// Only a handshake or a payload can be any of these, and there are four packets.
		if got := c.now(); got.Connections > 4 || got.RoundTrips > 4 || got.Requests > int64(len(a)+len(b)) {
			t.Fatalf("%+v of four packets", got)
		}
	})
}

// TestCaptureOfLink counts what the kernel sends for requests of which one waits
// for the other, by HTTP/1 and by HTTP/2.
func TestCaptureOfLink(t *testing.T) {
	for _, options := range []Options{{RTT: 20 * time.Millisecond, Rate: 100e6}, {}} {
		t.Run(fmt.Sprintf("%v", options.RTT), func(t *testing.T) { captureOf(t, open(t, options)) })
	}
}

func captureOf(t *testing.T, l *Link) {
	listener, err := l.Listen(Cloud, "tcp4", "192.0.2.1:5000")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write(make([]byte, 300_000)) })}
	server.Protocols = new(http.Protocols)
	server.Protocols.SetHTTP1(true)
	server.Protocols.SetUnencryptedHTTP2(true)
	go server.Serve(listener)
	defer server.Close()
	for _, second := range []bool{false, true} {
		before := l.Capture()
		transport := &http.Transport{Protocols: new(http.Protocols), DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return l.DialContext(ctx, Edge, network, address)
		}}
		transport.Protocols.SetHTTP1(!second)
		transport.Protocols.SetUnencryptedHTTP2(second)
		client := &http.Client{Transport: transport}
		for range 3 {
			response, err := client.Get("http://192.0.2.1:5000/")
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, response.Body); err != nil {
				t.Fatal(err)
			}
			response.Body.Close()
		}
		transport.CloseIdleConnections()
		if diff := cmp.Diff(Capture{1, 3, 4}, l.Capture().Sub(before)); diff != "" {
			t.Errorf("HTTP/2 %t: %s", second, diff)
		}
	}
}
