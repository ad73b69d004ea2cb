package kernel

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

func TestReadProcess(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	dir := fmt.Sprintf("/proc/%d", cmd.Process.Pid)
	own, err := ReadProcess("/proc/self")
	if err != nil {
		t.Fatal(err)
	}
	child, err := ReadProcess(dir)
	if err != nil || child.Ended() || child.Start < own.Start || own.Start == 0 {
		t.Errorf("child %+v, own %+v: %v", child, own, err)
	}
	if Killed(dir) {
		t.Error("it was not killed")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	if child, err = ReadProcess(dir); err != nil || !child.Ended() {
		t.Errorf("killed, and not reaped: %+v, %v", child, err)
	}
	_ = cmd.Wait()
	if _, err := ReadProcess(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("gone: %v", err)
	}
}

func TestParseProcess(t *testing.T) {
	p, err := parseProcess([]byte("12 (a b) c) S 1 12 12 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4711 2 3"))
	if want := (Process{'S', 4711}); err != nil || p != want {
		t.Errorf("%+v, %v", p, err)
	}
	for _, b := range []string{"", "12 (x", "12 (x) S 1", "12 (x) SS 1 12 12 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4711 2 3", "12 (x) S 1 12 12 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 x 2 3"} {
		if p, err := parseProcess([]byte(b)); err == nil {
			t.Errorf("%q: %+v", b, p)
		}
	}
}
