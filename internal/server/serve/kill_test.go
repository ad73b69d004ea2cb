package serve_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/server/collect"
	"hydrofoil.dev/foil/internal/server/convert"
	"hydrofoil.dev/foil/internal/server/serve"
	"hydrofoil.dev/foil/internal/server/upstream"
)

// childRoot makes the test program a server at that root, so that tests can
// kill it.
const childRoot = "FOIL_TEST_SERVE_ROOT"

// childUpstream makes it the accelerator of that upstream.
const childUpstream = "FOIL_TEST_SERVE_UPSTREAM"

// childLease is short, so that a collector has something to do.
const childLease = 300 * time.Millisecond

// childWebhooks is the file of its webhooks.
const childWebhooks = "FOIL_TEST_SERVE_WEBHOOKS"

// childMode is its mode, childStores its other stores, with spaces between.
const (
	childMode   = "FOIL_TEST_SERVE_MODE"
	childStores = "FOIL_TEST_SERVE_STORES"
)

func TestMain(m *testing.M) {
	if root := os.Getenv(childRoot); root != "" {
		s, err := serve.Start(context.Background(), serve.Options{
			Root: root, Listen: "127.0.0.1:0",
			Upstream: upstream.Options{URL: os.Getenv(childUpstream)},
			Collect:  collect.Options{Leftover: 5 * time.Second, Interval: 20 * time.Millisecond, PackSize: 1 << 20},
			Lease:    childLease,
			Webhooks: os.Getenv(childWebhooks),
			Mode:     os.Getenv(childMode),
			Stores:   strings.Fields(os.Getenv(childStores)),
			Convert:  convert.Options{Interval: childInterval()},
		})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(s.Addr())
		_ = s.Wait()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// childInterval is short for a server that is killed while it converts.
func childInterval() time.Duration {
	if os.Getenv(childMode) == "" {
		return 0
	}
	return 50 * time.Millisecond
}

// child starts a server as a process of its own, below the command if there is
// one, and returns its base URL.
func child(t *testing.T, root string, command ...string) (base string, cmd *exec.Cmd) {
	t.Helper()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	args := append(command, program)
	cmd = exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), childRoot+"="+root)
	cmd.Stderr = t.Output()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("the server did not start: %v", err)
	}
	return "http://" + strings.TrimSpace(line), cmd
}

func send(t *testing.T, method, url, mediaType string, body []byte, status int) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if mediaType != "" {
		req.Header.Set("Content-Type", mediaType)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if b, err := io.ReadAll(res.Body); err != nil || res.StatusCode != status {
		t.Fatalf("%s %s: %d, %v, want %d; %s", method, url, res.StatusCode, err, status, b)
	}
	return res
}

// The server is killed the moment it has acknowledged a push. All of it is
// there afterwards.
func TestKilledAfterPush(t *testing.T) {
	root := t.TempDir()
	for i := range 8 {
		base, cmd := child(t, root)
		repo := base + "/v2/r"
		blob := bytes.Repeat([]byte(strconv.Itoa(i)), 100_000)
		d := digest.FromBytes(blob)
		m, err := json.Marshal(ocispec.Manifest{
			MediaType: ocispec.MediaTypeImageManifest,
			Config:    ocispec.Descriptor{MediaType: "application/x", Digest: d, Size: int64(len(blob))},
		})
		if err != nil {
			t.Fatal(err)
		}
		kill := func() {
			t.Helper()
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()
			base, cmd = child(t, root)
			repo = base + "/v2/r"
		}
		// A chunk, a blob, a manifest: each acknowledged, then killed.
		res := send(t, "POST", repo+"/blobs/uploads/", "", nil, http.StatusAccepted)
		location := res.Header.Get("Location")
		send(t, "PATCH", base+location, "", blob[:60_000], http.StatusAccepted)
		kill()
		send(t, "PUT", base+location+"?digest="+d.String(), "", blob[60_000:], http.StatusCreated)
		kill()
		send(t, "HEAD", repo+"/blobs/"+d.String(), "", nil, http.StatusOK)
		send(t, "PUT", repo+"/manifests/t"+strconv.Itoa(i), ocispec.MediaTypeImageManifest, m, http.StatusCreated)
		kill()
		for j := range i + 1 {
			send(t, "GET", repo+"/manifests/t"+strconv.Itoa(j), "", nil, http.StatusOK)
			old := digest.FromBytes(bytes.Repeat([]byte(strconv.Itoa(j)), 100_000))
			res := send(t, "GET", repo+"/blobs/"+old.String(), "", nil, http.StatusOK)
			if res.ContentLength != 100_000 {
				t.Errorf("blob %d has %d bytes", j, res.ContentLength)
			}
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
	}
	left, err := os.ReadDir(filepath.Join(root, "uploads"))
	if err != nil || len(left) != 0 {
		t.Errorf("uploads left behind: %v, %v", left, err)
	}
}

// A power cut cannot be had in a test; what makes a push survive it is the
// order of the system calls: the bytes are synced before they get their name,
// the name before the catalog knows it, and the catalog before the answer.
func TestSyncOrder(t *testing.T) {
	if _, err := exec.LookPath("strace"); err != nil {
		t.Skipf("strace is not installed: %v", err)
	}
	root := t.TempDir()
	trace := filepath.Join(t.TempDir(), "trace")
	base, cmd := child(t, root, "strace", "-D", "-f", "-y", "-s", "64", "-o", trace,
		"-e", "trace=fsync,fdatasync,rename,renameat,renameat2,write,writev")
	b := bytes.Repeat([]byte("x"), 100_000)
	d := digest.FromBytes(b)
	send(t, "POST", base+"/v2/r/blobs/uploads/?digest="+d.String(), "", b, http.StatusCreated)
	// With -D this process is the server, and Wait waits for strace too: it
	// holds the pipe of standard error.
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	out, err := os.ReadFile(trace)
	if err != nil {
		t.Fatal(err)
	}
	key := "blobs/sha256/" + d.Encoded()[:2]
	dir := regexp.QuoteMeta(filepath.Join(root, "objects"))
	steps := []string{
		`fsync\(\d+<[^>]*/uploads/[^>]*\.data>`,
		`fsync\(\d+<` + dir + `>`,
		`fsync\(\d+<` + dir + `/blobs>`,
		`fsync\(\d+<` + dir + `/blobs/sha256>`,
		`rename(at2?)?\(.*/uploads/.*\.data".*` + regexp.QuoteMeta(key+"/"+d.Encoded()),
		`fsync\(\d+<` + dir + `/` + regexp.QuoteMeta(key) + `>`,
		`f(data)?sync\(\d+<[^>]*/catalog\.db-wal>`,
		`write\(\d+<(TCP|socket)[^>]*>, "HTTP/1\.1 201 Created`,
	}
	lines := strings.Split(string(out), "\n")
	at := 0
	for _, step := range steps {
		re := regexp.MustCompile(step)
		found := false
		for ; at < len(lines) && !found; at++ {
			found = re.MatchString(lines[at])
		}
		if !found {
			t.Fatalf("no %s after the steps before it in\n%s", step, clip(out))
		}
	}
}

func clip(b []byte) []byte { return b[max(0, len(b)-20_000):] }
