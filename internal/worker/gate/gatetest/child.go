package gatetest

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime/debug"
	"strconv"

	"golang.org/x/sys/unix"
)

const childEnv = "FOIL_GATETEST_COMPARE_MAPPED"

// Child must be called by TestMain of a package that runs the suite, first of
// all: some readers of the suite are this same program.
func Child() {
	if os.Getenv(childEnv) == "" {
		return
	}
	if err := compareMapped(os.Args[1], os.Args[2], os.Args[3:]); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

func runChild(ctx context.Context, args []string) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, exe, args...)
	cmd.Env = append(os.Environ(), childEnv+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// compareMapped compares what path shows when it is mapped with a plain file.
func compareMapped(path, want string, offsets []string) (err error) {
	b, err := os.ReadFile(want)
	if err != nil {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	mem, err := unix.Mmap(int(f.Fd()), 0, len(b), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	defer unix.Munmap(mem)
	debug.SetPanicOnFault(true)
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("fault: %v", p)
		}
	}()
	for _, o := range offsets {
		off, err := strconv.Atoi(o)
		if err != nil {
			return err
		}
		if !bytes.Equal(mem[off:off+5000], b[off:off+5000]) {
			return fmt.Errorf("wrong bytes at %d", off)
		}
	}
	return nil
}
