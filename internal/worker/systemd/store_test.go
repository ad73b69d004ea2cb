package systemd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// inheritEnv makes this test binary a service that is started with descriptors: it
// prints what it got.
const inheritEnv = "FOIL_SYSTEMD_TEST_INHERIT"

func TestMain(m *testing.M) {
	if os.Getenv(inheritEnv) != "" {
		s, err := OpenStore()
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		if s == nil {
			fmt.Println("no store")
			os.Exit(0)
		}
		files := s.Inherited()
		for _, name := range slices.Sorted(maps.Keys(files)) {
			b, err := io.ReadAll(files[name])
			_ = withFD(files[name], func(fd int) error {
				flags, ferr := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
				fmt.Println(name, string(b), err, fd >= 100, flags&unix.FD_CLOEXEC != 0, ferr)
				return nil
			})
		}
		fmt.Printf("%q\n", os.Getenv("LISTEN_FDS")+os.Getenv("LISTEN_PID")+os.Getenv("LISTEN_FDNAMES"))
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestInherit(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		pid, fds, names string
		want            []string
		fails           bool
	}{
		"three of two names": {"$$", "3", "gate/group:arena/x:gate/group", []string{"arena/x two <nil> true true <nil>", "gate/group three <nil> true true <nil>", `""`}, false},
		"for another":        {"1", "3", "a:b:c", []string{`""`}, false},
		"none":               {"$$", "0", "", []string{`""`}, false},
		"names are missing":  {"$$", "3", "a:b", nil, true},
		"no number":          {"$$", "many", "a:b", nil, true},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command("/bin/sh", "-c", fmt.Sprintf(`LISTEN_PID=%s exec "$0"`, test.pid), self)
			cmd.Env = append(os.Environ(), inheritEnv+"=1", "NOTIFY_SOCKET=/nowhere", "FDSTORE=10", "LISTEN_FDS="+test.fds, "LISTEN_FDNAMES="+test.names)
			for _, text := range []string{"one", "two", "three"} {
				path := filepath.Join(t.TempDir(), text)
				if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
				f, err := os.Open(path)
				if err != nil {
					t.Fatal(err)
				}
				defer f.Close()
				cmd.ExtraFiles = append(cmd.ExtraFiles, f)
			}
			out, err := cmd.Output()
			if test.fails {
				if err == nil {
					t.Errorf("no error: %s", out)
				}
				return
			}
			if diff := cmp.Diff(test.want, strings.Split(strings.TrimSpace(string(out)), "\n")); err != nil || diff != "" {
				t.Errorf("%v: %s", err, diff)
			}
		})
	}
}

// manager is one that stores descriptors, and tells what it was told.
type manager struct {
	conn *net.UnixConn
	told chan string
}

func startManager(t *testing.T) *manager {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	m := &manager{conn, make(chan string, 100)}
	done := make(chan struct{})
	t.Cleanup(func() {
		conn.Close()
		<-done
	})
	go func() {
		defer close(done)
		b, oob := make([]byte, 4096), make([]byte, 4096)
		for {
			n, o, _, _, err := conn.ReadMsgUnix(b, oob)
			if err != nil {
				return
			}
			text := strings.ReplaceAll(string(b[:n]), "\n", " ")
			list, _ := unix.ParseSocketControlMessage(oob[:o])
			for _, c := range list {
				fds, _ := unix.ParseUnixRights(&c)
				for _, fd := range fds {
					buf := make([]byte, 10)
					n, _ := unix.Pread(fd, buf, 0)
					text += " (" + string(buf[:max(0, n)]) + ")"
					_ = unix.Close(fd)
				}
			}
			m.told <- text
		}
	}()
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("FDSTORE", "10")
	return m
}

func TestStore(t *testing.T) {
	m := startManager(t)
	s, err := OpenStore()
	if err != nil || s == nil {
		t.Fatal(s, err)
	}
	file := func(text string) *os.File {
		f, err := os.CreateTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		if _, err := f.WriteString(text); err != nil {
			t.Fatal(err)
		}
		return f
	}
	steps := []error{
		s.Put(t.Context(), "arena/x", file("first")),
		s.Put(t.Context(), "arena/x", file("second")),
		s.Drop(t.Context(), "arena/x"),
		s.Drop(t.Context(), "arena/x"),
		s.Drop(t.Context(), "never"),
	}
	if err := errors.Join(steps...); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"FDSTORE=1 FDPOLL=0 FDNAME=arena/x (first)", "BARRIER=1 ()",
		"FDSTOREREMOVE=1 FDNAME=arena/x", "FDSTORE=1 FDPOLL=0 FDNAME=arena/x (second)", "BARRIER=1 ()",
		"FDSTOREREMOVE=1 FDNAME=arena/x",
	}
	for _, w := range want {
		if got := <-m.told; got != w {
			t.Errorf("the manager is told %q, want %q", got, w)
		}
	}
}

// A manager that does not read harms nobody for longer than the caller allows.
func TestStoreGivesUp(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("FDSTORE", "10")
	s, err := OpenStore()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Put(ctx, "x", os.Stdin); err == nil {
		t.Error("no error")
	}
}

func TestNoStore(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	t.Setenv("FDSTORE", "10")
	s, err := OpenStore()
	if s != nil || err != nil {
		t.Fatal(s, err)
	}
	if err := errors.Join(s.Put(t.Context(), "x", os.Stdin), s.Drop(t.Context(), "x"), s.Close()); err != nil || s.Inherited() != nil {
		t.Error(err)
	}
}
