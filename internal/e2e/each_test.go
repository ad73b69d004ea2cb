package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/launch"
)

// eachLine is a line of foil each --json.
type eachLine struct {
	launch.Outcome
	Output string
	Totals *struct {
		launch.EachTotals
		Images     int
		Ends       map[string]int
		BytesMoved int64 `json:"bytes_moved"`
	}
}

func eachLines(t *testing.T, out string) (lines []eachLine) {
	t.Helper()
	for dec := json.NewDecoder(bytes.NewReader([]byte(out))); dec.More(); {
		var l eachLine
		if err := dec.Decode(&l); err != nil {
			t.Fatalf("%v in %s", err, out)
		}
		lines = append(lines, l)
	}
	return lines
}

// One command over all tags of a repository: each reads all of its image, what they share moves once, results come out by
// a mount, and nothing is left.
func TestEachTag(t *testing.T) {
	t.Parallel()
	needContainers(t)
	s := startServer(t, t.TempDir())
	const versions = 5
	sums := make(map[string]string) // by tag
	for v := range versions {
		img := manyFiles(t, 150, 20_000, uint64(v+1), 0.1)
		s.push("app", fmt.Sprintf("v%d", v+8), img)
		sums[fmt.Sprint(v+1)] = wantSums(t, img)
	}
	s.push("app", "other", manyFiles(t, 1, 10, 99, 0))
	apart := startWorker(t, workerRoot(t))
	one := apart.mustPull(s.addr+"/app:v8", api.Complete)

	w := startWorker(t, workerRoot(t))
	results := t.TempDir()
	out, stderr, code := command(t, "each", "--root", w.root, "--json", "--jobs", "2", "--mount", "source="+results+",target=/results",
		"--mount", "type=tmpfs,target=/scratch,tmpfs-size=1m", "--workdir", "/results", s.addr+"/app:v*", "--", "/bin/sh", "-c",
		`read v </version; echo tmpfs >/scratch/a || exit 9; { `+printSums+`; } >$v; echo $FOIL_IMAGE; [ $v != 3 ]`)
	if code != 1 {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	lines := eachLines(t, out)
	if len(lines) != versions+1 {
		t.Fatalf("%d lines: %s%s", len(lines), out, stderr)
	}
	for _, l := range lines[:versions] {
		want := 0
		if l.Ref == s.addr+"/app:v10" {
			want = 1
		}
		if l.Code == nil || *l.Code != want || l.Output != l.Ref+"\n" {
			t.Errorf("%+v, want exit code %d", l, want)
		}
	}
	if got := lines[0].Ref; got != s.addr+"/app:v8" && got != s.addr+"/app:v9" {
		t.Errorf("%s ended first: versions are not in their order", got)
	}
	totals := lines[versions].Totals
	if totals == nil || totals.Images != versions || totals.Removed != versions || totals.Ends["exit 0"] != versions-1 {
		t.Errorf("totals %+v", totals)
	}
	for v, want := range sums {
		got, err := os.ReadFile(filepath.Join(results, v))
		if err != nil || string(got) != want {
			t.Errorf("version %s read something else: %v, %s", v, err, firstDifference(string(got), want))
		}
	}
	// A tenth of each further version is its own.
	first := one[len(one)-1].BytesMoved
	if totals != nil && totals.BytesMoved > first*(10+2*(versions-1))/10 {
		t.Errorf("moved %d bytes for %d versions, one takes %d", totals.BytesMoved, versions, first)
	}
	w.leavesNothing(t)
	w.hasNoImages(t)
}

// hasNoImages checks that a worker has no image any more, and nothing of one.
func (w *worker) hasNoImages(t *testing.T) {
	t.Helper()
	eventually(t, "no image is left", func() error {
		images, err := w.client.Images(t.Context())
		if err != nil {
			return err
		}
		left, err := filepath.Glob(filepath.Join(w.root, "rootfs", "*"))
		if err == nil && len(images)+len(left) > 0 {
			err = fmt.Errorf("%v, %v", images, left)
		}
		return err
	})
}

// Whoever interrupts foil each finds nothing of it, though the images are still on their way.
func TestEachIsInterrupted(t *testing.T) {
	t.Parallel()
	needContainers(t)
	s := startServer(t, t.TempDir())
	k := newLink(t, s.addr, 2<<20)
	for v := range 4 {
		s.push("slow", fmt.Sprint(v), manyFiles(t, 100, 200_000, uint64(v+50), 1))
	}
	w := startWorker(t, workerRoot(t))
	out := outFile(filepath.Join(t.TempDir(), "out"))
	logs := t.TempDir()
	cmd := exec.Command(foil, "each", "--root", w.root, "--logs", logs, "--grace", "100ms", "--jobs", "2", k.via(s.addr+"/slow:*"), "--", "/bin/sh", "-c",
		"echo up; while true; do sleep 1; done")
	file := out.create(t)
	defer file.Close()
	cmd.Stdout, cmd.Stderr = file, file
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
	})
	eventually(t, "two containers run", func() error {
		up := 0
		names, _ := filepath.Glob(filepath.Join(logs, "*"))
		for _, name := range names {
			if b, err := os.ReadFile(name); err == nil && string(b) == "up\n" {
				up++
			}
		}
		if up < 2 {
			return fmt.Errorf("%d of %v run: %s", up, names, out)
		}
		return nil
	})
	_ = cmd.Process.Signal(syscall.SIGINT)
	<-ended
	if code := cmd.ProcessState.ExitCode(); code != 130 {
		t.Errorf("exit code %d: %s", code, out)
	}
	w.leavesNothing(t)
	w.hasNoImages(t)
}
