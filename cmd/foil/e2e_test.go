package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/rogpeppe/go-internal/testscript"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
)

// TestEndToEnd runs the commands against a real server, daemon and runc. The
// scripts know these commands more:
//
//	start NAME ARG...   runs foil ARG... in the background until the script ends,
//	                    and waits until it answers: a server at $SERVER, or a
//	                    daemon at $FOIL_ROOT
//	end NAME [SIGNAL]   ends it, by SIGTERM unless told otherwise, and waits
//	image DIR CONFIG    writes an OCI layout with one image: busybox, a file /big
//	                    of 8 MiB, and the OCI config in the JSON file CONFIG
//	push DIR NAME       has skopeo push the image to $SERVER/NAME
//	until COMMAND...    runs COMMAND again and again until it succeeds
func TestEndToEnd(t *testing.T) {
	busybox := needHost(t)
	// The program itself: the daemon starts it again as the keeper, which the
	// test binary is not.
	bin := t.TempDir()
	if out, err := exec.Command("go", "build", "-o", filepath.Join(bin, "foil"), ".").CombinedOutput(); err != nil {
		t.Fatalf("build foil: %v\n%s", err, out)
	}
	testscript.Run(t, testscript.Params{
		Dir: filepath.Join("testdata", "e2e"),
		Setup: func(env *testscript.Env) error {
			root := filepath.Join(env.WorkDir, "root")
			env.Setenv("FOIL_ROOT", root)
			env.Setenv("SERVER", freePort())
			env.Setenv("TZ", "UTC")
			env.Setenv("PATH", bin+string(filepath.ListSeparator)+env.Getenv("PATH"))
			env.Values[processes{}] = make(map[string]*process)
			env.Defer(func() { endWorker(t, root) })
			return nil
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"start": func(ts *testscript.TestScript, _ bool, args []string) { start(ts, args) },
			"end":   func(ts *testscript.TestScript, _ bool, args []string) { end(ts, args) },
			"image": func(ts *testscript.TestScript, _ bool, args []string) {
				if len(args) != 2 {
					ts.Fatalf("usage: image DIR CONFIG")
				}
				var config ocispec.ImageConfig
				ts.Check(json.Unmarshal([]byte(ts.ReadFile(args[1])), &config))
				ts.Check(writeImage(t, ts.MkAbs(args[0]), busybox, config))
			},
			"push": func(ts *testscript.TestScript, _ bool, args []string) {
				if len(args) != 2 {
					ts.Fatalf("usage: push DIR NAME")
				}
				ts.Check(ts.Exec("skopeo", "copy", "--quiet", "--dest-tls-verify=false",
					"oci:"+ts.MkAbs(args[0])+":latest", "docker://"+ts.Getenv("SERVER")+"/"+args[1]))
			},
			"until": func(ts *testscript.TestScript, _ bool, args []string) {
				deadline := time.Now().Add(patience)
				for ts.Exec(args[0], args[1:]...) != nil {
					if time.Now().After(deadline) {
						ts.Fatalf("%s never succeeds", strings.Join(args, " "))
					}
					time.Sleep(20 * time.Millisecond)
				}
			},
		},
	})
}

// needHost skips the test, saying why, where a worker cannot run.
func needHost(t *testing.T) (busybox string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("a worker needs root")
	}
	for _, program := range []string{"runc", "skopeo", "busybox"} {
		path, err := exec.LookPath(program)
		if err != nil {
			t.Skipf("%s is not installed", program)
		}
		busybox = path
	}
	features, err := kernel.Features(t.Context(), os.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range features {
		if f.Need && !f.Have {
			t.Skipf("this host has no %s (%s): %s", f.Name, f.Detail, f.Fix)
		}
	}
	return busybox
}

// ports counts what freePort has given away.
var ports atomic.Uint32

// freePort returns an address for a server that is started later, and again: on a
// loopback address of this process's own, and below the ports that kernels choose
// from. Of a port that was free a moment ago somebody else may be the owner by then.
func freePort() string {
	pid := os.Getpid()
	return fmt.Sprintf("127.%d.%d.%d:%d", 64+pid>>16&63, pid>>8&255, pid&255, 10_000+ports.Add(1))
}

// patience is how long something may take before it is called hung. Nothing that
// works waits so long, also on a machine with much else to do.
const patience = 2 * time.Minute

// processes is the key of a script's background processes.
type processes struct{}

// process is one of them.
type process struct {
	cmd   *exec.Cmd
	ended chan struct{} // closed when it has
	log   string        // path
}

func start(ts *testscript.TestScript, args []string) {
	if len(args) < 2 {
		ts.Fatalf("usage: start NAME ARG...")
	}
	foil := filepath.Join(filepath.SplitList(ts.Getenv("PATH"))[0], "foil")
	p := &process{cmd: exec.Command(foil, args[1:]...), ended: make(chan struct{}), log: ts.MkAbs(args[0] + ".log")}
	log, err := os.Create(p.log)
	ts.Check(err)
	defer log.Close()
	p.cmd.Dir = ts.MkAbs(".")
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.Env = append(os.Environ(), "FOIL_ROOT="+ts.Getenv("FOIL_ROOT"))
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	ts.Check(p.cmd.Start())
	go func() {
		_ = p.cmd.Wait()
		close(p.ended)
	}()
	ts.Value(processes{}).(map[string]*process)[args[0]] = p
	ts.Defer(func() {
		p.end(ts, syscall.SIGTERM)
	})
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		if answers(args[1], ts.Getenv("SERVER"), ts.Getenv("FOIL_ROOT")) {
			return
		}
		select {
		case <-p.ended:
			ts.Fatalf("foil %s ended:\n%s", strings.Join(args[1:], " "), ts.ReadFile(p.log))
		default:
		}
		if time.Now().After(deadline) {
			ts.Fatalf("foil %s does not answer:\n%s", strings.Join(args[1:], " "), ts.ReadFile(p.log))
		}
	}
}

func answers(command, server, root string) bool {
	if command == "serve" {
		resp, err := http.Get("http://" + server + "/v2/")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	}
	c := api.Dial(root)
	defer c.Close()
	_, err := c.Status(context.Background())
	return err == nil
}

func end(ts *testscript.TestScript, args []string) {
	if len(args) == 0 || len(args) > 2 {
		ts.Fatalf("usage: end NAME [SIGNAL]")
	}
	p := ts.Value(processes{}).(map[string]*process)[args[0]]
	if p == nil {
		ts.Fatalf("no process %s was started", args[0])
	}
	sig := syscall.SIGTERM
	if len(args) == 2 {
		n, err := strconv.Atoi(args[1])
		ts.Check(err)
		sig = syscall.Signal(n)
	}
	p.end(ts, sig)
}

func (p *process) end(ts *testscript.TestScript, sig syscall.Signal) {
	_ = p.cmd.Process.Signal(sig)
	select {
	case <-p.ended:
	case <-time.After(patience):
		_ = p.cmd.Process.Kill()
		<-p.ended
		ts.Logf("it did not end on %s:\n%s", sig, ts.ReadFile(p.log))
	}
}

// endWorker ends what a script left running at root: the daemon that a command
// started, containers, the keeper; and takes the mounts away.
func endWorker(t *testing.T, root string) {
	cmdlines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Error(err)
	}
	// The daemon first: it starts the keeper again.
	for _, command := range []string{"node", "keeper"} {
		for _, path := range cmdlines {
			b, err := os.ReadFile(path)
			args := strings.Split(string(b), "\x00")
			if err != nil || len(args) < 3 || args[1] != command || !strings.Contains(string(b), root) {
				continue
			}
			pid, err := strconv.Atoi(strings.Split(path, "/")[2])
			if err != nil {
				continue
			}
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				t.Errorf("kill %s %d: %v", command, pid, err)
			}
			for deadline := time.Now().Add(patience); syscall.Kill(pid, 0) == nil && time.Now().Before(deadline); {
				time.Sleep(5 * time.Millisecond)
			}
		}
	}
	mounts, err := kernel.Mounts(root)
	if err != nil {
		t.Error(err)
	}
	for i := len(mounts) - 1; i >= 0; i-- {
		if err := kernel.Unmount(mounts[i].Target, true); err != nil {
			t.Error(err)
		}
	}
}

// writeImage writes an OCI layout.
func writeImage(t testing.TB, dir, busybox string, config ocispec.ImageConfig) error {
	program, err := os.ReadFile(busybox)
	if err != nil {
		return err
	}
	big := make([]byte, 8<<20)
	if _, err := rand.NewChaCha8([32]byte{1}).Read(big); err != nil {
		return err
	}
	layer := layertest.Layer{
		layertest.Dir("bin", 0o755), layertest.Dir("etc", 0o755), layertest.Dir("tmp", 0o1777), layertest.Dir("srv", 0o755),
		layertest.File("etc/passwd", 0o644, "root:x:0:0::/:/bin/sh\napp:x:1000:1000::/:/bin/sh\n"),
		layertest.File("etc/group", 0o644, "root:x:0:\napp:x:1000:\n"),
		layertest.File("etc/data", 0o644, "data\n"),
		layertest.File("bin/busybox", 0o755, string(program)),
		layertest.File("big", 0o644, string(big)),
	}
	for _, name := range []string{"sh", "cat", "echo", "id", "env", "pwd", "sleep", "true", "touch", "ls", "wc", "stty"} {
		layer = append(layer, layertest.Link("bin/"+name, "bin/busybox").Mode(0o755))
	}
	blob := layer.Gzip(t)

	blobs := filepath.Join(dir, "blobs", "sha256")
	if err := os.MkdirAll(blobs, 0o755); err != nil {
		return err
	}
	put := func(mediaType string, b []byte) (ocispec.Descriptor, error) {
		d := ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(b), Size: int64(len(b))}
		return d, os.WriteFile(filepath.Join(blobs, d.Digest.Encoded()), b, 0o644)
	}
	putJSON := func(mediaType string, v any) (ocispec.Descriptor, error) {
		b, err := json.Marshal(v)
		if err != nil {
			return ocispec.Descriptor{}, err
		}
		return put(mediaType, b)
	}
	l, err := put(blob.MediaType, blob.Bytes)
	if err != nil {
		return err
	}
	c, err := putJSON(ocispec.MediaTypeImageConfig, ocispec.Image{
		Platform: ocispec.Platform{OS: "linux", Architecture: "amd64"},
		Config:   config,
		RootFS:   ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{blob.DiffID}},
	})
	if err != nil {
		return err
	}
	versioned := specs.Versioned{SchemaVersion: 2}
	m, err := putJSON(ocispec.MediaTypeImageManifest, ocispec.Manifest{
		Versioned: versioned, MediaType: ocispec.MediaTypeImageManifest, Config: c, Layers: []ocispec.Descriptor{l},
	})
	if err != nil {
		return err
	}
	m.Annotations = map[string]string{ocispec.AnnotationRefName: "latest"}
	index, err := json.Marshal(ocispec.Index{Versioned: versioned, Manifests: []ocispec.Descriptor{m}})
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(filepath.Join(dir, ocispec.ImageIndexFile), index, 0o644),
		os.WriteFile(filepath.Join(dir, ocispec.ImageLayoutFile), fmt.Appendf(nil, `{"imageLayoutVersion":%q}`, ocispec.ImageLayoutVersion), 0o644),
	)
}
