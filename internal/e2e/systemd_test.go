package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/kubelettest"
	"hydrofoil.dev/foil/internal/logtest"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/snapshotter"
)

// The daemon says that it is ready when its sockets answer, and that it ends.
func TestTheServiceManagerIsTold(t *testing.T) {
	root := workerRoot(t)
	path := filepath.Join(t.TempDir(), "notify")
	manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer manager.Close()
	cmd := exec.Command(foil, "node", "--root", root)
	cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+path)
	p := startCommand(t, cmd)
	hears := func(want string) {
		t.Helper()
		if err := manager.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 1000)
		n, err := manager.Read(b)
		if got := string(b[:n]); err != nil || !strings.Contains(got, want) {
			t.Fatalf("the manager is told %q, %v, want %s", got, err, want)
		}
	}
	hears("READY=1")
	for _, socket := range []string{api.SocketPath(root), snapshotter.SocketPath(root)} {
		c, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatalf("ready, but %v", err)
		}
		c.Close()
	}
	p.signal(syscall.SIGTERM)
	hears("STOPPING=1")
	<-p.done
}

// systemd is one of the test's own: the first process of namespaces, in control
// groups of its own, with no other units than the test's.
type systemd struct {
	pid int // of it, here
}

// startSystemd starts systemd, or skips the test. program is what it runs.
func startSystemd(t *testing.T, unitDir string) *systemd {
	t.Helper()
	const program = "/usr/lib/systemd/systemd"
	if _, err := os.Stat(program); err != nil {
		t.Skipf("skip: %v", err)
	}
	target := "[Unit]\nDescription=Nothing\nDefaultDependencies=no\nAllowIsolate=yes\n"
	if err := os.WriteFile(filepath.Join(unitDir, "foil-test.target"), []byte(target), 0o644); err != nil {
		t.Fatal(err)
	}
	groups := cgroups(t)
	// A namespace of control groups alone would leave it the host's mounts of them.
	var script, binds strings.Builder
	for _, g := range groups {
		fmt.Fprintf(&script, "echo $$ > %s/cgroup.procs 2> /dev/null\n", g.dir)
		fmt.Fprintf(&binds, "mount --bind %s %s && ", g.dir, g.root)
	}
	fmt.Fprintf(&script, "exec unshare --pid --fork --kill-child=SIGKILL --mount --mount-proc --cgroup --uts --ipc /bin/sh -c '"+binds.String()+
		"mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system && exec %s --system --unit=foil-test.target --log-target=console --show-status=no'", program)
	cmd := exec.Command("/bin/sh", "-c", script.String())
	// With "container" it leaves the host's devices alone.
	cmd.Env = append(os.Environ(), "container=foil-test", "SYSTEMD_UNIT_PATH="+unitDir)
	var log logtest.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	t.Cleanup(func() {
		// Its children end with it, all of them.
		_ = cmd.Process.Kill()
		<-ended
		for _, g := range groups {
			removeGroups(t, g.dir)
		}
		if t.Failed() {
			t.Logf("log of systemd:\n%s", log.String())
		}
	})
	children := fmt.Sprintf("/proc/%d/task/%d/children", cmd.Process.Pid, cmd.Process.Pid)
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		s := new(systemd)
		b, err := os.ReadFile(children)
		if err == nil {
			_, err = fmt.Sscan(string(b), &s.pid)
		}
		if err == nil {
			if _, err = s.ctl("is-active", "foil-test.target"); err == nil {
				return s
			}
		}
		select {
		case <-ended:
			t.Skipf("skip: systemd does not run in namespaces here:\n%s", log.String())
		default:
		}
		if time.Now().After(deadline) {
			t.Skipf("skip: systemd does not answer in namespaces here: %v\n%s", err, log.String())
		}
	}
}

// cgroup is a control group, and where its hierarchy is mounted.
type cgroup struct{ dir, root string }

// cgroups makes a control group in each hierarchy, below the one of the test.
func cgroups(t *testing.T) (groups []cgroup) {
	t.Helper()
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Skipf("skip: %v", err)
	}
	for line := range strings.Lines(string(own)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 {
			continue
		}
		for _, mount := range []string{strings.TrimPrefix(parts[1], "name="), "unified", ""} {
			root := filepath.Join("/sys/fs/cgroup", mount)
			if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil || parts[1] != "" && mount == "unified" {
				continue
			}
			dir := filepath.Join(root, parts[2], fmt.Sprintf("foil-test-%d", os.Getpid()))
			if os.Mkdir(dir, 0o755) == nil {
				groups = append(groups, cgroup{dir, root})
			}
			// cgroup v1 gives a new group no processor and no memory.
			for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
				if b, err := os.ReadFile(filepath.Join(filepath.Dir(dir), name)); err == nil && parts[1] == "cpuset" {
					_ = os.WriteFile(filepath.Join(dir, name), b, 0o644)
				}
			}
			break
		}
	}
	if len(groups) == 0 {
		t.Skip("skip: no control groups can be made here")
	}
	return groups
}

// removeGroups removes a control group and those below it, once they are empty.
func removeGroups(t *testing.T, dir string) {
	t.Helper()
	eventually(t, "control groups are removed", func() error { return kubelettest.RemoveGroup(dir) })
}

// ctl is systemctl inside.
func (s *systemd) ctl(args ...string) (string, error) {
	cmd := exec.Command("nsenter", append([]string{"-t", fmt.Sprint(s.pid), "-m", "-p", "-C", "systemctl"}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("systemctl %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return string(out), err
}

// must calls systemctl, which has to succeed.
func (s *systemd) must(t *testing.T, args ...string) string {
	t.Helper()
	out, err := s.ctl(args...)
	if err != nil {
		status, _ := s.ctl("status", "--no-pager", "foil-node")
		t.Fatalf("%v\n%s", err, status)
	}
	return out
}

// restarts waits until systemd has started the daemon again whose process was old.
func (s *systemd) restarts(t *testing.T, w *worker, old int) {
	t.Helper()
	eventually(t, "systemd starts the daemon again", func() error {
		st, err := w.client.Status(t.Context())
		if err == nil && st.PID == old {
			err = errors.New("it is there still")
		}
		if err == nil {
			_, err = s.ctl("is-active", "foil-node")
		}
		return err
	})
}

// unitOf makes a directory with the unit of deploy/systemd, for a root, and the program
// that it runs. install replaces the program's file, as an upgrade does.
func unitOf(t *testing.T, root string) (units string, install func()) {
	t.Helper()
	units = t.TempDir()
	program := filepath.Join(units, "foil")
	install = func() {
		t.Helper()
		b, err := os.ReadFile(foil)
		if err == nil {
			err = os.WriteFile(program+".new", b, 0o755)
		}
		if err == nil {
			err = os.Rename(program+".new", program)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	install()
	unit, err := os.ReadFile("../../deploy/systemd/foil-node.service")
	if err != nil {
		t.Fatal(err)
	}
	exe := fmt.Sprintf("%s node --root %s", program, root)
	if gate := os.Getenv(gateEnv); gate != "" {
		exe += " --gate " + gate
	}
	text := strings.NewReplacer("/usr/local/bin/foil node", exe, "[Unit]\n", "[Unit]\nDefaultDependencies=no\n").Replace(string(unit))
	if err := os.WriteFile(filepath.Join(units, "foil-node.service"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return units, install
}

// A daemon under systemd, by the unit of deploy/systemd, while a read waits for
// bytes on their way: an upgrade (the program's file is replaced, the service
// restarted), kill -9 of the daemon, and of daemon and keeper at once.
func TestTheUnitUnderSystemd(t *testing.T) {
	s := startServer(t, t.TempDir())
	img := manyFiles(t, 200, 60_000, 4, 0)
	k := newLink(t, s.addr, 0)
	k.stallAfter(3 << 20)
	ref := k.via(s.push("half", "1", img))
	root := workerRoot(t)
	units, install := unitOf(t, root)
	sd := startSystemd(t, units)
	ctl := func(args ...string) string {
		t.Helper()
		return sd.must(t, args...)
	}
	ctl("start", "foil-node") // returns when the daemon has said that it is ready
	w := &worker{process: &process{t: t}, root: root, client: api.Dial(root)}
	t.Cleanup(w.client.Close)
	pid := func() int {
		t.Helper()
		st, err := w.client.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return st.PID
	}
	w.mustPull(ref, api.Mounted)
	// The mount is in the namespace of systemd and its services.
	inside := func(path string) string { return filepath.Join(fmt.Sprintf("/proc/%d/root", sd.pid), path) }
	want, err := os.ReadFile(filepath.Join(unpack(t, img), "data/00199"))
	if err != nil {
		t.Fatal(err)
	}
	r := startReader(t, inside(filepath.Join(w.mountOf(ref), "data/00199")))
	r.waits(t)
	keepers := pidsOf(t, root, "keeper")
	if len(keepers) != 1 {
		t.Fatalf("keepers: %v", keepers)
	}
	install()
	ctl("restart", "foil-node")
	if now := pidsOf(t, root, "keeper"); len(now) != 1 || now[0] != keepers[0] {
		t.Errorf("keepers %v after a restart, %v before", now, keepers)
	}
	r.waits(t)
	old := pid()
	ctl("kill", "--signal=SIGKILL", "--kill-who=main", "foil-node")
	sd.restarts(t, w, old)
	r.waits(t)
	// Daemon and keeper at once: what they held, systemd has as well.
	old = pid()
	ctl("kill", "--signal=SIGKILL", "--kill-who=all", "foil-node")
	sd.restarts(t, w, old)
	if now := pidsOf(t, root, "keeper"); len(now) != 1 || now[0] == keepers[0] {
		t.Errorf("keepers %v after both were killed, %v before", now, keepers)
	}
	r.waits(t)
	if st, err := w.client.Status(t.Context()); err != nil || len(st.Warnings) > 0 {
		t.Errorf("after both were killed: %+v, %v", st, err)
	}
	k.open()
	if got := r.ends(t); !bytes.Equal(got, want) {
		t.Errorf("the read that waited through a restart and kills got %d bytes (%v), not those of the file", len(got), r.err)
	}
	w.mustPull(ref, api.Complete)
	if last, bad := w.verify(ref); len(bad) > 0 || last.Checked != last.Total {
		t.Errorf("verify: %+v, bad %v", last, bad)
	}
	// What is complete needs none; a FUSE gate has it until its mount has gone.
	if st, err := w.client.Status(t.Context()); err == nil && st.Gate == "fanotify" {
		n := strings.TrimSpace(ctl("show", "--property=NFileDescriptorStore", "--value", "foil-node"))
		if n != "2" {
			t.Errorf("systemd keeps %s descriptors, want the gate's group and journal", n)
		}
	}
	ctl("stop", "foil-node")
}

// stalls waits until a link stalls that does so after n bytes: what has not come by then does not, whoever reads it.
func stalls(t *testing.T, k *link, n int64) {
	t.Helper()
	eventually(t, "the link stalls", func() error {
		if moved := k.bytesMoved(); moved < n {
			return fmt.Errorf("%d bytes have moved", moved)
		}
		return nil
	})
}

// A daemon that a command starts is a unit of systemd where there is systemd: a read that waits gets its bytes although
// daemon and keeper are killed together.
func TestStartedAsAUnit(t *testing.T) {
	run, err := exec.LookPath("systemd-run")
	if err != nil {
		t.Skipf("skip: %v", err)
	}
	s := startServer(t, t.TempDir())
	img := manyFiles(t, 200, 60_000, 4, 0)
	k := newLink(t, s.addr, 0)
	k.stallAfter(3 << 20)
	ref := k.via(s.push("half", "1", img))
	root := workerRoot(t)
	units := t.TempDir()
	for _, name := range []string{"sysinit", "basic", "shutdown"} { // what any unit depends on
		if err := os.WriteFile(filepath.Join(units, name+".target"), []byte("[Unit]\nDefaultDependencies=no\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	sd := startSystemd(t, units)
	pull := exec.Command("nsenter", "-t", fmt.Sprint(sd.pid), "-m", "-p", "-C", foil, "pull", "--root", root, "--until", "mounted", ref)
	pull.Env = append(os.Environ(), "PATH="+filepath.Dir(run)+":"+os.Getenv("PATH"))
	if out, err := pull.CombinedOutput(); err != nil {
		t.Fatalf("pull: %v\n%s", err, out)
	}
	w := &worker{process: &process{t: t}, root: root, client: api.Dial(root)}
	t.Cleanup(w.client.Close)
	st, err := w.client.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if gate := bestGate(); st.Gate != gate {
		t.Errorf("the gate is %s, want %s: systemd keeps it", st.Gate, gate)
	}
	list := strings.Fields(sd.must(t, "list-units", "--plain", "--no-legend", "foil-node-*"))
	if len(list) == 0 {
		t.Fatal("the daemon is no unit")
	}
	unit := list[0]
	stalls(t, k, 3<<20)
	r := startReader(t, filepath.Join(fmt.Sprintf("/proc/%d/root", sd.pid), w.mountOf(ref), "data/00199"))
	r.waits(t)
	sd.must(t, "kill", "--signal=SIGKILL", "--kill-who=all", unit)
	eventually(t, "systemd starts the daemon again", func() error {
		now, err := w.client.Status(t.Context())
		if err == nil && now.PID == st.PID {
			err = errors.New("it is there still")
		}
		return err
	})
	r.waits(t)
	k.open()
	want, err := os.ReadFile(filepath.Join(unpack(t, img), "data/00199"))
	if err != nil {
		t.Fatal(err)
	}
	if got := r.ends(t); !bytes.Equal(got, want) {
		t.Errorf("the read that waited got %d bytes (%v), not those of the file", len(got), r.err)
	}
	w.mustPull(ref, api.Complete)
	// Told to end, it does not come back.
	sd.must(t, "stop", unit)
	if _, err := w.client.Status(t.Context()); err == nil {
		t.Error("it was stopped, and answers")
	}
}

// Without a service manager a daemon has a gate that fails closed: daemon and keeper are killed together, and what waits
// and what comes fails, or gets the file's bytes; none gets zeros.
func TestGateThatNobodyKeeps(t *testing.T) {
	s := startServer(t, t.TempDir())
	img := manyFiles(t, 200, 60_000, 4, 0)
	k := newLink(t, s.addr, 0)
	k.stallAfter(3 << 20)
	ref := k.via(s.push("half", "1", img))
	w := startWorker(t, workerRoot(t), "--gate", "auto")
	w.mustPull(ref, api.Mounted)
	if st, err := w.client.Status(t.Context()); err != nil || st.Gate == kernel.GateFanotify {
		t.Fatalf("the gate: %+v, %v", st, err)
	}
	mnt, truth := w.mountOf(ref), unpack(t, img)
	stalls(t, k, 3<<20)
	waiting := startReader(t, filepath.Join(mnt, "data/00199"))
	waiting.waits(t)
	keepers := pidsOf(t, w.root, "keeper")
	for _, pid := range keepers {
		_ = syscall.Kill(pid, syscall.SIGSTOP) // cannot be noticed or restarted in between
	}
	w.signal(syscall.SIGKILL)
	for _, pid := range keepers {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	<-w.done
	if got := waiting.ends(t); len(got) > 0 || waiting.err == nil {
		t.Errorf("the read that waited got %d bytes, %v", len(got), waiting.err)
	}
	failed := 0
	for i := range 200 {
		name := fmt.Sprintf("data/%05d", i)
		got, err := exec.Command("cat", filepath.Join(mnt, name)).Output()
		want, werr := os.ReadFile(filepath.Join(truth, name))
		if werr != nil {
			t.Fatal(werr)
		}
		if err != nil {
			failed++
			want = want[:len(got)]
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("%s: wrong bytes", name)
		}
	}
	if failed == 0 {
		t.Error("no read failed")
	}
	k.open()
	w = startWorker(t, w.root, "--gate", "auto")
	intact(t, w, ref, img)
}
