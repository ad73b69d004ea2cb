package kernel

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestHoldProgram(t *testing.T) {
	err := HoldProgram()
	if errors.Is(err, unix.EINVAL) {
		t.Skip("MADV_POPULATE_READ needs Linux 5.14")
	}
	if err != nil {
		t.Fatal(err)
	}
	path, err := os.Readlink(selfPath)
	if err != nil {
		t.Fatal(err)
	}
	smaps, err := os.Open("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	defer smaps.Close()
	var here mapping
	readable, shared := 0, 0
	for lines := bufio.NewScanner(smaps); lines.Scan(); {
		if m, err := parseMapping(lines.Text()); err == nil {
			here = m
			continue
		}
		var resident uint64 // KiB
		if n, _ := fmt.Sscanf(lines.Text(), "Rss: %d kB", &resident); n != 1 || here.path != path || strings.Contains(here.access, "w") {
			continue
		}
		readable++
		if strings.Contains(here.access, "s") {
			shared++
		}
		// The kernel may have taken some again.
		if size := (here.end - here.start) / 1024; resident*10 < size*9 {
			t.Errorf("of the %d KiB of the program at %x (%s) %d are mapped", size, here.start, here.access, resident)
		}
	}
	// Code, constants, and the file's version of variables.
	if readable < 3 || shared == 0 {
		t.Errorf("%d mappings of %s, %d of them shared", readable, path, shared)
	}
}

func TestParseMapping(t *testing.T) {
	for _, test := range []struct {
		line string
		want mapping
		ok   bool
	}{
		{"00400000-01089000 r-xp 00000000 fe:00 123456                             /usr/bin/foil", mapping{0x400000, 0x1089000, 0, "r-xp", "/usr/bin/foil"}, true},
		{"01db2000-01e4a000 rw-p 019b2000 103:02 99 /a b (deleted)", mapping{0x1db2000, 0x1e4a000, 0x19b2000, "rw-p", "/a b (deleted)"}, true},
		{"c000000000-c000400000 rw-p 00000000 00:00 0 ", mapping{0xc000000000, 0xc000400000, 0, "rw-p", ""}, true},
		{"c000000000-c000400000 rw-p 00000000 00:00 0", mapping{0xc000000000, 0xc000400000, 0, "rw-p", ""}, true},
		{"ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]", mapping{0xffffffffff600000, 0xffffffffff601000, 0, "--xp", "[vsyscall]"}, true},
		{line: "2000-1000 r-xp 00000000 fe:00 1 /x"},
		{line: "zzzz-1000 r-xp 00000000 fe:00 1 /x"},
		{line: "nonsense"},
		{line: ""},
	} {
		got, err := parseMapping(test.line)
		if (err == nil) != test.ok {
			t.Errorf("%q: error %v", test.line, err)
		}
		if diff := cmp.Diff(test.want, got, cmp.AllowUnexported(mapping{})); diff != "" {
			t.Errorf("%q: %s", test.line, diff)
		}
	}
}
