// Package e2e holds the tests of the whole: the real program, as processes that
// can be killed, over real mounts, with a link that can be slowed and cut.
package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/kernel/kerneltest"
	"hydrofoil.dev/foil/internal/server/layer/layertest"
	"hydrofoil.dev/foil/internal/worker/api"
)

// foil is the program under test, built by TestMain; busybox a static program
// for images.
var foil, busybox string

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	kerneltest.OwnMounts()
	// Files that tests make to compare with get the modes that are asked for.
	syscall.Umask(0o022)
	if os.Geteuid() != 0 {
		fmt.Println("skip: these tests mount filesystems and need root")
		return 0
	}
	dir, err := os.MkdirTemp("", "foil-e2e-")
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer os.RemoveAll(dir)
	foil = filepath.Join(dir, "foil")
	build := exec.Command("go", "build", "-o", foil, "hydrofoil.dev/foil/cmd/foil")
	build.Stdout, build.Stderr = os.Stdout, os.Stderr
	if err := build.Run(); err != nil {
		fmt.Println("build foil:", err)
		return 1
	}
	for _, p := range []string{"/bin/busybox", "/usr/bin/busybox"} {
		if _, err := os.Stat(p); err == nil {
			busybox = p
		}
	}
	return m.Run()
}

// process is one process of a test.
type process struct {
	t    testing.TB
	cmd  *exec.Cmd
	log  *logBuffer
	done chan struct{}
	err  error
}

// logBuffer keeps what a process wrote, for the report of a failed test.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func start(t testing.TB, args ...string) *process {
	t.Helper()
	return startProgram(t, foil, args...)
}

func startProgram(t testing.TB, program string, args ...string) *process {
	t.Helper()
	return startCommand(t, exec.Command(program, args...))
}

func startCommand(t testing.TB, cmd *exec.Cmd) *process {
	t.Helper()
	p := &process{t: t, cmd: cmd, log: new(logBuffer), done: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = p.log, p.log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second
	started := make(chan error)
	go func() {
		// The signal comes when the thread ends that began the process, so that
		// thread stays: one that mounts something may be ended by Go's runtime.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			p.err = cmd.Wait()
			close(p.done)
		}
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.signal(syscall.SIGTERM)
		select {
		case <-p.done:
		case <-time.After(time.Minute):
			p.signal(syscall.SIGQUIT) // for the stacks of its goroutines, in its log
			select {
			case <-p.done:
			case <-time.After(10 * time.Second):
				p.kill()
			}
			t.Errorf("%s did not end on SIGTERM", strings.Join(cmd.Args, " "))
		}
		if t.Failed() {
			t.Logf("log of %s:\n%s", strings.Join(cmd.Args, " "), p.log)
		}
	})
	return p
}

func (p *process) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) }

func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

// server is a running `foil serve`.
type server struct {
	*process
	root string
	addr string
}

func startServer(t testing.TB, root string) *server {
	t.Helper()
	return startServerAt(t, root, freeAddr(t))
}

func startServerAt(t testing.TB, root, addr string) *server {
	t.Helper()
	s := &server{root: root, addr: addr}
	s.process = start(t, "serve", "--root", root, "--listen", addr)
	eventually(t, "the server answers", func() error {
		select {
		case <-s.done:
			t.Fatalf("foil serve ended: %v\n%s", s.err, s.log)
		default:
		}
		resp, err := http.Get("http://" + addr + "/v2/")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return errors.New(resp.Status)
		}
		return nil
	})
	return s
}

// ports counts what freeAddr has given away.
var ports atomic.Uint32

// freeAddr returns an address for a process that is started later, and again: on
// a loopback address of this test binary's own, and below the ports that kernels
// choose from. Of a port that was free a moment ago somebody else may have become
// the owner, among them the tests of another package.
func freeAddr(t testing.TB) string {
	t.Helper()
	pid := os.Getpid()
	return fmt.Sprintf("127.%d.%d.%d:%d", 64+pid>>16&63, pid>>8&255, pid&255, 10_000+ports.Add(1))
}

// worker is a running `foil node`.
type worker struct {
	*process
	root   string
	hosts  string // directory of hosts.toml, for its containerd; empty: none
	client *api.Client
}

// workerRoot makes a worker's root on a filesystem that can be marked, and
// unmounts at the end whatever is mounted below it.
func workerRoot(t testing.TB) string {
	t.Helper()
	root, err := os.MkdirTemp("", "foil-worker-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		endKeeper(t, root)
		mounts, err := kernel.Mounts(root)
		if err != nil {
			t.Error(err)
		}
		for i := len(mounts) - 1; i >= 0; i-- {
			if err := kernel.Unmount(mounts[i].Target, true); err != nil {
				t.Error(err)
			}
		}
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	return root
}

// endKeeper ends the keeper of a root whose daemon is gone, if it is still
// there: with something incomplete it stays on purpose.
func endKeeper(t testing.TB, root string) {
	t.Helper()
	for _, pid := range pidsOf(t, root, "keeper") {
		_ = syscall.Kill(pid, syscall.SIGKILL)
		eventually(t, "the keeper is gone", func() error {
			if err := syscall.Kill(pid, 0); err == nil {
				return fmt.Errorf("process %d is there", pid)
			}
			return nil
		})
	}
}

// pidsOf finds this test's own processes `foil <command> ... <root>...`.
func pidsOf(t testing.TB, root, command string) []int {
	t.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, d := range dirs {
		b, err := os.ReadFile(d)
		if err != nil {
			continue
		}
		args := strings.Split(string(b), "\x00")
		if len(args) > 2 && args[1] == command && strings.Contains(string(b), root) {
			var pid int
			if _, err := fmt.Sscanf(d, "/proc/%d/", &pid); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// gateEnv is the gate of workers; empty: the best that this host has. Set it
// to run any of these tests with another.
const gateEnv = "FOIL_E2E_GATE"

func startWorker(t testing.TB, root string, flags ...string) *worker {
	t.Helper()
	w := &worker{root: root, client: api.Dial(root)}
	if gate := os.Getenv(gateEnv); gate != "" {
		flags = append(flags, "--gate", gate)
	}
	w.process = start(t, append([]string{"node", "--root", root}, flags...)...)
	t.Cleanup(w.client.Close)
	eventually(t, "the daemon answers", func() error {
		select {
		case <-w.done:
			t.Fatalf("foil node ended: %v\n%s", w.err, w.log)
		default:
		}
		_, err := w.client.Status(t.Context())
		return err
	})
	return w
}

// pull follows a pull until the event, and returns all events.
func (w *worker) pull(ref string, until api.EventKind) ([]api.Event, error) {
	w.t.Helper()
	var events []api.Event
	for ev, err := range w.client.Pull(w.t.Context(), api.PullRequest{Ref: ref, Until: until}) {
		if err != nil {
			return events, err
		}
		events = append(events, ev)
		if ev.Err != "" {
			return events, &api.Error{Code: ev.Code, Message: ev.Err}
		}
	}
	return events, nil
}

func (w *worker) mustPull(ref string, until api.EventKind) []api.Event {
	w.t.Helper()
	events, err := w.pull(ref, until)
	if err != nil {
		w.t.Fatalf("pull %s: %v", ref, err)
	}
	if last := events[len(events)-1].Event; last != until {
		w.t.Fatalf("pull %s ended with the event %q, want %q", ref, last, until)
	}
	return events
}

// mountOf returns where the rootfs of an image is mounted.
func (w *worker) mountOf(ref string) string {
	w.t.Helper()
	return filepath.Join(w.root, "rootfs", strings.TrimPrefix(w.imageOf(ref).ChainID, "sha256:"), "mnt")
}

func (w *worker) imageOf(ref string) api.Image {
	w.t.Helper()
	images, err := w.client.Images(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	for _, img := range images {
		if img.Ref == ref {
			return img
		}
	}
	w.t.Fatalf("no image %s among %v", ref, images)
	return api.Image{}
}

// verify runs `foil verify` and returns what it said.
func (w *worker) verify(ref string) (last api.VerifyEvent, bad []string) {
	w.t.Helper()
	for ev, err := range w.client.Verify(w.t.Context(), ref) {
		if err != nil {
			w.t.Fatalf("verify %s: %v", ref, err)
		}
		if ev.Bad != "" {
			bad = append(bad, ev.Bad)
		}
		last = ev
	}
	if !last.Done {
		w.t.Fatalf("verify %s ended before it was done", ref)
	}
	return last, bad
}

// image is an image as a client would push it.
type image struct {
	layers   []layertest.Blob
	config   []byte
	manifest []byte
}

func newImage(t testing.TB, cfg ocispec.ImageConfig, layers ...layertest.Blob) image {
	t.Helper()
	img := image{layers: layers}
	c := ocispec.Image{Config: cfg, Platform: ocispec.Platform{OS: "linux", Architecture: "amd64"}}
	c.RootFS.Type = "layers"
	m := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest}
	for _, l := range layers {
		c.RootFS.DiffIDs = append(c.RootFS.DiffIDs, l.DiffID)
		m.Layers = append(m.Layers, l.Descriptor())
	}
	var err error
	if img.config, err = json.Marshal(c); err != nil {
		t.Fatal(err)
	}
	m.Config = ocispec.Descriptor{
		MediaType: ocispec.MediaTypeImageConfig,
		Digest:    digest.FromBytes(img.config),
		Size:      int64(len(img.config)),
	}
	if img.manifest, err = json.Marshal(m); err != nil {
		t.Fatal(err)
	}
	return img
}

// push does what any client does, and fails the test when the server refuses.
func (s *server) push(repository, tag string, img image) (ref string) {
	s.t.Helper()
	if err := s.tryPush(repository, tag, img); err != nil {
		s.t.Fatal(err)
	}
	return s.addr + "/" + repository + ":" + tag
}

func (s *server) tryPush(repository, tag string, img image) error {
	base := "http://" + s.addr + "/v2/" + repository
	put := func(b []byte) error {
		resp, err := http.Post(base+"/blobs/uploads/", "", nil)
		if err != nil {
			return err
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusAccepted {
			return fmt.Errorf("start upload: %s", resp.Status)
		}
		at, err := resp.Location()
		if err != nil {
			return err
		}
		q := at.Query()
		q.Set("digest", digest.FromBytes(b).String())
		at.RawQuery = q.Encode()
		return do(http.MethodPut, at, "application/octet-stream", b)
	}
	for _, l := range img.layers {
		if err := put(l.Bytes); err != nil {
			return fmt.Errorf("push layer: %w", err)
		}
	}
	if err := put(img.config); err != nil {
		return fmt.Errorf("push config: %w", err)
	}
	u, err := url.Parse(base + "/manifests/" + tag)
	if err != nil {
		return err
	}
	if err := do(http.MethodPut, u, ocispec.MediaTypeImageManifest, img.manifest); err != nil {
		return fmt.Errorf("push manifest: %w", err)
	}
	return nil
}

func do(method string, u *url.URL, mediaType string, body []byte) error {
	req, err := http.NewRequest(method, u.String(), bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", mediaType)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusCreated {
		return fmt.Errorf("%s %s: %s: %s", method, u, resp.Status, b)
	}
	return nil
}

// link is a slow way to a server that a test can cut. Clients use its address.
type link struct {
	t      testing.TB
	addr   string
	target string
	l      net.Listener

	mu    sync.Mutex
	rate  int64 // bytes a second towards the client; 0: unlimited
	cut   bool  // refuse and drop everything
	stall bool  // accept, pass nothing
	conns map[net.Conn]bool
	wg    sync.WaitGroup
	moved int64
	until int64 // stall when so many bytes have moved; 0: never
	// corrupt, when set, may change a chunk that goes to the client.
	corrupt func(b []byte)
}

func newLink(t testing.TB, target string, rate int64) *link {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	k := &link{t: t, addr: l.Addr().String(), target: target, l: l, rate: rate, conns: make(map[net.Conn]bool)}
	k.wg.Go(k.accept)
	t.Cleanup(func() {
		l.Close()
		k.setCut(true)
		k.wg.Wait()
	})
	return k
}

func (k *link) accept() {
	for {
		c, err := k.l.Accept()
		if err != nil {
			return
		}
		k.wg.Go(func() { k.serve(c) })
	}
}

func (k *link) serve(c net.Conn) {
	defer c.Close()
	s, err := net.Dial("tcp", k.target)
	if err != nil {
		return
	}
	defer s.Close()
	k.mu.Lock()
	if k.cut {
		k.mu.Unlock()
		return
	}
	k.conns[c], k.conns[s] = true, true
	k.mu.Unlock()
	// Small buffers: what is cut must not be on its way already.
	for _, x := range []net.Conn{c, s} {
		_ = x.(*net.TCPConn).SetReadBuffer(64 << 10)
		_ = x.(*net.TCPConn).SetWriteBuffer(64 << 10)
	}
	done := make(chan struct{}, 2)
	k.wg.Go(func() { _, _ = io.Copy(s, c); c.Close(); s.Close(); done <- struct{}{} })
	k.wg.Go(func() { k.down(c, s); c.Close(); s.Close(); done <- struct{}{} })
	<-done
	<-done
	k.mu.Lock()
	delete(k.conns, c)
	delete(k.conns, s)
	k.mu.Unlock()
}

// down passes bytes from the server to the client at the rate.
func (k *link) down(c, s net.Conn) {
	buf := make([]byte, 16<<10)
	for {
		n, err := s.Read(buf)
		if n > 0 {
			for {
				k.mu.Lock()
				stall, cut := k.stall, k.cut
				k.mu.Unlock()
				if cut {
					return
				}
				if !stall {
					break
				}
				time.Sleep(5 * time.Millisecond)
			}
			k.mu.Lock()
			rate, corrupt := k.rate, k.corrupt
			k.moved += int64(n)
			if k.until > 0 && k.moved >= k.until {
				k.stall, k.until = true, 0
			}
			k.mu.Unlock()
			if corrupt != nil {
				corrupt(buf[:n])
			}
			if _, err := c.Write(buf[:n]); err != nil {
				return
			}
			if rate > 0 {
				time.Sleep(time.Duration(int64(n) * int64(time.Second) / rate))
			}
		}
		if err != nil {
			return
		}
	}
}

func (k *link) setRate(rate int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.rate = rate
}

// setCut drops all connections and refuses new ones, or lets them through again.
func (k *link) setCut(cut bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.cut = cut
	if cut {
		for c := range k.conns {
			c.Close()
		}
	}
}

func (k *link) setStall(stall bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stall = stall
}

// stallAfter lets so many more bytes through, and then none: what is here when a
// test looks does not depend on how quick this machine is.
func (k *link) stallAfter(n int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.until = k.moved + n
}

// open lets everything through, as fast as it goes.
func (k *link) open() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.rate, k.stall, k.until = 0, false, 0
}

func (k *link) setCorrupt(fn func([]byte)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.corrupt = fn
}

func (k *link) bytesMoved() int64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.moved
}

// via is the reference of an image through the link.
func (k *link) via(ref string) string {
	_, rest, _ := strings.Cut(ref, "/")
	return k.addr + "/" + rest
}

// eventually waits until cond returns nil.
func eventually(t testing.TB, what string, cond func() error) {
	t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for {
		err := cond()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not after two minutes: %v", what, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// noise is bytes that do not compress.
func noise(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b)
	return string(b)
}

// command runs foil to its end and returns what it printed and its exit code.
func command(t testing.TB, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, foil, args...)
	var out, errs bytes.Buffer
	cmd.Stderr = &errs
	cmd.Stdout = &out
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("foil %s: %v", strings.Join(args, " "), err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}
