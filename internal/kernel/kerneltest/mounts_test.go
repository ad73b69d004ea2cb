package kerneltest

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	OwnMounts()
	os.Exit(m.Run())
}

// The parent, `go test` or a shell, sees nothing of what is mounted here.
func TestOwnMounts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	dir := t.TempDir()
	if err := unix.Mount("kerneltest", dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, 0) //nolint:errcheck
	if err := os.WriteFile(dir+"/here", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	parent := fmt.Sprintf("/proc/%d/root", os.Getppid())
	if _, err := os.Stat(parent + dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(parent + dir + "/here"); err == nil {
		t.Error("the parent sees a mount of the tests")
	}
}
