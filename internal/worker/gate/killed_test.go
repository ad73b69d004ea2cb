package gate

import (
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestGone(t *testing.T) {
	child := func() int32 {
		cmd := exec.Command("sleep", "1000")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
		return int32(cmd.Process.Pid)
	}
	alive, zombie, reaped := child(), child(), child()
	unix.Kill(int(zombie), unix.SIGKILL)
	if err := unix.Waitid(unix.P_PID, int(zombie), nil, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	unix.Kill(int(reaped), unix.SIGKILL)
	if _, err := unix.Wait4(int(reaped), nil, 0, nil); err != nil {
		t.Fatal(err)
	}
	now := newReader(1, true).since
	for _, tt := range []struct {
		name   string
		pid    int32
		since  time.Duration
		thread bool
		want   bool
	}{
		{"it waits", alive, now, true, false},
		{"this thread waits", int32(unix.Gettid()), now, true, false},
		{"it is dead, and not reaped", zombie, now, true, true},
		{"its process's first thread is dead", zombie, now, false, false},
		{"it is dead", reaped, now, true, true},
		{"its process is dead", reaped, now, false, true},
		{"another one has its number", alive, now - time.Hour, true, true},
		{"it cannot be seen from here", 0, now, true, false},
	} {
		if got := (reader{tt.pid, tt.since, tt.thread}).gone(); got != tt.want {
			t.Errorf("%s: gone %v, want %v", tt.name, got, tt.want)
		}
	}
}
