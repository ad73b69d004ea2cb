package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
)

// Daemon and keeper are killed at random, one at a time, while containers read
// every file of two images that share contents, over a slow link. A read may
// fail with EIO in the instant between an event's arrival and its note, and is
// tried again then; it never returns anything else, and never hangs.
func TestRandomKills(t *testing.T) {
	t.Parallel()
	needContainers(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	s := startServer(t, t.TempDir())
	const files = 120
	images := []image{manyFiles(t, files, 40_000, 21, 0), manyFiles(t, files, 40_000, 22, 0.4)}
	k := newLink(t, s.addr, 500<<10)
	var refs []string
	for i, img := range images {
		refs = append(refs, k.via(s.push("random", fmt.Sprint(i), img)))
	}
	root := workerRoot(t)
	w := startWorker(t, root)
	// Retrying is the shell's, so that a read that fails is seen and counted.
	const script = `for f in /data/*; do
	until sha256sum $f 2>/dev/null; do echo eio >>/tmp-eio; sleep 0.05; done
done
echo done`
	base := unique(t)
	var ids []string
	var runs []*foilRun
	for i, ref := range refs {
		w.mustPull(ref, api.Mounted)
		for c := range 2 {
			id := fmt.Sprintf("%s-%d%d", base, i, c)
			ids = append(ids, id)
			// The run's own stream from the daemon breaks, which ends nothing.
			runs = append(runs, w.run(t, "--name", id, ref, "--", "/bin/sh", "-c", script))
		}
	}
	for _, r := range runs {
		eventually(t, "the container reads", func() error {
			if r.out.String() == "" {
				return fmt.Errorf("standard error %q", r.errOut.String())
			}
			return nil
		})
	}
	w, kills := killAtRandom(t, w, refs, random, 8*time.Second)
	k.setRate(0)
	var found comparison
	for i, r := range runs {
		found.output(t, r, ids[i], images[i/2])
	}
	for i, ref := range refs {
		w.mustPull(ref, api.Complete)
		found.files(t, w, ref, images[i])
	}
	eio := 0
	for _, id := range ids {
		b, _ := os.ReadFile(filepath.Join(root, "containers", id, "upper", "tmp-eio"))
		eio += strings.Count(string(b), "eio")
		if err := w.client.RemoveContainer(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
	t.Logf("daemon killed %d times, keeper %d times; %d files compared, %d wrong, %d reads hung, %d failed with EIO and were tried again",
		kills["daemon"], kills["keeper"], found.compared, found.wrong, found.hung, eio)
	if found.wrong > 0 {
		t.Errorf("%d of %d files had wrong bytes", found.wrong, found.compared)
	}
	w.leavesNothing(t, ids...)
	for i, ref := range refs {
		intact(t, w, ref, images[i])
	}
}

// killAtRandom kills the daemon or the keeper now and then, and returns the last daemon
// and how often each was killed.
func killAtRandom(t *testing.T, w *worker, refs []string, random *rand.Rand, during time.Duration) (*worker, map[string]int) {
	t.Helper()
	kills := map[string]int{}
	for end := time.Now().Add(during); time.Now().Before(end); {
		time.Sleep(time.Duration(random.IntN(400)) * time.Millisecond)
		if random.IntN(3) > 0 {
			w.kill()
			kills["daemon"]++
			w = startWorker(t, w.root)
			continue
		}
		// The daemon notices, and has another keeper, before anything else dies.
		old := pidsOf(t, w.root, "keeper")
		for _, pid := range old {
			_ = syscall.Kill(pid, syscall.SIGKILL)
			kills["keeper"]++
		}
		eventually(t, "another keeper", func() error {
			st, err := w.client.Status(t.Context())
			if err == nil && len(old) > 0 && (st.Keeper == 0 || st.Keeper == old[0]) && !complete(w, refs) {
				err = fmt.Errorf("keeper %d", st.Keeper)
			}
			return err
		})
	}
	return w, kills
}

// comparison counts files that were compared with those of an image.
type comparison struct{ compared, wrong, hung int }

// output compares what a container has printed, the sums of all files, when it has ended.
func (c *comparison) output(t *testing.T, r *foilRun, id string, img image) {
	t.Helper()
	select {
	case <-r.done:
	case <-time.After(time.Minute):
		c.hung++
		t.Errorf("container %s hangs; output ends %q", id, tail(r.out.String()))
		return
	}
	if code := r.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("container %s: exit code %d, %s", id, code, r.errOut.String())
	}
	got := strings.Split(r.out.String(), "\n")
	for j, line := range strings.Split(wantSums(t, img), "\n") {
		c.compared++
		if j >= len(got) || got[j] != line {
			c.wrong++
		}
	}
}

// files compares the files of a mounted image.
func (c *comparison) files(t *testing.T, w *worker, ref string, img image) {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(unpack(t, img), "data", "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		want, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join(w.mountOf(ref), "data", filepath.Base(name)))
		c.compared++
		if err != nil || string(got) != string(want) {
			c.wrong++
		}
	}
}

func complete(w *worker, refs []string) bool {
	for _, ref := range refs {
		if w.imageOf(ref).State != "complete" {
			return false
		}
	}
	return true
}

func tail(s string) string { return s[max(0, len(s)-200):] }
