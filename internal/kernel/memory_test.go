package kernel

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
)

// Another process writes into it by its name in /proc, and replaces what it wrote.
func TestMemoryDir(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounts need root")
	}
	d, err := MemoryDir()
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	dir := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), d.Fd())
	out, err := exec.Command("sh", "-c", `echo 17 > "$0/new" && mv "$0/new" "$0/pid"`, dir).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if b, err := os.ReadFile(dir + "/pid"); err != nil || string(b) != "17\n" {
		t.Errorf("got %q, %v", b, err)
	}
	if mounts, err := Mounts(dir); err == nil && len(mounts) != 0 {
		t.Errorf("it is mounted: %v", mounts)
	}
	list, err := os.ReadDir(dir)
	if err != nil || len(list) != 1 {
		t.Errorf("it holds %v, %v", list, err)
	}
}
