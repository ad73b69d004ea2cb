package serve_test

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/logtest"
	"hydrofoil.dev/foil/internal/server/serve"
	"hydrofoil.dev/foil/internal/server/upstream"
)

// startRegistry runs a registry that others made, over an empty directory, which
// notifies a server of pushes, if it is told of one. It returns its address and what ends it.
func startRegistry(t *testing.T, program, addr, dir, hook string) (stop func()) {
	t.Helper()
	if hook == "" {
		return startRegistryWith(t, program, addr, dir, "")
	}
	return startRegistryWith(t, program, addr, dir, fmt.Sprintf(`notifications:
  endpoints:
    - {name: accelerator, url: %s, timeout: 5s, threshold: 5, backoff: 100ms}
`, hook))
}

// freeAddress is one that nobody listens on.
func freeAddress(t *testing.T) string {
	t.Helper()
	var l net.ListenConfig
	free, err := l.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer free.Close()
	return free.Addr().String()
}

// startRegistryWith runs one with more lines of configuration.
func startRegistryWith(t *testing.T, program, addr, dir, more string) (stop func()) {
	t.Helper()
	config := filepath.Join(dir, "config.yml")
	content := fmt.Sprintf(`version: 0.1
log: {level: warn}
storage: {filesystem: {rootdirectory: %s}}
http: {addr: %s}
%s`, filepath.Join(dir, "data"), addr, more)
	if err := os.WriteFile(config, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "serve", config)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Env = append(os.Environ(), "OTEL_TRACES_EXPORTER=none")
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait() // it is killed
	}()
	stop = sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		<-ended
		if t.Failed() {
			t.Logf("log of %s:\n%s", program, clip(log.Bytes()))
		}
	})
	t.Cleanup(stop)
	for {
		select {
		case <-ended:
			t.Fatalf("%s ended: %s", program, log.Bytes())
		default:
		}
		if resp, err := http.Get("http://" + addr + "/v2/"); err == nil {
			resp.Body.Close()
			return stop
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// The accelerator of real registries: Debian's docker-registry, which is
// distribution 2.8, and distribution 3, which FOIL_TEST_REGISTRY names.
func TestRealUpstreams(t *testing.T) {
	needProgram(t, "skopeo")
	for name, program := range map[string]string{"distribution 2.8": "docker-registry", "distribution 3": os.Getenv("FOIL_TEST_REGISTRY")} {
		t.Run(name, func(t *testing.T) {
			if program == "" {
				t.Skip("FOIL_TEST_REGISTRY does not name a registry program, as that of tools/registry")
			}
			needProgram(t, program)
			addr := freeAddress(t)
			dir, log := t.TempDir(), new(logtest.Buffer)
			s := start(t, serve.Options{
				Upstream: upstream.Options{URL: "http://" + addr},
				Log:      slog.New(slog.NewTextHandler(io.MultiWriter(log, t.Output()), nil)),
			})
			stop := startRegistry(t, program, addr, dir, "http://"+s.Addr()+upstream.WebhookPath)

			// Push to the upstream; plainly and as a bundle from the accelerator.
			image := filepath.Join(dir, "image")
			want := layout(t, image)
			push := func(tag string) {
				t.Helper()
				command(t, "skopeo", "copy", "--dest-tls-verify=false", "oci:"+image+":latest", "docker://"+addr+"/team/app:"+tag)
			}
			push("1")
			to := filepath.Join(dir, "pulled")
			command(t, "skopeo", "copy", "--src-tls-verify=false", "--preserve-digests", "docker://"+s.Addr()+"/team/app:1", "dir:"+to)
			if b, err := os.ReadFile(filepath.Join(to, "manifest.json")); err != nil || digest.FromBytes(b) != want {
				t.Errorf("pulled %s, %v, want %s", digest.FromBytes(b), err, want)
			}
			wantBundle(t, s.Addr(), "team/app", "1", want)
			if out := command(t, "skopeo", "list-tags", "--tls-verify=false", "docker://"+s.Addr()+"/team/app"); !strings.Contains(out, `"1"`) {
				t.Errorf("tags: %s", out)
			}
			out, err := exec.CommandContext(t.Context(), "skopeo", "copy", "--dest-tls-verify=false", "oci:"+image+":latest", "docker://"+s.Addr()+"/team/new:1").CombinedOutput()
			if err == nil || !strings.Contains(string(out), "accelerator of http://"+addr) {
				t.Errorf("a push to the accelerator: %v %s", err, out)
			}

			// The tag moves. What was pushed is here before anybody asks: also
			// under a tag that the accelerator hears of by the webhook only.
			image = filepath.Join(dir, "other")
			moved := layout(t, image, "other")
			push("1")
			wantBundle(t, s.Addr(), "team/app", "1", moved)
			push("2")
			for !strings.Contains(log.String(), "msg=prepared repository=team/app manifest="+moved.String()+" tag=2 ") {
				time.Sleep(10 * time.Millisecond)
			}
			stop()
			wantBundle(t, s.Addr(), "team/app", "1", moved)
			wantBundle(t, s.Addr(), "team/app", "2", moved)
			wantBundle(t, s.Addr(), "team/app", want.String(), want)
			command(t, "skopeo", "copy", "--src-tls-verify=false", "--preserve-digests", "docker://"+s.Addr()+"/team/app@"+want.String(), "dir:"+to)
		})
	}
}
