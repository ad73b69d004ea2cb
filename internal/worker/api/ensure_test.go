package api_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/api/apitest"
)

// TestMain lets the test binary be the daemon that EnsureDaemon starts.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "daemon" {
		os.Exit(daemon(os.Args[2], os.Args[3:]))
	}
	os.Exit(m.Run())
}

// daemon runs a fake daemon at root until SIGTERM, or does what mode says.
func daemon(root string, mode []string) int {
	switch strings.Join(mode, "") {
	case "fails":
		fmt.Println("level=ERROR msg=\"no EROFS in this kernel\"")
		return 3
	case "hangs":
		fmt.Println("level=INFO msg=\"thinking\"")
		time.Sleep(time.Hour)
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer cancel()
	d := apitest.Funcs{Status_: func(context.Context) (*api.Status, error) { return &api.Status{PID: os.Getpid()}, nil }}
	stop, err := apitest.Start(root, d)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer stop()
	<-ctx.Done()
	return 0
}

// ensure calls EnsureDaemon with a daemon of the given mode and ends the daemon
// with the test.
func ensure(t *testing.T, root string, timeout time.Duration, mode ...string) (*api.Client, error) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c, err := api.EnsureDaemon(t.Context(), root, api.EnsureOptions{
		Command: append([]string{self, "daemon", root}, mode...),
		Timeout: timeout,
	})
	if err == nil {
		t.Cleanup(c.Close)
	}
	return c, err
}

// kill ends a daemon that this process started, and reaps it.
func kill(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Error(err)
	}
	if _, err := syscall.Wait4(pid, nil, 0, nil); err != nil {
		t.Error(err)
	}
}

func TestEnsureDaemonStartsOne(t *testing.T) {
	root := t.TempDir()
	var wg sync.WaitGroup
	pids := make([]int, 8)
	for i := range pids {
		wg.Go(func() {
			c, err := ensure(t, root, 0)
			if err != nil {
				t.Error(err)
				return
			}
			st, err := c.Status(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			pids[i] = st.PID
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	defer kill(t, pids[0])
	for _, pid := range pids {
		if pid != pids[0] {
			t.Fatalf("several daemons: %v", pids)
		}
	}
	if sid, err := session(pids[0]); err != nil || sid != pids[0] {
		t.Errorf("session of daemon %d: %d, %v; want its own", pids[0], sid, err)
	}
}

// session reads the session of a process: field 6 of /proc/PID/stat.
func session(pid int) (int, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return strconv.Atoi(strings.Fields(rest)[3])
}

func TestEnsureDaemonQuotesTheLog(t *testing.T) {
	root := t.TempDir()
	log := api.LogPath(root)
	if err := os.MkdirAll(filepath.Dir(log), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(log, []byte("msg=\"of yesterday\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := ensure(t, root, 0, "fails")
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"exit code 3", log, "no EROFS in this kernel"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in: %v", want, err)
		}
	}
	if strings.Contains(err.Error(), "yesterday") {
		t.Errorf("the error quotes an older daemon: %v", err)
	}
}

func TestEnsureDaemonGivesUp(t *testing.T) {
	// A loaded machine takes longer to start the daemon that then hangs.
	for timeout := 300 * time.Millisecond; ; timeout *= 2 {
		_, err := ensure(t, t.TempDir(), timeout, "hangs")
		if err == nil {
			t.Fatal("no error")
		}
		var pid int
		if _, serr := fmt.Sscanf(err.Error(), "the daemon (process %d) does not answer", &pid); serr != nil {
			t.Fatalf("%v: %v", serr, err)
		}
		kill(t, pid)
		if strings.Contains(err.Error(), "thinking") {
			return
		}
		if timeout > time.Minute {
			t.Fatalf("no log in: %v", err)
		}
	}
}

func TestEnsureDaemonHeedsItsContext(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	stop := errors.New("stop")
	cancel(stop)
	if _, err := api.EnsureDaemon(ctx, t.TempDir(), api.EnsureOptions{}); !errors.Is(err, stop) {
		t.Errorf("got %v, want %v", err, stop)
	}
}

// fakeSystemd makes a program systemd-run, which starts what it is told to unless it has a reason, and notes
// its arguments in a file.
func fakeSystemd(t *testing.T, root, reason string) (run, args string) {
	t.Helper()
	dir := t.TempDir()
	args = filepath.Join(dir, "args")
	script := "#!/bin/sh\nprintf '%s\\n' \"$@\" > " + args + "\n"
	if reason != "" {
		script += "echo '" + reason + "' >&2; exit 1\n"
	}
	script += "while [ \"$1\" != -- ]; do shift; done; shift\n\"$@\" >> " + api.LogPath(root) + " 2>&1 < /dev/null &\n"
	for name, text := range map[string]string{"systemd-run": script, "systemctl": "#!/bin/sh\necho \"$@\" >> " + args + "\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return filepath.Join(dir, "systemd-run"), args
}

// Where there is systemd, the daemon is a unit of it, with a store of descriptors.
func TestEnsureDaemonStartsAUnit(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		reason string // of systemd-run to start nothing
		unit   bool
	}{
		"a unit":                       {"", true},
		"systemd takes none from here": {"Failed to connect to bus", false},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			run, args := fakeSystemd(t, root, test.reason)
			c, err := api.EnsureDaemon(t.Context(), root, api.EnsureOptions{Command: []string{self, "daemon", root}, SystemdRun: run})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			st, err := c.Status(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				syscall.Kill(st.PID, syscall.SIGKILL)
				syscall.Wait4(st.PID, nil, 0, nil) // if it is a child
			}()
			b, err := os.ReadFile(args)
			if err != nil {
				t.Fatal(err)
			}
			for _, want := range []string{
				"--service-type=notify", "--property=FileDescriptorStoreMax=16384", "--property=Environment=FDSTORE=16384",
				"--property=KillMode=process", "--property=Restart=on-failure", "--property=StandardError=append:" + api.LogPath(root),
			} {
				if !strings.Contains(string(b), want+"\n") {
					t.Errorf("no %s in the unit:\n%s", want, b)
				}
			}
			if stopped := strings.Contains(string(b), "stop --quiet foil-node-"); stopped == test.unit {
				t.Errorf("the unit was stopped: %v", stopped)
			}
			if sid, err := session(st.PID); err != nil || (sid == st.PID) == test.unit {
				t.Errorf("session of daemon %d: %d, %v", st.PID, sid, err)
			}
		})
	}
}
