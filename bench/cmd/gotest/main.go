// Gotest runs `go test` in some modules and prints what a reader wants of it:
// one line a package, whatever a failed test said, why a test was skipped, and
// last the count of tests.
//
//	gotest [-C DIR] [go test's flags] -- MODULE...
//
// It exits with 1 when a test failed or a package did not build, and also when
// no test ran at all.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	dir, flags, modules, err := arguments(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "gotest:", err)
		os.Exit(2)
	}
	r := report{out: os.Stdout, output: map[test][]string{}}
	failed := false
	for _, module := range modules {
		if err := run(ctx, filepath.Join(dir, module), flags, &r); err != nil {
			fmt.Fprintf(os.Stderr, "gotest: go test in %s: %v\n", module, err)
			failed = true
		}
	}
	fmt.Printf("%d passed, %d failed, %d skipped\n", r.passed, r.failed, r.skipped)
	if failed || r.failed > 0 || r.passed == 0 {
		os.Exit(1)
	}
}

// arguments splits the command line: flags go to go test as they are.
func arguments(args []string) (dir string, flags, modules []string, err error) {
	if len(args) >= 2 && args[0] == "-C" {
		dir, args = args[1], args[2:]
	}
	i := slices.Index(args, "--")
	if i < 0 || i == len(args)-1 {
		return "", nil, nil, errors.New("usage: gotest [-C DIR] [FLAG...] -- MODULE...")
	}
	return dir, args[:i], args[i+1:], nil
}

// run tests the packages of the module in dir. The error is go test's own: a
// test that failed, or a package that did not build.
func run(ctx context.Context, dir string, flags []string, r *report) error {
	cmd := exec.CommandContext(ctx, "go", slices.Concat([]string{"test", "-json"}, flags, []string{"./..."})...)
	// An interrupted go test interrupts its tests, which then clean up.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.Dir = dir
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	readErr := r.read(stdout)
	return errors.Join(readErr, cmd.Wait())
}

// test names a test, or a whole package when name is empty.
type test struct{ pkg, name string }

// event is one line of go test -json (see `go doc test2json`).
type event struct {
	Action      string
	Package     string
	ImportPath  string // of build output
	Test        string
	Output      string
	Elapsed     float64 // seconds
	FailedBuild string
}

// report counts tests, subtests not among them, and prints as it goes.
type report struct {
	out                     io.Writer
	passed, failed, skipped int
	output                  map[test][]string // of tests that have not ended
}

func (r *report) read(in io.Reader) error {
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			// What is not JSON comes from the go command itself.
			if json.Unmarshal(line, &e) != nil {
				fmt.Fprintf(r.out, "%s\n", bytes.TrimRight(line, "\n"))
			} else {
				r.add(e)
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (r *report) add(e event) {
	t := test{e.Package, e.Test}
	top := e.Test != "" && !strings.Contains(e.Test, "/")
	switch e.Action {
	case "output":
		// go test's own summary lines are printed below, in one form.
		r.output[t] = append(r.output[t], e.Output)
	case "build-output":
		fmt.Fprint(r.out, e.Output)
	case "pass":
		if top {
			r.passed++
		}
		if e.Test == "" {
			fmt.Fprintf(r.out, "ok  \t%s\t%.3fs\n", e.Package, e.Elapsed)
		}
		delete(r.output, t)
	case "skip":
		if top {
			r.skipped++
		}
		if e.Test != "" {
			fmt.Fprintf(r.out, "skip\t%s %s: %s\n", e.Package, e.Test, reason(r.output[t]))
		}
		delete(r.output, t)
	case "fail":
		if top {
			r.failed++
		}
		for _, line := range r.output[t] {
			fmt.Fprint(r.out, line)
		}
		if e.Test == "" {
			fmt.Fprintf(r.out, "FAIL\t%s\t%.3fs\n", e.Package, e.Elapsed)
		}
		delete(r.output, t)
	}
}

// reason is what a skipped test said, without go test's own marks.
func reason(output []string) string {
	var said []string
	for _, line := range output {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "===") && !strings.HasPrefix(line, "---") {
			said = append(said, line)
		}
	}
	return strings.Join(said, " ")
}
