package main

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// Each command of foil, foil run above all, initialises all packages before main,
// whichever of them it needs. So ours make no large tables then: a pattern with a
// hundred repetitions takes as long as the request that it is there for.
func TestInitWork(t *testing.T) {
	const most, mostOfAll = 64 << 10, 128 << 10 // bytes allocated
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, "-test.run=^$")
	cmd.Env = append(os.Environ(), "GODEBUG=inittrace=1")
	var trace bytes.Buffer
	cmd.Stderr = &trace
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s", err, &trace)
	}
	all, packages := 0, 0
	for lines := bufio.NewScanner(&trace); lines.Scan(); {
		// init PACKAGE @2.6 ms, 0.18 ms clock, 9672 bytes, 72 allocs
		rest, ok := strings.CutPrefix(lines.Text(), "init hydrofoil.dev/")
		if !ok {
			continue
		}
		var name string
		var at, took float64
		var size, allocs int
		if _, err := fmt.Sscanf(rest, "%s @%g ms, %g ms clock, %d bytes, %d allocs", &name, &at, &took, &size, &allocs); err != nil {
			t.Fatalf("%q: %v", lines.Text(), err)
		}
		if size > most {
			t.Errorf("the initialisation of %s allocates %d bytes, more than %d: do it when it is needed first", name, size, most)
		}
		all += size
		packages++
	}
	if packages == 0 {
		t.Fatalf("no package of ours in\n%s", &trace)
	}
	if all > mostOfAll {
		t.Errorf("the initialisation of our packages allocates %d bytes, more than %d", all, mostOfAll)
	}
}
