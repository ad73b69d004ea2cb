package link

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"
)

// Measurement is what a link did when it was tried.
type Measurement struct {
	RTT   time.Duration // median of small packets there and back
	Rate  float64       // bits a second, in IP packets, from cloud to edge
	Late  time.Duration // of the most belated packet
	Moved int64         // bytes that the trial moved
}

func (m Measurement) String() string {
	return fmt.Sprintf("round trip %.2f ms, %.1f Mbit/s, latest packet %.2f ms late",
		m.RTT.Seconds()*1e3, m.Rate/1e6, m.Late.Seconds()*1e3)
}

// Check tries the link for some seconds: echoes for the round trip, then one
// TCP transfer from cloud to edge, counted from when it has found its speed.
// An error means that the machine does not hold what Options ask for; numbers
// that are measured on it then say nothing. A lossy link, or one without a
// rate, is measured but not judged by its rate.
func (l *Link) Check(ctx context.Context) (Measurement, error) {
	var m Measurement
	before := l.Stats(Cloud).Bytes
	rtt, err := l.measureRTT(ctx, 15)
	if err != nil {
		return m, fmt.Errorf("link: measure round trip: %w", err)
	}
	m.RTT = rtt
	// Slow start doubles each round trip; a dozen of them find 1 Gbit/s. What it
	// has sent too much and lost takes as many again where the path holds many bytes.
	trips := time.Duration(12)
	if onTheWay := float64(l.options.Rate) / 8 * l.options.RTT.Seconds(); onTheWay > 8<<20 {
		trips = 24
	}
	settle := 300*time.Millisecond + trips*l.options.RTT
	m.Rate, err = l.measureRate(ctx, settle, time.Second+2*l.options.RTT)
	if err != nil {
		return m, fmt.Errorf("link: measure rate: %w", err)
	}
	// What is still under way must not be in the way of what comes next.
	drain := l.options.RTT
	if l.options.Rate > 0 {
		drain += time.Duration(float64(l.options.Queue) * 8e9 / float64(l.options.Rate))
	}
	select {
	case <-ctx.Done():
		return m, ctx.Err()
	case <-time.After(drain):
	}
	m.Late = max(l.Stats(Cloud).Late, l.Stats(Edge).Late)
	m.Moved = l.Stats(Cloud).Bytes - before

	var errs []error
	if m.RTT < l.options.RTT || m.RTT > l.options.RTT+l.options.RTT/20+2*time.Millisecond {
		errs = append(errs, fmt.Errorf("link: the round trip is %v instead of %v: the machine is too busy", m.RTT, l.options.RTT))
	}
	want := float64(l.options.Rate)
	if want > 0 && l.options.Loss == 0 && (m.Rate < 0.85*want || m.Rate > 1.02*want) {
		errs = append(errs, fmt.Errorf("link: %.1f Mbit/s get through instead of %.1f: the machine is too busy, or too slow for this rate", m.Rate/1e6, want/1e6))
	}
	return m, errors.Join(errs...)
}

// measureRTT is the median of n echoes of one small packet.
func (l *Link) measureRTT(ctx context.Context, n int) (time.Duration, error) {
	var server net.PacketConn
	err := l.Do(Cloud, func() (err error) {
		server, err = net.ListenPacket("udp4", netip.AddrPortFrom(l.Addr(Cloud), 0).String())
		return err
	})
	if err != nil {
		return 0, err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buffer := make([]byte, 64)
		for {
			n, from, err := server.ReadFrom(buffer)
			if err != nil {
				return
			}
			server.WriteTo(buffer[:n], from)
		}
	}()
	defer func() {
		server.Close()
		<-done
	}()
	client, err := l.DialContext(ctx, Edge, "udp4", server.LocalAddr().String())
	if err != nil {
		return 0, err
	}
	defer client.Close()
	stop := context.AfterFunc(ctx, func() { client.SetDeadline(time.Unix(1, 0)) })
	defer stop()

	var times []time.Duration
	buffer := make([]byte, 64)
	for i := 0; len(times) < n && i < 4*n; i++ {
		began := time.Now()
		buffer[0] = byte(i)
		if _, err := client.Write(buffer[:1]); err != nil {
			return 0, err
		}
		client.SetReadDeadline(began.Add(2*l.options.RTT + time.Second))
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
		_, err := client.Read(buffer[1:])
		var late net.Error
		if errors.As(err, &late) && late.Timeout() && ctx.Err() == nil {
			continue // lost
		}
		if err != nil {
			return 0, err
		}
		if buffer[1] == byte(i) { // not an echo that was given up
			times = append(times, time.Since(began))
		}
	}
	if len(times) == 0 {
		return 0, errors.New("no echo came back")
	}
	slices.Sort(times)
	return times[len(times)/2], nil
}

// measureRate sends from cloud to edge over one connection and counts, when
// settle is over, what arrives at the edge's device for period. (What arrives
// at the socket comes in leaps, after each loss.)
func (l *Link) measureRate(ctx context.Context, settle, period time.Duration) (float64, error) {
	listener, err := l.Listen(Cloud, "tcp4", netip.AddrPortFrom(l.Addr(Cloud), 0).String())
	if err != nil {
		return 0, err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		data := make([]byte, 256<<10)
		for err == nil { // until the other end has had enough
			_, err = conn.Write(data)
		}
	}()
	defer func() {
		listener.Close()
		<-done
	}()
	conn, err := l.DialContext(ctx, Edge, "tcp4", listener.Addr().String())
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()

	buffer := make([]byte, 1<<20)
	var from time.Time
	var counted int64
	for began := time.Now(); ; {
		if _, err := conn.Read(buffer); err != nil {
			return 0, err
		}
		now, bytes := time.Now(), l.Stats(Cloud).Bytes
		switch {
		case from.IsZero() && now.Sub(began) >= settle:
			from, counted = now, bytes
		case !from.IsZero() && now.Sub(from) >= period:
			return float64(bytes-counted) * 8 / now.Sub(from).Seconds(), nil
		}
	}
}
