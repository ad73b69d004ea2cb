package clients

import (
	"cmp"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
)

// way is one to log in.
type way struct {
	name, subject string
	// at makes the registry to log in at, and what is shown there.
	at func(t *testing.T, ca *authority, c client) (*registry, shown)
}

// shown is what a client has to show: a name and a password, an identity token in their place, or a certificate.
type shown struct {
	user, password string
	identity       string
	cert, key      string
}

const annsPassword = "s3cret-Pa55"

// mayAll is the rule for one subject.
func mayAll(subject string) string {
	return fmt.Sprintf("[[rule]]\nto = [%q]\nallow = [\"pull\", \"push\", \"delete\"]\nrepositories = [\"team/**\"]\n", subject)
}

func passwords(t *testing.T) string {
	t.Helper()
	return fmt.Sprintf("[passwords]\nfile = %q\n", write(t, filepath.Join(t.TempDir(), "htpasswd"), lineOf(t, "ann", annsPassword)))
}

var ways = []way{
	{"password", "user:ann", func(t *testing.T, ca *authority, c client) (*registry, shown) {
		return newRegistry(t, ca, passwords(t)+mayAll("user:ann")), shown{user: "ann", password: annsPassword}
	}},
	{"identity token", "user:ann", func(t *testing.T, ca *authority, c client) (*registry, shown) {
		r := newRegistry(t, ca, passwords(t)+mayAll("user:ann"))
		status, body := r.ask("GET", "/token?service=foil&offline_token=true", "ann", annsPassword, nil)
		return r, shown{identity: readTokens(t, status, body).Refresh}
	}},
	{"oidc", "corp:kilgore@kilgore.trout", func(t *testing.T, ca *authority, c client) (*registry, shown) {
		d := newDex(t, "1h")
		return newRegistry(t, ca, d.issuer()+mayAll("group:corp:authors")), shown{user: "oidc", password: d.author("registry")}
	}},
	{"external tokens", "token:ann", func(t *testing.T, ca *authority, c client) (*registry, shown) {
		s := newTokenService(t, ca, cmp.Or(c.realm, "127.0.0.1"), map[string]string{"ann": annsPassword})
		return newRegistry(t, ca, fmt.Sprintf("[external-tokens]\nurl = %q\nservice = %q\nissuer = %q\nkeys = %q\n", s.url, externalService, externalIssuer, s.keys)+mayAll("token:ann")),
			shown{user: "ann", password: annsPassword}
	}},
	{"certificate", "cert:ann", func(t *testing.T, ca *authority, c client) (*registry, shown) {
		r := newRegistry(t, ca, fmt.Sprintf("[certificates]\nca = %q\n", ca.file)+mayAll("cert:ann"))
		var s shown
		s.cert, s.key = ca.pair(t.TempDir(), "ann")
		return r, s
	}},
}

// session is one client at one registry.
type session struct {
	*registry
	t       *testing.T
	program string
	dir     string // of its own
	env     []string
	shown
	from  string // an OCI layout
	image digest.Digest
}

// repo is where a session pushes to; another one of its own is repo(2).
func (s *session) repo(n int) string {
	return fmt.Sprintf("team/%s/%d", strings.ToLower(filepath.Base(s.program)), n)
}

// ref names an image in it.
func (s *session) ref(n int, tag string) string { return s.Addr() + "/" + s.repo(n) + ":" + tag }

// do runs the client, which must succeed.
func (s *session) do(args ...string) string {
	s.t.Helper()
	out, err := run(s.t.Context(), s.dir, s.env, s.program, args...)
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

// fails runs the client, which must not succeed, and must say something.
func (s *session) fails(want string, args ...string) {
	s.t.Helper()
	out, err := run(s.t.Context(), s.dir, s.env, s.program, args...)
	if err == nil || !strings.Contains(strings.ToLower(out), want) {
		s.t.Errorf("%s: %v, want %q\n%s", args[0], err, want, out)
	}
}

// login is by the client's own command, or by what it keeps of an identity token. Some keep what they are told and
// ask nobody.
func (s *session) login(asks bool, args ...string) {
	s.t.Helper()
	switch {
	case s.identity != "":
		b, err := json.Marshal(map[string]any{"auths": map[string]any{s.Addr(): map[string]string{
			"auth": base64.StdEncoding.EncodeToString([]byte("<token>:")), "identitytoken": s.identity}}})
		if err != nil {
			s.t.Fatal(err)
		}
		write(s.t, filepath.Join(s.dir, "config.json"), string(b))
	case s.user != "":
		if asks {
			s.fails("", append(args, "-u", s.user, "-p", "wrong", s.Addr())...)
		}
		s.do(append(args, "-u", s.user, "-p", s.password, s.Addr())...)
	}
}

// flags are for a certificate, if one is shown.
func (s *session) flags(cert, key string) []string {
	if s.cert == "" {
		return nil
	}
	return []string{cert, s.cert, key, s.key}
}

// certDir is a directory as docker has it in certs.d.
func (s *session) certDir() string {
	s.t.Helper()
	if s.cert == "" {
		return ""
	}
	dir := filepath.Join(s.dir, "certs")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		s.t.Fatal(err)
	}
	for name, from := range map[string]string{"client.cert": s.cert, "client.key": s.key, "ca.crt": s.ca.file} {
		b, err := os.ReadFile(from)
		if err != nil {
			s.t.Fatal(err)
		}
		write(s.t, filepath.Join(dir, name), string(b))
	}
	return dir
}

// has checks a list of what there is.
func (s *session) has(what, out string, names ...string) {
	s.t.Helper()
	for _, n := range names {
		if !strings.Contains(out, n) {
			s.t.Errorf("%s: %s is missing in\n%s", what, n, out)
		}
	}
}

// is checks an image that came back as a layout.
func (s *session) is(dir string) {
	s.t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "index.json"))
	if err != nil || !strings.Contains(string(b), s.image.String()) {
		s.t.Errorf("what came back is not %s: %v\n%s", s.image, err, b)
	}
	want, err := os.ReadDir(filepath.Join(s.from, "blobs", "sha256"))
	if err != nil {
		s.t.Fatal(err)
	}
	for _, e := range want {
		b, err := os.ReadFile(filepath.Join(dir, "blobs", "sha256", e.Name()))
		if err != nil || digest.FromBytes(b).Encoded() != e.Name() {
			s.t.Errorf("blob %s: %v", e.Name(), err)
		}
	}
}

// mounted checks that layers of the second repository were mounted: some clients push configs anew.
func (s *session) mounted() {
	s.t.Helper()
	if n := strings.Count(s.log.String(), "method=POST path=/v2/"+s.repo(2)+"/blobs/uploads/ status=201"); n < 2 {
		s.t.Errorf("%d of its layers were mounted from the first repository, want 2", n)
	}
}

// client is a program, and what it is to do.
type client struct {
	name string
	// realm is where it is sent for external tokens, 127.0.0.1 if empty. Programs differ in what they fear of a registry
	// that sends them to a private address.
	realm   string
	without map[string]string // ways that it does not know, and why
	use     func(*session)
}

var clients = []client{
	{"skopeo", "", nil, func(s *session) {
		var dest, src, only []string
		if dir := s.certDir(); dir != "" {
			dest, src, only = []string{"--dest-cert-dir", dir}, []string{"--src-cert-dir", dir}, []string{"--cert-dir", dir}
		}
		s.login(true, "login")
		cmd := func(name string, flags []string, args ...string) string {
			return s.do(append(append([]string{name}, flags...), args...)...)
		}
		cmd("copy", dest, "oci:"+s.from+":latest", "docker://"+s.ref(1, "a"))
		cmd("copy", src, "docker://"+s.ref(1, "a"), "oci:"+filepath.Join(s.dir, "back")+":latest")
		s.is(filepath.Join(s.dir, "back"))
		s.has("tags", cmd("list-tags", only, "docker://"+s.Addr()+"/"+s.repo(1)), `"a"`)
		cmd("copy", append(src, dest...), "docker://"+s.ref(1, "a"), "docker://"+s.ref(2, "a"))
		s.mounted()
		cmd("delete", only, "docker://"+s.ref(2, "a"))
		s.fails("", append(append([]string{"inspect"}, only...), "docker://"+s.ref(2, "a"))...)
		s.fails("unauthorized", "inspect", "--no-creds", "docker://"+s.ref(1, "a"))
	}},
	{"podman", "", nil, func(s *session) {
		if os.Geteuid() != 0 {
			s.t.Skip("podman wants root here")
		}
		all := func(args ...string) []string {
			args = append([]string{"--root", filepath.Join(s.dir, "root"), "--runroot", filepath.Join(s.dir, "run"), "--storage-driver", "vfs", "--events-backend", "none",
				"--cgroup-manager", "cgroupfs", "--tmpdir", filepath.Join(s.dir, "tmp")}, args...)
			return args
		}
		with := func(args ...string) []string {
			if dir := s.certDir(); dir != "" {
				args = append(args[:1:1], append([]string{"--cert-dir", dir}, args[1:]...)...)
			}
			return all(args...)
		}
		s.login(true, all("login")...)
		s.do(all("pull", "oci:"+s.from)...)
		id := strings.TrimSpace(s.do(all("images", "--quiet", "--no-trunc")...))
		s.do(with("push", id, "docker://"+s.ref(1, "a"))...)
		s.do(all("rmi", "--all", "--force")...)
		s.do(with("pull", s.ref(1, "a"))...)
		if again := strings.TrimSpace(s.do(all("images", "--quiet", "--no-trunc")...)); again != id {
			s.t.Errorf("pushed %s, pulled %s", id, again)
		}
		if s.cert == "" { // search has no flag for one
			s.has("tags", s.do(all("search", "--list-tags", s.Addr()+"/"+s.repo(1))...), "a")
		}
		s.do(with("push", id, "docker://"+s.ref(2, "a"))...)
		s.do(all("rmi", "--all", "--force")...)
	}},
	{"docker", "", nil, func(s *session) {
		at := []string{"--host", startDocker(s)}
		cmd := func(args ...string) string { return strings.TrimSpace(s.do(append(at[:2:2], args...)...)) }
		s.login(true, append(at, "login")...)
		// One layer that is imported, and one that a container has written.
		tree := layertest.Layer{layertest.File("file", 0o644, strings.Repeat("docker", 20_000))}
		cmd("import", write(s.t, filepath.Join(s.dir, "tree.tar"), string(tree.TarBytes(s.t))), "base")
		made := cmd("create", "--network", "none", "base", "/file")
		cmd("cp", filepath.Join(s.from, "index.json"), made+":/")
		id := cmd("commit", made, s.ref(1, "a"))
		cmd("rm", made)
		cmd("tag", s.ref(1, "a"), s.ref(2, "a"))
		cmd("push", s.ref(1, "a"))
		cmd("push", s.ref(2, "a"))
		s.mounted()
		cmd("rmi", "base", s.ref(1, "a"), s.ref(2, "a"))
		nobody := filepath.Join(s.dir, "nobody")
		if s.cert == "" { // whose is shown by the daemon, whoever asks it
			s.fails("", append(at, "--config", nobody, "pull", s.ref(2, "a"))...)
		}
		cmd("pull", s.ref(2, "a"))
		if again := cmd("images", "--quiet", "--no-trunc"); again != id {
			s.t.Errorf("pushed %s, pulled %s", id, again)
		}
		if s.cert == "" {
			cmd("logout", s.Addr())
			s.fails("", append(at, "pull", s.ref(1, "a"))...)
		}
	}},
	{"crane", "localhost", map[string]string{"certificate": "crane has no flags for one"}, func(s *session) {
		s.login(false, "auth", "login")
		s.do("push", s.from, s.ref(1, "a"))
		s.do("pull", "--format", "oci", s.ref(1, "a"), "back")
		s.is(filepath.Join(s.dir, "back"))
		s.has("tags", s.do("ls", s.Addr()+"/"+s.repo(1)), "a")
		s.do("copy", s.ref(1, "a"), s.ref(2, "a"))
		s.mounted()
		s.has("digest", s.do("digest", s.ref(2, "a")), s.image.String())
		s.do("delete", s.Addr()+"/"+s.repo(2)+"@"+s.image.String())
		s.fails("manifest_unknown", "manifest", s.ref(2, "a"))
		s.has("catalog", s.do("catalog", s.Addr()), s.repo(1))
	}},
	{"oras", "", nil, func(s *session) {
		with := func(args ...string) []string {
			args = append(args, "--ca-file", s.ca.file)
			return append(args, s.flags("--cert-file", "--key-file")...)
		}
		// copy has its flags twice, once for each side.
		both := func(args ...string) []string {
			for _, side := range []string{"from", "to"} {
				if s.cert != "" {
					args = append(args, "--"+side+"-cert-file", s.cert, "--"+side+"-key-file", s.key)
				}
				args = append(args, "--"+side+"-ca-file", s.ca.file)
			}
			return args
		}
		s.login(true, "login", "--ca-file", s.ca.file)
		to := []string{"copy", "--from-oci-layout", s.from + ":latest", s.ref(1, "a"), "--to-ca-file", s.ca.file}
		s.do(append(to, s.flags("--to-cert-file", "--to-key-file")...)...)
		back := []string{"copy", "--to-oci-layout", s.ref(1, "a"), "back:latest", "--from-ca-file", s.ca.file}
		s.do(append(back, s.flags("--from-cert-file", "--from-key-file")...)...)
		s.is(filepath.Join(s.dir, "back"))
		s.has("tags", s.do(with("repo", "tags", s.Addr()+"/"+s.repo(1))...), "a")
		write(s.t, filepath.Join(s.dir, "note.txt"), "a note")
		s.do(with("attach", "--artifact-type", "text/note", s.ref(1, "a"), "note.txt")...)
		s.has("referrers", s.do(with("discover", s.ref(1, "a"))...), "text/note")
		s.do(both("copy", s.ref(1, "a"), s.ref(2, "a"))...)
		s.mounted()
		s.do(with("manifest", "delete", "--force", s.ref(2, "a"))...)
		s.fails("not found", with("manifest", "fetch", s.ref(2, "a"))...)
		s.has("repositories", s.do(with("repo", "ls", s.Addr())...), s.repo(1))
	}},
	{"cosign", "localhost", nil, func(s *session) {
		s.env = append(s.env, "COSIGN_PASSWORD=")
		with := func(args ...string) []string {
			return append(args, s.flags("--registry-client-cert", "--registry-client-key")...)
		}
		s.push()
		s.login(false, "login")
		s.do("generate-key-pair")
		at := s.Addr() + "/" + s.repo(1) + "@" + s.image.String()
		s.fails("no signatures found", with("verify", "--insecure-ignore-tlog", "--key", "cosign.pub", at)...)
		// Nothing is asked of a transparency log, or of others at all.
		s.do(with("sign", "--key", "cosign.key", "--use-signing-config=false", "--tlog-upload=false", "--new-bundle-format=true", "--yes", at)...)
		s.has("signature", s.do(with("verify", "--insecure-ignore-tlog", "--key", "cosign.pub", at)...), s.image.String())
		s.referred()
		s.do("generate-key-pair", "--output-key-prefix", "other")
		s.fails("", with("verify", "--insecure-ignore-tlog", "--key", "other.pub", at)...)
	}},
	{"ctr", "", map[string]string{"identity token": "ctr takes a name and a password only"}, func(s *session) {
		c := startContainerd(s)
		flags := []string{"--hosts-dir", c.hosts}
		if s.user != "" {
			flags = append(flags, "--user", s.user+":"+s.password)
		}
		images := func(name string, args ...string) string {
			return s.do(append(append([]string{"--address", c.socket, "images", name}, flags...), args...)...)
		}
		s.push()
		if s.user != "" {
			s.fails("unauthorized", "--address", c.socket, "images", "pull", "--hosts-dir", c.hosts, "--user", s.user+":wrong", "--snapshotter", "native", s.ref(1, "a"))
		}
		images("pull", "--snapshotter", "native", s.ref(1, "a"))
		s.has("images", s.do("--address", c.socket, "images", "ls"), s.image.String())
		s.do("--address", c.socket, "images", "tag", s.ref(1, "a"), s.ref(2, "a"))
		images("push", s.ref(2, "a"))
		s.do("--address", c.socket, "images", "rm", "--sync", s.ref(1, "a"), s.ref(2, "a"))
		images("pull", "--snapshotter", "native", s.ref(2, "a"))
	}},
}

// referred checks that signatures are found as what refers to the image, not as a tag.
func (s *session) referred() {
	s.t.Helper()
	log := s.log.String()
	if !strings.Contains(log, "path=/v2/"+s.repo(1)+"/referrers/"+s.image.String()) {
		s.t.Error("nobody asked what refers to the image")
	}
	if strings.Contains(log, "manifests/sha256-"+s.image.Encoded()+" status=201") {
		s.t.Error("the signature was pushed as a tag")
	}
}

// push pushes the image as any client would, for one that does not push layouts.
func (s *session) push() {
	s.t.Helper()
	c := s.ca.client()
	if s.cert != "" {
		pair, err := tls.LoadX509KeyPair(s.cert, s.key)
		if err != nil {
			s.t.Fatal(err)
		}
		c.Transport.(*http.Transport).TLSClientConfig.Certificates = []tls.Certificate{pair}
	}
	send := func(method, path, mediaType string, body []byte, want int) {
		s.t.Helper()
		req, err := http.NewRequestWithContext(s.t.Context(), method, "https://"+s.Addr()+path, strings.NewReader(string(body)))
		if err != nil {
			s.t.Fatal(err)
		}
		req.Header.Set("Content-Type", mediaType)
		if token := s.token(c); token != "" {
			req.Header.Set("Authorization", "Bearer "+token)
		}
		res, err := c.Do(req)
		if err != nil {
			s.t.Fatal(err)
		}
		defer res.Body.Close()
		if res.StatusCode != want {
			s.t.Fatalf("%s %s: %s", method, path, res.Status)
		}
	}
	entries, err := os.ReadDir(filepath.Join(s.from, "blobs", "sha256"))
	if err != nil {
		s.t.Fatal(err)
	}
	var manifest []byte
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(s.from, "blobs", "sha256", e.Name()))
		if err != nil {
			s.t.Fatal(err)
		}
		if e.Name() == s.image.Encoded() {
			manifest = b
			continue
		}
		send("POST", "/v2/"+s.repo(1)+"/blobs/uploads/?digest=sha256:"+e.Name(), "application/octet-stream", b, http.StatusCreated)
	}
	send("PUT", "/v2/"+s.repo(1)+"/manifests/a", "application/vnd.oci.image.manifest.v1+json", manifest, http.StatusCreated)
}

// token is what the session's credentials bring, as the registry's challenge says.
func (s *session) token(c *http.Client) string {
	s.t.Helper()
	if s.cert != "" {
		return ""
	}
	res, err := c.Get("https://" + s.Addr() + "/v2/")
	if err != nil {
		s.t.Fatal(err)
	}
	res.Body.Close()
	_, realm, _ := strings.Cut(res.Header.Get("Www-Authenticate"), `realm="`)
	realm, rest, _ := strings.Cut(realm, `"`)
	_, service, _ := strings.Cut(rest, `service="`)
	service, _, _ = strings.Cut(service, `"`)
	form := url.Values{"service": {service}, "scope": {"repository:" + s.repo(1) + ":pull,push"}, "grant_type": {"password"}, "username": {s.user}, "password": {s.password}}
	if s.identity != "" {
		form.Set("grant_type", "refresh_token")
		form.Set("refresh_token", s.identity)
	}
	if res, err = c.PostForm(realm, form); err != nil {
		s.t.Fatal(err)
	}
	defer res.Body.Close()
	var got tokens
	if err := json.NewDecoder(res.Body).Decode(&got); err != nil {
		s.t.Fatalf("token: %s, %v", res.Status, err)
	}
	return got.Access
}

// shortDir is a directory for sockets, whose paths have 108 bytes, and for podman, which takes 50, in lower case.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "foil-clients")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// Each client logs in by each way that it knows, and does there what it can do. The server has known it by that way.
func TestClients(t *testing.T) {
	for _, c := range clients {
		t.Run(c.name, func(t *testing.T) {
			path := program(t, c.name)
			if c.name == "docker" && !ownNetwork(t) {
				return
			}
			for _, w := range ways {
				t.Run(w.name, func(t *testing.T) {
					if why := c.without[w.name]; why != "" {
						t.Skip(why)
					}
					ca := newAuthority(t)
					r, shown := w.at(t, ca, c)
					dir := shortDir(t)
					s := &session{registry: r, t: t, program: path, dir: dir, shown: shown, from: filepath.Join(dir, "layout"),
						env: []string{"HOME=" + dir, "DOCKER_CONFIG=" + dir, "REGISTRY_AUTH_FILE=" + filepath.Join(dir, "config.json"), "SSL_CERT_FILE=" + ca.file, "XDG_RUNTIME_DIR=" + dir}}
					write(t, filepath.Join(dir, "config.json"), "{}") // podman wants it to be there
					s.image = layout(t, s.from, c.name+w.name)
					c.use(s)
					for n := range 2 {
						who := r.subjects(s.repo(n + 1))
						if n == 0 && len(who) == 0 || len(who) > 1 || len(who) == 1 && !who[w.subject] {
							t.Errorf("%s was used by %v, want %s", s.repo(n+1), who, w.subject)
						}
					}
					for _, secret := range []string{annsPassword, "Pa55"} {
						if strings.Contains(r.log.String()+r.audit.String(), secret) {
							t.Error("a log has the password")
						}
					}
				})
			}
		})
	}
}

// startDocker starts a daemon for docker, and returns where it listens. It takes certificates from a directory of the
// system's, and has a mount namespace with one of its own there; of the host's network it changes nothing.
func startDocker(s *session) string {
	t := s.t
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("docker's daemon wants root")
	}
	daemon := program(t, "dockerd")
	dir := shortDir(t)
	socket := "unix://" + filepath.Join(dir, "sock")
	certs := s.certDir()
	if certs == "" {
		certs = filepath.Join(s.dir, "certs")
		ca, err := os.ReadFile(s.ca.file)
		if err := errors.Join(err, os.MkdirAll(certs, 0o700)); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(certs, "ca.crt"), string(ca))
	}
	if err := os.MkdirAll("/etc/docker", 0o755); err != nil {
		t.Fatal(err)
	}
	script := fmt.Sprintf(`set -e
mount -t tmpfs tmpfs /etc/docker
mkdir -p /etc/docker/certs.d
cp -r %s /etc/docker/certs.d/%s
exec %s --host %s --data-root %s/data --exec-root %s/exec --pidfile %s/pid --storage-driver vfs \
	--bridge none --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false`, certs, s.Addr(), daemon, socket, dir, dir, dir)
	cmd := exec.Command("unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script)
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	cmd.Env = append(os.Environ(), s.env...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	eventually(t, "docker answers", func() error {
		_, err := run(t.Context(), dir, s.env, s.program, "--host", socket, "version")
		return err
	})
	return socket
}

// proxy shows a registry a certificate, or a token that an identity token brings, for whoever asks it, and returns where.
func (s shown) proxy(t *testing.T, r *registry) (address string) {
	t.Helper()
	transport := r.ca.client().Transport.(*http.Transport)
	if s.cert != "" {
		pair, err := tls.LoadX509KeyPair(s.cert, s.key)
		if err != nil {
			t.Fatal(err)
		}
		transport.TLSClientConfig.Certificates = []tls.Certificate{pair}
	}
	bearer := func() string {
		status, body := r.ask("POST", "/token", "", "", url.Values{"grant_type": {"refresh_token"}, "refresh_token": {s.identity}, "service": {"foil"}})
		return readTokens(t, status, body).Access
	}
	p := httptest.NewServer(&httputil.ReverseProxy{Transport: transport, Rewrite: func(req *httputil.ProxyRequest) {
		req.SetURL(&url.URL{Scheme: "https", Host: r.Addr()})
		if s.identity != "" {
			req.Out.Header.Set("Authorization", "Bearer "+bearer())
		}
	}})
	t.Cleanup(p.Close)
	return strings.TrimPrefix(p.URL, "http://")
}

// containerd is one with ctr, without CRI.
type containerd struct{ socket, hosts string }

func startContainerd(s *session) containerd {
	t := s.t
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("containerd wants root")
	}
	daemon := program(t, "containerd")
	dir := shortDir(t)
	c := containerd{socket: filepath.Join(dir, "sock"), hosts: filepath.Join(dir, "hosts")}
	at := filepath.Join(c.hosts, s.Addr())
	if err := os.MkdirAll(at, 0o700); err != nil {
		t.Fatal(err)
	}
	hosts := fmt.Sprintf("server = \"https://%s\"\n[host.\"https://%s\"]\ncapabilities = [\"pull\", \"resolve\", \"push\"]\nca = %q\n", s.Addr(), s.Addr(), s.ca.file)
	if s.cert != "" {
		hosts += fmt.Sprintf("client = [[%q, %q]]\n", s.cert, s.key)
	}
	write(t, filepath.Join(at, "hosts.toml"), hosts)
	config := write(t, filepath.Join(dir, "config.toml"), fmt.Sprintf(`version = 2
root = %q
state = %q
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs"]
[grpc]
address = %q
[ttrpc]
address = %q
`, filepath.Join(dir, "root"), filepath.Join(dir, "state"), c.socket, c.socket+".ttrpc"))
	cmd := exec.Command(daemon, "--config", config, "--log-level", "warn")
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	cmd.Env = append(os.Environ(), s.env...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		var exit *exec.ExitError
		if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
			t.Error(err)
		}
	})
	eventually(t, "containerd answers", func() error {
		_, err := run(t.Context(), dir, s.env, s.program, "--address", c.socket, "version")
		return err
	})
	return c
}

// The conformance program logs in by each way. It takes a name and a password only: what else is shown a proxy shows for it.
func TestConformance(t *testing.T) {
	path := os.Getenv("FOIL_TEST_CONFORMANCE")
	if path == "" {
		t.Skip("FOIL_TEST_CONFORMANCE does not name the conformance program of the distribution-spec, as that of tools/conformance")
	}
	anonymous := way{"anonymous", "anonymous", func(t *testing.T, ca *authority, c client) (*registry, shown) {
		return newRegistry(t, ca, mayAll("everyone")), shown{}
	}}
	for _, w := range append(ways[:len(ways):len(ways)], anonymous) {
		t.Run(w.name, func(t *testing.T) {
			ca := newAuthority(t)
			r, shown := w.at(t, ca, client{})
			dir := t.TempDir()
			env := []string{"SSL_CERT_FILE=" + ca.file, "OCI_VERSION=1.1", "OCI_RESULTS_DIR=" + dir, "OCI_REPO1=team/conformance/1", "OCI_REPO2=team/conformance/2"}
			if shown.identity != "" || shown.cert != "" {
				env = append(env, "OCI_TLS=disabled", "OCI_REGISTRY="+shown.proxy(t, r))
			} else {
				env = append(env, "OCI_TLS=enabled", "OCI_REGISTRY="+r.Addr(), "OCI_USERNAME="+shown.user, "OCI_PASSWORD="+shown.password)
			}
			out, err := run(t.Context(), dir, env, path)
			if err != nil {
				t.Fatal(err)
			}
			t.Log(out)
			if who := r.subjects("team/conformance/1"); len(who) != 1 || !who[w.subject] {
				t.Errorf("it was used by %v, want %s", who, w.subject)
			}
		})
	}
}
