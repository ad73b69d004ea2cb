// Package access measures what logins and rules cost the server, and what strangers can cost it.
//
// Cost (bench access) compares a server with rules, whose client shows a token, with an open one. Both have the same image, and
// are asked in turns for the same: in each round one batch of requests each, of which comes first alternates. What counts is
// the processor time of the server's process, which a busy machine disturbs least.
//
// Attacks (bench attacks) has an honest client pull an image again and again, alone and beside an attack, in turns, from a server
// with its limits and from one whose [limits] are beyond reach; other limits, as those of failed logins and idle bodies, are
// constants, and hold on both. Attackers are at addresses of their own. They are known, and may push and pull in repositories of their
// own, or anonymous, and may pull there.
//
// All share the processors of one machine, which they would not elsewhere. So attackers are a process that runs when nobody else wants to
// (SCHED_IDLE), and the server gives way to the honest client (nice). What is left: the server's own work for attackers
// takes a processor from a client that wants one, as any busy program would. An honest client with the rate of a link (Options.Rate)
// leaves room for that. The row idle is the same number of attackers at a server of nothing.
package access

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
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

// password is that of both users, and hash what an htpasswd file says of it, with bcrypt's default cost.
const (
	password = "password"
	hash     = "$2a$10$/86isWDGnV4Htd1sHWApjO/W/nEaad1QmcurhygYI5Hj2niAK7h9."
)

// beyondReach is limits that nobody meets.
const beyondReach = "[limits]\nrequests = 1e9\nburst = 1000000000\nparallel = 1000000000\n"

// rules let two users have repositories of their own; those of one can be pulled by everybody.
const rules = `[[rule]]
to = ["user:honest"]
allow = ["pull", "push"]
repositories = ["honest/**"]
[[rule]]
to = ["user:mallory"]
allow = ["pull", "push"]
repositories = ["mallory/**"]
[[rule]]
to = ["anonymous"]
allow = ["pull"]
repositories = ["mallory/**"]
`

// server is a foil serve.
type server struct {
	cmd    *exec.Cmd
	addr   string
	log    *os.File
	client *http.Client // from the honest address, with the token if there is one
	token  string
}

// start starts one below dir; without rules it is open. limits are added to the rules.
func start(ctx context.Context, foil, dir string, open bool, limits string) (_ *server, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	s := &server{addr: l.Addr().String(), client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 8}}}
	if err := l.Close(); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	args := []string{"serve", "--root", filepath.Join(dir, "root"), "--listen", s.addr, "--log-level", "error"}
	if !open {
		users := filepath.Join(dir, "htpasswd")
		access := filepath.Join(dir, "access.toml")
		text := fmt.Sprintf("[passwords]\nfile = %q\n[tokens]\nlifetime = \"1h\"\n%s%s", users, limits, rules)
		err := errors.Join(os.WriteFile(users, []byte("honest:"+hash+"\nmallory:"+hash+"\n"), 0o600), os.WriteFile(access, []byte(text), 0o600))
		if err != nil {
			return nil, fmt.Errorf("bench: %w", err)
		}
		args = append(args, "--access", access)
	}
	if s.log, err = os.Create(filepath.Join(dir, "log")); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	s.cmd = exec.Command("nice", append([]string{"-n", "10", foil}, args...)...)
	s.cmd.Stdout, s.cmd.Stderr = s.log, s.log
	if err := s.cmd.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("bench: start foil serve: %w", err), s.log.Close())
	}
	if err := s.ready(ctx); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	if !open {
		if s.token, err = s.login(ctx, "honest"); err != nil {
			return nil, errors.Join(err, s.stop())
		}
	}
	return s, nil
}

func (s *server) ready(ctx context.Context) error {
	for deadline := time.Now().Add(time.Minute); ; {
		res, err := s.client.Get("http://" + s.addr + "/healthz")
		if err == nil {
			res.Body.Close()
			return nil
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			text, _ := os.ReadFile(s.log.Name())
			return fmt.Errorf("bench: foil serve does not answer: %w\n%s", err, text)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (s *server) stop() error {
	defer s.log.Close()
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("bench: %w", err)
	}
	_ = s.cmd.Wait() // it ends by the signal, or has failed, which its answers have told
	return nil
}

// send sends a request, with a token if it is not empty, and returns what came.
func (s *server) send(ctx context.Context, c *http.Client, token, method, path, mediaType string, body []byte) (int, []byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+s.addr+path, bytes.NewReader(body))
	if err != nil {
		return 0, nil, fmt.Errorf("bench: %w", err)
	}
	req.Header.Set("Content-Type", mediaType)
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	res, err := c.Do(req)
	if err != nil {
		return 0, nil, fmt.Errorf("bench: %w", err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		return 0, nil, fmt.Errorf("bench: %w", err)
	}
	return res.StatusCode, b, nil
}

// must is send that wants one status.
func (s *server) must(ctx context.Context, status int, token, method, path, mediaType string, body []byte) ([]byte, error) {
	got, b, err := s.send(ctx, s.client, token, method, path, mediaType, body)
	if err == nil && got != status {
		err = fmt.Errorf("bench: %s %s: status %d, want %d: %.200s", method, path, got, status, b)
	}
	return b, err
}

func (s *server) login(ctx context.Context, user string) (string, error) {
	form := "grant_type=password&service=foil&username=" + user + "&password=" + password
	b, err := s.must(ctx, http.StatusOK, "", "POST", "/token", "application/x-www-form-urlencoded", []byte(form))
	if err != nil {
		return "", err
	}
	var got struct {
		Token string `json:"token"`
	}
	if err := json.Unmarshal(b, &got); err != nil || got.Token == "" {
		return "", fmt.Errorf("bench: no token: %s", b)
	}
	return got.Token, nil
}

// blob pushes one, and says where it is.
func (s *server) blob(ctx context.Context, token, repository string, b []byte) (ocispec.Descriptor, error) {
	d := ocispec.Descriptor{MediaType: "application/octet-stream", Digest: digest.FromBytes(b), Size: int64(len(b))}
	_, err := s.must(ctx, http.StatusCreated, token, "POST", "/v2/"+repository+"/blobs/uploads/?digest="+d.Digest.String(), "application/octet-stream", b)
	return d, err
}

// artifact pushes a manifest of blobs that are no image, tagged 1, and returns what it is.
func (s *server) artifact(ctx context.Context, token, repository string, subject *ocispec.Descriptor, note string, blobs ...[]byte) (ocispec.Manifest, ocispec.Descriptor, error) {
	m := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest, ArtifactType: "application/x.bench", Subject: subject,
		Config: ocispec.DescriptorEmptyJSON, Layers: []ocispec.Descriptor{}}
	if note != "" {
		m.Annotations = map[string]string{"note": note}
	}
	config, err := s.blob(ctx, token, repository, []byte("{}"))
	if err != nil {
		return m, config, err
	}
	for _, b := range blobs {
		d, err := s.blob(ctx, token, repository, b)
		if err != nil {
			return m, d, err
		}
		m.Layers = append(m.Layers, d)
	}
	text, err := json.Marshal(m)
	if err != nil {
		return m, config, fmt.Errorf("bench: %w", err)
	}
	d := ocispec.Descriptor{MediaType: m.MediaType, Digest: digest.FromBytes(text), Size: int64(len(text))}
	reference := "1"
	if subject != nil {
		reference = d.Digest.String()
	}
	_, err = s.must(ctx, http.StatusCreated, token, "PUT", "/v2/"+repository+"/manifests/"+reference, m.MediaType, text)
	return m, d, err
}

// noise is n bytes that nothing compresses.
func noise(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

// usage is what a server has used.
type usage struct {
	cpu         time.Duration
	memory      int64 // bytes, resident
	descriptors int
}

// use reads it.
func (s *server) use() (u usage, err error) {
	pid := s.cmd.Process.Pid
	// The clock of another process's processor time (clock_getcpuclockid(3)), which is finer than /proc.
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|2), &ts); err != nil {
		return u, fmt.Errorf("bench: processor time of foil serve: %w", err)
	}
	u.cpu = time.Duration(ts.Nano())
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return u, fmt.Errorf("bench: %w", err)
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			if _, err := fmt.Sscan(rest, &u.memory); err != nil {
				return u, fmt.Errorf("bench: %q: %w", line, err)
			}
			u.memory <<= 10
		}
	}
	open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	u.descriptors = len(open)
	if err != nil {
		err = fmt.Errorf("bench: %w", err)
	}
	return u, err
}
