package gatetest

import (
	"bytes"
	"errors"
	"fmt"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// testRoom: however many readers of one arena wait, half of a gate's slots are left for reads of others, and
// what is present needs none.
func (s Setup) testRoom(t *testing.T) {
	if s.Loop {
		t.Skip("a loop device reads one range after the other")
	}
	const slots, readers = 32, 40
	g := s.gate(t, slots)
	stalled, other := s.rig(t, g, "stalled"), s.rig(t, g, "other")
	f := stalled.open(t, "big")
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_RANDOM); err != nil {
		t.Fatal(err)
	}
	got := make(chan error, readers)
	for i := range readers {
		go func() { got <- stalled.readAt(f, "big", i<<16, 100) }()
	}
	end := func(n int, want error) {
		t.Helper()
		for range n {
			select {
			case err := <-got:
				if !errors.Is(err, want) {
					t.Fatalf("a read of the stalled arena: %v, want %v", err, want)
				}
			case <-stalled.ctx.Done():
				t.Fatal("a read of the stalled arena hangs")
			}
		}
	}
	end(readers-slots/2, unix.EIO)
	// One that was refused counts until its thread is at its end.
	for g.Stats().Pending != slots/2 {
		select {
		case <-time.After(time.Millisecond):
		case <-stalled.ctx.Done():
			t.Fatalf("%d reads wait, want %d", g.Stats().Pending, slots/2)
		}
	}

	// A read of the other arena waits, and is answered.
	small := other.open(t, "small")
	wait, done := async(func() error { return other.readAt(small, "small", 0, 100) })
	if err := other.backing.WaitNeeds(other.ctx, 1); err != nil {
		t.Fatal(err)
	}
	select {
	case <-done:
		t.Error("the read of an absent block did not wait")
	default:
	}
	other.backing.Demand(true)
	if err := wait(t); err != nil {
		t.Error(err)
	}

	// So is one of the stalled arena whose range is here.
	at := int64(bytes.Index(stalled.Truth, stalled.Files["odd"]))
	if err := stalled.backing.Fill(at, int64(len(stalled.Files["odd"]))); err != nil {
		t.Fatal(err)
	}
	odd := stalled.open(t, "odd")
	wait, _ = async(func() error { return stalled.readAt(odd, "odd", 0, 1<<20) })
	if err := wait(t); err != nil {
		t.Error(err)
	}

	stalled.backing.Demand(true)
	end(slots/2, nil)
}

// testKilledRoom: a reader that is killed while it waits gives back what it took.
func (s Setup) testKilledRoom(t *testing.T) {
	if s.Loop {
		t.Skip("what a loop device reads is read by the kernel, whoever asked for it")
	}
	const slots = 16
	g := s.gate(t, slots)
	r := s.rig(t, g, arenaName)
	for round := range 2 {
		var readers []*exec.Cmd
		for i := range slots / 2 {
			cmd := exec.Command("dd", "if="+r.path("big"), "of=/dev/null", "bs=4096", "count=1", fmt.Sprintf("skip=%d", i*100))
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer cmd.Wait()
			defer cmd.Process.Kill()
			readers = append(readers, cmd)
			for g.Stats().Pending <= i {
				if r.ctx.Err() != nil {
					t.Fatalf("round %d: %d reads wait, want %d", round, g.Stats().Pending, i+1)
				}
				time.Sleep(time.Millisecond)
			}
		}
		for _, cmd := range readers {
			cmd.Process.Kill()
		}
		// Nobody reaps them yet: a parent that does not must not cost slots either.
		for g.Stats().Pending > 0 {
			if r.ctx.Err() != nil {
				t.Fatalf("round %d: readers are killed, and %d slots taken", round, g.Stats().Pending)
			}
			time.Sleep(time.Millisecond)
		}
	}
}
