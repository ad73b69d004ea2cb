package kernel

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Process is what the kernel says of a process, or of a thread.
type Process struct {
	State byte   // R, S, D, Z, X, ...: proc(5)
	Start uint64 // clock ticks of 10 ms from the boot until it began
}

// ReadProcess reads stat in a directory of /proc: /proc/PID or /proc/PID/task/TID.
//
// Errors: unix.ENOENT or unix.ESRCH when it is no more.
func ReadProcess(dir string) (Process, error) {
	b, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return Process{}, err
	}
	return parseProcess(b)
}

func parseProcess(stat []byte) (p Process, err error) {
	// The second field is the program's name, in brackets, with whatever is in it.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 20 || len(fields[0]) != 1 {
		return p, fmt.Errorf("%q is no stat of a process", stat)
	}
	p.State = fields[0][0]
	p.Start, err = strconv.ParseUint(string(fields[19]), 10, 64) // field 22 of proc(5)
	return p, err
}

// Ended reports whether it runs no more, though its number may be taken still.
func (p Process) Ended() bool { return p.State == 'Z' || p.State == 'X' }

// Killed reports whether SIGKILL waits for a process or thread, by status in its directory of /proc.
func Killed(dir string) bool {
	b, err := os.ReadFile(dir + "/status")
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		name, mask, _ := strings.Cut(line, ":")
		if name != "SigPnd" && name != "ShdPnd" {
			continue
		}
		if v, err := strconv.ParseUint(strings.TrimSpace(mask), 16, 64); err == nil && v&(1<<(unix.SIGKILL-1)) != 0 {
			return true
		}
	}
	return false
}
