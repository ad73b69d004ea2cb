package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/kernel"
)

// The crash test, in numbers. FOIL_TEST_KILLS=300 is the long one; a failure is
// told with its seed, and FOIL_TEST_SEED repeats the decisions, if not the
// instants.
const (
	killsEnv = "FOIL_TEST_KILLS"
	seedEnv  = "FOIL_TEST_SEED"
)

func envNumber(t *testing.T, name string, otherwise uint64) uint64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

// TestContainerdRandomKills kills the daemon, the keeper and containerd at random
// moments while images are pulled, run, updated and removed over a slow link. Every file that a container reads is compared, and at the end every
// file of every image; no read may hang, and nothing may be left behind.
//
// Daemon and keeper are not killed together: that two processes hold the gate is
// the invariant that all the rest stands on. containerd dies with either.
//
// The long test, with a number of kills, is under both containerds and on both gates.
func TestContainerdRandomKills(t *testing.T) {
	for _, v := range []containerdVersion{containerd2, containerd1} {
		for _, gate := range []string{kernel.GateFanotify, kernel.GateFUSE} {
			if os.Getenv(killsEnv) == "" && (v.name != containerd2.name || gate != kernel.GateFanotify) {
				continue
			}
			t.Run(v.name+", "+gate, func(t *testing.T) {
				needBusybox(t)
				if os.Getenv(gateEnv) == "" {
					t.Setenv(gateEnv, gate)
				}
				newStorm(t, v).run(int(envNumber(t, killsEnv, 24)))
			})
		}
	}
}

// storm is one crash test. Its images are versions of one; a tag moves between
// them.
type storm struct {
	t      *testing.T
	seed   uint64
	server *server
	link   *link
	root   string
	w      *worker // of the goroutine that kills
	c      *containerd
	images []image
	want   []map[string]string // by version, digest by file
	tags   []string            // references, each of which names some version

	mu     sync.Mutex
	made   []*crashed // every container there was
	failed map[string]int
	last   map[string]error // why the last one failed
	done   map[string]int
	plain  int // pulls that went the plain way
}

// crashed is a container of a storm: it writes what it reads into a directory
// of the host, so that nothing that dies takes it along.
type crashed struct {
	id, out string
	started bool // containerd said so
	ended   bool // by the test, before it had read everything
}

const (
	stormVersions = 6
	stormFiles    = 60
)

func newStorm(t *testing.T, v containerdVersion) *storm {
	s := &storm{t: t, seed: envNumber(t, seedEnv, uint64(time.Now().UnixNano())), failed: make(map[string]int), last: make(map[string]error), done: make(map[string]int)}
	t.Logf("%s=%d", seedEnv, s.seed)
	s.server = startServer(t, t.TempDir())
	s.link = newLink(t, s.server.addr, 2<<20)
	for i := range stormVersions {
		img := manyFiles(t, stormFiles, 30_000, s.seed%1000+uint64(i), 0.4)
		want := make(map[string]string)
		for line := range strings.Lines(wantSums(t, img)) {
			if sum, name, ok := strings.Cut(strings.TrimSpace(line), "  "); ok {
				want[name] = sum
			}
		}
		if len(want) != stormFiles {
			t.Fatalf("%d files of %d", len(want), stormFiles)
		}
		s.images, s.want = append(s.images, img), append(s.want, want)
		ref := s.server.push("storm", fmt.Sprint(i), img)
		if i%2 == 0 {
			s.tags = append(s.tags, s.link.via(ref))
		}
	}
	s.root = workerRoot(t)
	s.w = startWorker(t, s.root)
	t.Cleanup(func() {
		if s.c != nil {
			s.c.killShims(t)
		}
	})
	s.c = startContainerd(t, v, s.w)
	return s
}

func (s *storm) random(stream uint64) *rand.Rand { return rand.New(rand.NewPCG(s.seed, stream)) }

// run is the storm and what comes after it.
func (s *storm) run(kills int) {
	t := s.t
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var users sync.WaitGroup
	for i := range 3 {
		users.Go(func() { s.use(ctx, uint64(i+1)) })
	}
	count := s.kill(kills)
	cancel()
	s.link.open()
	users.Wait()

	hung := s.wait(s.made)
	compared, wrong, eio, whole := 0, 0, 0, 0
	for _, c := range s.made {
		n, bad, failed := s.compare(c)
		compared, wrong, eio = compared+n, wrong+bad, eio+failed
		if n == stormFiles {
			whole++
		}
	}
	during := compared
	// Then every image once more, by a container of its own, when containerd has
	// tried again to reach the daemon.
	eventually(t, "containerd reaches the daemon", func() error {
		_, err := s.c.tryCtr("snapshots", "--snapshotter", "hydrofoil", "ls")
		return err
	})
	for i := range s.images {
		ref := s.link.via(s.server.push("storm", fmt.Sprintf("after-%d", i), s.images[i]))
		s.c.pull(t, ref)
		c, err := s.start(ref)
		if err != nil {
			t.Errorf("after the storm: %v", err)
			continue
		}
		hung += s.wait([]*crashed{c})
		n, bad, _ := s.compare(c)
		if compared, wrong = compared+n, wrong+bad; n != stormFiles {
			t.Errorf("after the storm a container read %d of %d files", n, stormFiles)
		}
	}
	verified := int64(0)
	for _, ref := range s.w.imageRefs() {
		last, bad := s.w.verify(ref)
		if verified += last.Checked; len(bad) > 0 {
			wrong += len(bad)
			t.Errorf("verify %s: %q", ref, bad)
		}
	}
	s.plain += plainPulls(s.w)
	t.Logf("killed: %v; done: %v, %d pulls the plain way; failed meanwhile: %v; %d containers, of which %d read everything during the storm; "+
		"%d files compared during it and %d after; %d contents verified; %d wrong, %d reads hung, %d reads failed with EIO and were tried again",
		count, s.done, s.plain, s.failed, len(s.made), whole, during, compared-during, verified, wrong, hung, eio)
	for what, err := range s.last {
		t.Logf("the last %s that failed: %v", what, err)
	}
	if wrong > 0 {
		t.Errorf("%d files had wrong bytes", wrong)
	}
	s.leavesNothing()
}

// kill ends processes until so many are dead, one decision after the other, and
// returns how many of each.
func (s *storm) kill(kills int) map[string]int {
	t, random, count := s.t, s.random(0), make(map[string]int)
	for n := 0; n < kills; n++ {
		// Not before something was pulled or run since: on a machine that is busy
		// nothing would be, otherwise.
		s.progress()
		time.Sleep(time.Duration(random.IntN(300)) * time.Millisecond)
		switch which := random.IntN(10); {
		case which < 4:
			s.w.kill()
			s.plain += plainPulls(s.w)
			count["daemon"]++
			if random.IntN(3) == 0 { // both are down at once
				s.c.kill()
				count["containerd"]++
				n++
			}
			s.w = startWorker(t, s.root)
		case which < 7:
			count["keeper"] += s.killKeeper()
		default:
			s.c.kill()
			count["containerd"]++
		}
		select {
		case <-s.c.done:
			s.c.start(t)
		default:
		}
	}
	return count
}

// progress waits until another pull or start has succeeded.
func (s *storm) progress() {
	s.t.Helper()
	sum := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.done["pull"] + s.done["run"]
	}
	before := sum()
	eventually(s.t, "an image is pulled, or a container started", func() error {
		if sum() == before {
			s.mu.Lock()
			defer s.mu.Unlock()
			return fmt.Errorf("failed since the start: %v, last: %v", s.failed, s.last)
		}
		return nil
	})
}

// plainPulls counts the images that a daemon sent the plain way.
func plainPulls(w *worker) int { return strings.Count(w.log.String(), "plain way") }

// killKeeper kills the keeper, if there is one, and waits until the daemon has
// another: before that nobody else may die.
func (s *storm) killKeeper() int {
	s.t.Helper()
	old := pidsOf(s.t, s.root, "keeper")
	for _, pid := range old {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	eventually(s.t, "another keeper", func() error {
		st, err := s.w.client.Status(s.t.Context())
		if err == nil && len(old) > 0 && (st.Keeper == 0 || st.Keeper == old[0]) {
			err = fmt.Errorf("keeper %d", st.Keeper)
		}
		return err
	})
	return len(old)
}

// use does what the users of a worker do, until ctx ends. What fails is
// counted: everything may die at any time.
func (s *storm) use(ctx context.Context, stream uint64) {
	random := s.random(stream)
	note := func(what string, err error) {
		if err != nil {
			time.Sleep(50 * time.Millisecond) // no haste while all is down
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if err != nil {
			s.failed[what]++
			s.last[what] = err
		} else {
			s.done[what]++
		}
	}
	for ctx.Err() == nil {
		ref := s.tags[random.IntN(len(s.tags))]
		switch which := random.IntN(10); {
		case which < 6:
			err := s.c.tryPull(ref)
			if note("pull", err); err != nil || ctx.Err() != nil {
				break
			}
			s.limit(random)
			_, err = s.start(ref)
			note("run", err)
		case which < 8:
			v := random.IntN(len(s.images))
			_, rest, _ := strings.Cut(ref, "/storm:")
			note("update", s.server.tryPush("storm", rest, s.images[v]))
		default:
			note("remove", s.c.tryRemove(ref))
		}
	}
}

// limit ends a container when there are many.
func (s *storm) limit(random *rand.Rand) {
	s.mu.Lock()
	var there []*crashed
	for _, c := range s.made {
		if !c.ended {
			there = append(there, c)
		}
	}
	if len(there) < 8 {
		s.mu.Unlock()
		return
	}
	c := there[random.IntN(len(there))]
	c.ended = !c.finished()
	s.mu.Unlock()
	_, _ = s.c.tryCtr("task", "rm", "--force", c.id)
	_, _ = s.c.tryCtr("containers", "rm", c.id)
}

// start starts a container that reads every file of an image. One whose start
// failed may run all the same, and is looked at in any case.
func (s *storm) start(ref string) (*crashed, error) {
	s.mu.Lock()
	c := &crashed{id: fmt.Sprintf("%s-%d", unique(s.t), len(s.made)), out: filepath.Join(s.root, fmt.Sprintf("out-%d", len(s.made)))}
	s.made = append(s.made, c)
	s.mu.Unlock()
	if err := os.Mkdir(c.out, 0o755); err != nil {
		return c, err
	}
	// Retrying is the shell's, so that a read that fails is seen and counted.
	const script = `cat /version >/out/version.new && mv /out/version.new /out/version
for f in /data/*; do
	until sha256sum $f >>/out/sums; do echo >>/out/eio; sleep 0.05; done
done
echo >/out/done; sleep 100000`
	_, err := s.c.tryCtr("run", "--detach", "--null-io", "--snapshotter", "hydrofoil",
		"--mount", "type=bind,src="+c.out+",dst=/out,options=rbind:rw", ref, c.id, "/bin/sh", "-c", script)
	s.mu.Lock()
	c.started = err == nil
	s.mu.Unlock()
	return c, err
}

func (c *crashed) has(name string) bool {
	_, err := os.Stat(filepath.Join(c.out, name))
	return err == nil
}

func (c *crashed) finished() bool { return c.has("done") }

// wait waits until containers have read everything, and returns how many do not
// come to their ends. One that never started has no read that hangs.
func (s *storm) wait(list []*crashed) (hung int) {
	s.t.Helper()
	running := make(map[string]bool)
	for line := range strings.Lines(s.c.ctr(s.t, "task", "ls")) {
		if f := strings.Fields(line); len(f) == 3 && f[2] == "RUNNING" {
			running[f[0]] = true
		}
	}
	for end := time.Now().Add(3 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		var late []*crashed
		for _, c := range list {
			if !c.ended && !c.finished() && (c.started || running[c.id]) {
				late = append(late, c)
			}
		}
		if len(late) == 0 {
			return 0
		}
		if time.Now().After(end) {
			for _, c := range late {
				s.t.Errorf("container %s hangs, or is gone: it has read %d of %d files\n%s", c.id, len(c.read()), stormFiles, s.c.ctr(s.t, "task", "ls"))
			}
			return len(late)
		}
	}
}

// read returns the digests that a container has written, by file.
func (c *crashed) read() map[string]string {
	b, _ := os.ReadFile(filepath.Join(c.out, "sums"))
	got := make(map[string]string)
	for line := range strings.Lines(string(b)) {
		if sum, name, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "  "); ok && strings.HasSuffix(line, "\n") {
			got[name] = sum
		}
	}
	return got
}

// compare holds what a container read against the version that it says it is.
func (s *storm) compare(c *crashed) (compared, wrong, eio int) {
	s.t.Helper()
	got := c.read()
	b, err := os.ReadFile(filepath.Join(c.out, "version"))
	if err != nil && len(got) == 0 {
		return 0, 0, 0
	}
	number, err := strconv.ParseUint(string(b), 10, 64)
	i := int(number - s.seed%1000)
	if err != nil || i < 0 || i >= len(s.want) {
		s.t.Errorf("container %s: its version is %q", c.id, b)
		return 1, 1, 0
	}
	for name, sum := range got {
		compared++
		if s.want[i][name] != sum {
			wrong++
			s.t.Errorf("container %s of version %d: %s has the digest %s, want %s", c.id, i, name, sum, s.want[i][name])
		}
	}
	failed, _ := os.ReadFile(filepath.Join(c.out, "eio"))
	return compared, wrong, len(failed)
}

// leavesNothing removes all images and containers, and looks for what is there
// all the same.
func (s *storm) leavesNothing() {
	s.t.Helper()
	s.c.removeContainers(s.t)
	s.c.killShims(s.t)
	eventually(s.t, "nothing is left behind", func() error {
		// What containerd was killed in holds its lease for a day.
		leases, err := s.c.tryCtr("leases", "ls", "-q")
		if err != nil {
			return err
		}
		for _, id := range strings.Fields(leases) {
			if _, err := s.c.tryCtr("leases", "rm", "--sync", id); err != nil {
				return err
			}
		}
		images, err := s.c.tryCtr("images", "ls", "-q")
		if err != nil {
			return err
		}
		for _, ref := range strings.Fields(images) {
			if _, err := s.c.tryCtr("images", "rm", "--sync", ref); err != nil {
				return err
			}
		}
		if _, err := s.c.tryCtr("content", "prune", "references"); err != nil {
			return err
		}
		if refs := s.w.imageRefs(); len(refs) > 0 {
			return fmt.Errorf("images %q", refs)
		}
		left, err := filepath.Glob(filepath.Join(s.root, "rootfs", "*"))
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("rootfs %q", left)
		}
		snapshots, _ := filepath.Glob(filepath.Join(s.root, "snapshotter", "snapshots", "*"))
		if err == nil && len(snapshots) > 0 {
			err = fmt.Errorf("snapshots %q", snapshots)
		}
		return err
	})
}

// removeContainers ends all containers and removes them.
func (c *containerd) removeContainers(t testing.TB) {
	t.Helper()
	eventually(t, "all containers are gone", func() error {
		out, err := c.tryCtr("containers", "ls", "-q")
		ids := strings.Fields(out)
		if err != nil || len(ids) == 0 {
			return err
		}
		_, err = c.tryCtr(append([]string{"task", "rm", "--force"}, ids...)...)
		_, again := c.tryCtr(append([]string{"containers", "rm"}, ids...)...)
		return errors.Join(err, again)
	})
}

// killShims ends what containers are left when there is no containerd any more.
func (c *containerd) killShims(t testing.TB) {
	t.Helper()
	// containerd forgets what it was killed in the middle of making.
	dirs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range dirs {
		var pid int
		b, err := os.ReadFile(name)
		if _, scan := fmt.Sscanf(name, "/proc/%d/", &pid); err == nil && scan == nil && strings.Contains(string(b), "containerd-shim") && strings.Contains(string(b), c.dir+"/") {
			killTree(pid)
		}
	}
}

// killTree kills a process and all that it has started.
func killTree(pid int) {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	_ = syscall.Kill(pid, syscall.SIGKILL)
	for _, f := range strings.Fields(string(b)) {
		if child, err := strconv.Atoi(f); err == nil {
			killTree(child)
		}
	}
}
