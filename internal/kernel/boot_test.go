package kernel

import (
	"os"
	"strings"
	"testing"
)

func TestBootID(t *testing.T) {
	id, err := ReadBootID()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.TrimSpace(string(text)); id.String() != want {
		t.Errorf("boot ID %s, want %s", id, want)
	}
}
