package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
)

// memoryOf reads one line of /proc/<pid>/status, in bytes.
func memoryOf(b *testing.B, pid int, line string) int64 {
	b.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		b.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(status), line+":")
	var kb int64
	if _, err := fmt.Sscan(rest, &kb); !ok || err != nil {
		b.Fatalf("no %s of process %d: %v", line, pid, err)
	}
	return kb << 10
}

// BenchmarkDaemonMemory pulls an image of 84,000 files and reports what the
// daemon takes: resident a second after the image is complete, and at most on the way.
// The goal is 40 MB and 0.2 KB a file.
func BenchmarkDaemonMemory(b *testing.B) {
	const files = 84_000
	s := startServer(b, b.TempDir())
	ref := s.push("many", "1", manyFiles(b, files, 1000, 1, 0))
	// The server ingests before it answers; that is not what is measured.
	startWorker(b, workerRoot(b)).mustPull(ref, api.Complete)
	var resident, peak int64
	for b.Loop() {
		w := startWorker(b, workerRoot(b))
		w.mustPull(ref, api.Complete)
		time.Sleep(time.Second) // what the pull took is given back right after
		resident = memoryOf(b, w.cmd.Process.Pid, "VmRSS")
		peak = memoryOf(b, w.cmd.Process.Pid, "VmHWM")
	}
	b.ReportMetric(float64(resident)/1e6, "MB-resident")
	b.ReportMetric(float64(peak)/1e6, "MB-peak")
	b.ReportMetric((40e6+200*files)/1e6, "MB-goal")
}
