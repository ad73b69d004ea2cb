package gate_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/worker/gate/gatetest"
)

// world is a mounted tree, whose daemon and keeper are processes that can be
// killed.
type world struct {
	t    *testing.T
	dir  string
	fuse bool   // behind a FUSE gate
	data []byte // of the one file
	mnt  string

	keeper int // process ID, as the daemon said last
}

func newWorld(t *testing.T, size int, fuse bool) *world {
	t.Helper()
	if fuse {
		needFUSE(t)
	} else {
		need(t)
	}
	w := &world{t: t, dir: t.TempDir(), fuse: fuse, data: gatetest.Random(9, size)}
	tree := gatetest.NewTree(t, w.dir, map[string][]byte{"file": w.data})
	tree.NewArena(t, filepath.Join(w.dir, "arena")).Close()
	w.write("truth", tree.Truth)
	w.write("present", make([]byte, len(tree.Truth)/4096))
	t.Cleanup(w.killKeeper)
	d := w.start(daemon{}, "nogate") // guards, then goes away
	w.mnt = filepath.Join(w.dir, "mnt")
	t.Cleanup(func() { unmountAll(t, filepath.Join(w.dir, "gate")) })
	device := filepath.Join(w.dir, "arena")
	if fuse {
		b, err := os.ReadFile(filepath.Join(w.dir, "device"))
		if err != nil {
			t.Fatal(err)
		}
		device = string(b)
	}
	tree.Mount(t, device, w.mnt)
	d.ask("quit")
	d.wait()
	return w
}

func (w *world) write(name string, b []byte) {
	w.t.Helper()
	if err := os.WriteFile(filepath.Join(w.dir, name), b, 0o600); err != nil {
		w.t.Fatal(err)
	}
}

// process is a running daemon.
type process struct {
	w         *world
	cmd       *exec.Cmd
	in        *os.File
	answers   chan string // "ok"
	restarted chan int    // process ID of a new keeper
	log       bytes.Buffer
	done      chan struct{}
}

// start starts a daemon and waits until it is ready; how says what it must
// have found: "takeover" or "nogate".
func (w *world) start(d daemon, how string) *process {
	w.t.Helper()
	d.Dir, d.FUSE = w.dir, w.fuse
	config, err := json.Marshal(d)
	if err != nil {
		w.t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		w.t.Fatal(err)
	}
	p := &process{w: w, cmd: exec.Command(exe), answers: make(chan string, 10), restarted: make(chan int, 10), done: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), daemonEnv+"="+string(config))
	p.cmd.Stderr = &p.log
	inR, inW, err := os.Pipe()
	if err != nil {
		w.t.Fatal(err)
	}
	p.cmd.Stdin, p.in = inR, inW
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		w.t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	inR.Close()
	ready := make(chan string, 1)
	go func() {
		defer close(p.done)
		s := bufio.NewScanner(out)
		for s.Scan() {
			word, arg, _ := strings.Cut(s.Text(), " ")
			switch word {
			case "ready", "error:":
				ready <- s.Text()
			case "restarted":
				pid, _ := strconv.Atoi(arg)
				p.restarted <- pid
			default:
				p.answers <- word
			}
		}
		p.cmd.Wait()
		inW.Close()
	}()
	w.t.Cleanup(p.kill)
	select {
	case got := <-ready:
		if want := "ready " + how + " "; !strings.HasPrefix(got, want) {
			w.t.Fatalf("daemon says %q, want %q\n%s", got, want, p.log.String())
		}
		w.keeper, _ = strconv.Atoi(got[strings.LastIndexByte(got, ' ')+1:])
	case <-time.After(gatetest.Patience):
		w.t.Fatal("the daemon does not start")
	}
	return p
}

func (p *process) ask(command string) {
	p.w.t.Helper()
	fmt.Fprintln(p.in, command)
	select {
	case <-p.answers:
	case <-p.done:
		p.w.t.Fatalf("the daemon died of %q: %v\n%s", command, p.cmd.ProcessState, p.log.String())
	case <-time.After(gatetest.Patience):
		p.w.t.Fatalf("the daemon does not answer %q", command)
	}
}

func (p *process) wait() {
	p.w.t.Helper()
	select {
	case <-p.done:
	case <-time.After(gatetest.Patience):
		p.w.t.Fatal("the daemon does not end")
	}
}

func (p *process) kill() {
	p.cmd.Process.Kill()
	<-p.done
}

func (w *world) killKeeper() {
	if w.keeper != 0 {
		unix.Kill(w.keeper, unix.SIGKILL)
	}
}

// waitKeeper waits until the daemon has a new keeper that holds everything.
func (p *process) waitKeeper() {
	p.w.t.Helper()
	select {
	case p.w.keeper = <-p.restarted:
	case <-p.done:
		p.w.t.Fatalf("the daemon died with its keeper: %v\n%s", p.cmd.ProcessState, p.log.String())
	case <-time.After(gatetest.Patience):
		p.w.t.Fatal("the keeper is not restarted")
	}
}

var errWrong = errors.New("wrong bytes")

// open opens the file without readahead, so that each block is a read of its own.
func (w *world) open() *os.File {
	w.t.Helper()
	f, err := os.Open(filepath.Join(w.mnt, "file"))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { f.Close() })
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_RANDOM); err != nil {
		w.t.Fatal(err)
	}
	return f
}

func (w *world) read(f *os.File, block int) error {
	var b [4096]byte
	off := block * len(b)
	if _, err := f.ReadAt(b[:], int64(off)); err != nil {
		return err
	}
	if !bytes.Equal(b[:], w.data[off:off+len(b)]) {
		return fmt.Errorf("%w at block %d: zeros only: %v", errWrong, block, b == [4096]byte{})
	}
	return nil
}

// readers reads blocks, each in a goroutine of its own, and sends what came of
// each.
func (w *world) readers(blocks ...int) <-chan error {
	f := w.open()
	ch := make(chan error, len(blocks))
	for _, b := range blocks {
		go func() { ch <- w.read(f, b) }()
	}
	return ch
}

func blocks(from, n int) []int {
	var b []int
	for i := range n {
		b = append(b, from+i)
	}
	return b
}

// collect waits for n results.
func (w *world) collect(ch <-chan error, n int) (errs []error) {
	w.t.Helper()
	for range n {
		select {
		case err := <-ch:
			errs = append(errs, err)
		case <-time.After(gatetest.Patience):
			w.t.Fatal("a read hangs")
		}
	}
	return errs
}

func (w *world) right(ch <-chan error, n int) {
	w.t.Helper()
	for _, err := range w.collect(ch, n) {
		if err != nil {
			w.t.Error(err)
		}
	}
}

func (w *world) quiet(ch <-chan error) {
	w.t.Helper()
	select {
	case err := <-ch:
		w.t.Fatalf("a read of an absent block did not wait: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
}

// onBoth runs a test on either gate.
func onBoth(t *testing.T, test func(t *testing.T, fuse bool)) {
	t.Run("fanotify", func(t *testing.T) { test(t, false) })
	t.Run("fuse", func(t *testing.T) { test(t, true) })
}

func TestDaemonKilled(t *testing.T) { onBoth(t, testDaemonKilled) }

func testDaemonKilled(t *testing.T, fuse bool) {
	w := newWorld(t, 1<<20, fuse)
	d := w.start(daemon{}, "takeover")
	first := w.readers(blocks(0, 20)...)
	d.ask("pending 20")
	d.kill()
	w.quiet(first)
	second := w.readers(blocks(20, 20)...) // these come while there is no daemon
	w.quiet(second)

	// The next one dies too, with what it inherited and events of its own.
	d = w.start(daemon{}, "takeover")
	d.ask("pending 40")
	w.quiet(first)
	d.kill()

	d = w.start(daemon{}, "takeover")
	third := w.readers(blocks(40, 20)...)
	d.ask("pending 60")
	w.quiet(first)
	w.quiet(second)
	w.quiet(third)
	d.ask("demand")
	w.right(first, 20)
	w.right(second, 20)
	w.right(third, 20)
	w.right(w.readers(blocks(60, 100)...), 100)
}

// TestDaemonKilledAt kills the daemon at each point of an event's way.
func TestDaemonKilledAt(t *testing.T) { onBoth(t, testDaemonKilledAt) }

func testDaemonKilledAt(t *testing.T, fuse bool) {
	for _, tt := range []struct {
		point string
		eio   bool // the event is denied
	}{
		{"read", true}, // the range is not noted anywhere
		{"noted", false},
		{"handled", false},
		{"answered", false}, // and noted still
	} {
		if fuse {
			if tt.point == "noted" {
				continue // no journal
			}
			tt.eio = false // the kernel tells of it again
		}
		t.Run(tt.point, func(t *testing.T) {
			w := newWorld(t, 1<<20, fuse)
			d := w.start(daemon{Stop: tt.point, StopAt: 3, Demand: true}, "takeover")
			f := w.open()
			var errs []error
			for b := range 3 {
				ch := make(chan error, 1)
				go func() { ch <- w.read(f, b) }()
				if b == 2 {
					d.wait()
					d = w.start(daemon{Demand: true}, "takeover")
				}
				errs = append(errs, w.collect(ch, 1)...)
			}
			for b, err := range errs {
				// A window that fails to be read ahead is read again by the
				// kernel, block by block, so the reader may not notice.
				if err != nil && !(b == 2 && tt.eio && errors.Is(err, unix.EIO)) {
					t.Errorf("block %d: %v", b, err)
				}
			}
			// The failure is not kept, and nothing stands in the way of new events,
			// whose numbers are the old ones again.
			w.right(w.readers(blocks(0, 200)...), 200)
			d.kill()
			if denied := strings.Contains(d.log.String(), "died before it noted them"); denied != tt.eio {
				t.Errorf("denied: %v, want %v:\n%s", denied, tt.eio, d.log.String())
			}
		})
	}
}

func TestKeeperKilled(t *testing.T) { onBoth(t, testKeeperKilled) }

func testKeeperKilled(t *testing.T, fuse bool) {
	w := newWorld(t, 1<<20, fuse)
	d := w.start(daemon{}, "takeover")
	for range 3 {
		w.killKeeper()
		d.waitKeeper()
	}
	ch := w.readers(blocks(0, 10)...)
	d.ask("pending 10")
	w.killKeeper()
	d.waitKeeper()
	w.quiet(ch)
	d.kill()
	w.quiet(ch)
	w.start(daemon{Demand: true}, "takeover")
	w.right(ch, 10)
}

// TestBothKilled: what invariant 3 cannot prevent must at least be seen.
func TestBothKilled(t *testing.T) { onBoth(t, testBothKilled) }

func testBothKilled(t *testing.T, fuse bool) {
	w := newWorld(t, 1<<20, fuse)
	d := w.start(daemon{}, "takeover")
	d.cmd.Process.Signal(unix.SIGSTOP) // so that it cannot start another keeper
	w.killKeeper()
	d.kill()
	if fuse {
		// This gate fails closed.
		for _, err := range w.collect(w.readers(blocks(0, 20)...), 20) {
			if !errors.Is(err, unix.EIO) && !errors.Is(err, unix.ENOTCONN) {
				t.Errorf("read without a gate: %v, want EIO", err)
			}
		}
	}
	w.start(daemon{}, "nogate")
}

// TestRandomKills reads every block of a file once while daemons and keepers
// die at any moment.
func TestRandomKills(t *testing.T) { onBoth(t, testRandomKills) }

func testRandomKills(t *testing.T, fuse bool) {
	const (
		size    = 64 << 20
		kills   = 120
		readers = 16
		most    = 45 * time.Second
	)
	w := newWorld(t, size, fuse)
	order := rand.Perm(size / 4096)
	var (
		next               atomic.Int64
		stop               atomic.Bool
		right, wrong, eios atomic.Int64
		wg                 sync.WaitGroup
	)
	for range readers {
		f := w.open()
		wg.Go(func() {
			for !stop.Load() {
				i := next.Add(1) - 1
				if i >= int64(len(order)) {
					return
				}
				for {
					err := w.read(f, order[i])
					if errors.Is(err, unix.EIO) {
						eios.Add(1)
						continue // and then it must come
					}
					if err != nil {
						t.Error(err)
						wrong.Add(1)
					} else {
						right.Add(1)
					}
					break
				}
			}
		})
	}
	config := daemon{Demand: true, Delay: 20 * time.Millisecond}
	d := w.start(config, "takeover")
	begin := time.Now()
	daemons, keepers := 0, 0
	for daemons+keepers < kills && time.Since(begin) < most && next.Load() < int64(len(order)) {
		time.Sleep(rand.N(60 * time.Millisecond))
		if rand.IntN(3) == 0 {
			w.killKeeper()
			keepers++
			d.waitKeeper()
			continue
		}
		d.cmd.Process.Kill()
		daemons++
		if rand.IntN(2) == 0 {
			<-d.done
		} // else the next one starts while this one is still dying
		d = w.start(config, "takeover")
	}
	stop.Store(true)
	hung := make(chan struct{})
	go func() { wg.Wait(); close(hung) }()
	select {
	case <-hung:
	case <-time.After(gatetest.Patience):
		t.Fatal("a read hangs")
	}
	t.Logf("%d daemons and %d keepers killed in %v: %d blocks right, %d wrong, %d reads failed with EIO and were right when repeated",
		daemons, keepers, time.Since(begin).Round(time.Millisecond), right.Load(), wrong.Load(), eios.Load())
	if daemons+keepers < kills/4 {
		t.Errorf("only %d kills", daemons+keepers)
	}
}
