package systemd

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

func TestNotify(t *testing.T) {
	for name, path := range map[string]string{
		"a path":           filepath.Join(t.TempDir(), "n"),
		"an abstract name": "@foil-test-" + filepath.Base(t.TempDir()) + "-" + t.Name(),
	} {
		t.Run(name, func(t *testing.T) {
			manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
			if err != nil {
				t.Fatal(err)
			}
			defer manager.Close()
			t.Setenv("NOTIFY_SOCKET", path)
			if err := Notify(Ready, Status("on %s\nand on", "and")); err != nil {
				t.Fatal(err)
			}
			b := make([]byte, 100)
			n, err := manager.Read(b)
			if got := string(b[:n]); err != nil || got != "READY=1\nSTATUS=on and and on" {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
	t.Setenv("NOTIFY_SOCKET", "")
	if err := Notify(Ready); err != nil {
		t.Errorf("without a manager: %v", err)
	}
	for _, path := range []string{"relative", filepath.Join(t.TempDir(), "none")} {
		t.Setenv("NOTIFY_SOCKET", path)
		if err := Notify(Ready); err == nil {
			t.Errorf("%s: no error", path)
		}
	}
}

// The units are what systemd understands.
func TestUnits(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skipf("skip: %v", err)
	}
	units, err := filepath.Glob("../../../deploy/systemd/*.service")
	if err != nil || len(units) == 0 {
		t.Fatalf("units: %q, %v", units, err)
	}
	// The program that a unit starts is not installed here.
	dir := t.TempDir()
	for _, unit := range units {
		b, err := os.ReadFile(unit)
		if err != nil {
			t.Fatal(err)
		}
		copied := filepath.Join(dir, filepath.Base(unit))
		if err := os.WriteFile(copied, replaceProgram(b), 0o644); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command(analyze, "verify", "--man=no", copied).CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("%s: %v\n%s", unit, err, out)
		}
	}
}

func replaceProgram(unit []byte) []byte {
	return bytes.ReplaceAll(unit, []byte("/usr/local/bin/foil"), []byte("/bin/true"))
}
