package registry_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/opencontainers/go-digest"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/server/objects/objectstest"
	"hydrofoil.dev/foil/internal/server/registry"
)

func withDigest(location string, d digest.Digest) string {
	sep := "?"
	if strings.Contains(location, "?") {
		sep = "&"
	}
	return location + sep + "digest=" + url.QueryEscape(d.String())
}

func chunk(first, end int) string { return fmt.Sprintf("%d-%d", first, end-1) }

// Every way to push a blob, for every algorithm, said beforehand or not.
func TestPush(t *testing.T) {
	b := random(100_000)
	reader := func() io.Reader { return bytes.NewReader(b) }
	// unsized hides the length: the body is chunked.
	unsized := func(b []byte) io.Reader { return io.MultiReader(bytes.NewReader(b)) }
	ways := map[string]func(f *fixture, begin string, d digest.Digest) answer{
		"post": func(f *fixture, begin string, d digest.Digest) answer {
			return f.do("POST", withDigest(begin, d), reader())
		},
		"post unsized": func(f *fixture, begin string, d digest.Digest) answer {
			return f.do("POST", withDigest(begin, d), unsized(b))
		},
		"post, put": func(f *fixture, begin string, d digest.Digest) answer {
			l := f.do("POST", begin, nil).Header.Get("Location")
			return f.do("PUT", withDigest(l, d), reader(), "Content-Type", "application/octet-stream")
		},
		"stream": func(f *fixture, begin string, d digest.Digest) answer {
			l := f.do("POST", begin, nil).Header.Get("Location")
			a := f.do("PATCH", l, unsized(b))
			f.want("patch", a, http.StatusAccepted)
			if got := a.Header.Get("Range"); got != "0-99999" {
				f.t.Errorf("range %q after the patch", got)
			}
			return f.do("PUT", withDigest(a.Header.Get("Location"), d), nil)
		},
		"chunks": func(f *fixture, begin string, d digest.Digest) answer {
			l := f.do("POST", begin, nil).Header.Get("Location")
			for i := 0; i < len(b); i += 30_000 {
				end := min(i+30_000, len(b))
				a := f.do("PATCH", l, bytes.NewReader(b[i:end]), "Content-Range", chunk(i, end))
				f.want("chunk", a, http.StatusAccepted)
				if got, want := a.Header.Get("Range"), fmt.Sprintf("0-%d", end-1); got != want {
					f.t.Errorf("range %q after the chunk, want %q", got, want)
				}
				l = a.Header.Get("Location")
			}
			return f.do("PUT", withDigest(l, d), nil)
		},
		"chunks, the last with put": func(f *fixture, begin string, d digest.Digest) answer {
			l := f.do("POST", begin, nil).Header.Get("Location")
			a := f.do("PATCH", l, unsized(b[:60_000]), "Content-Range", chunk(0, 60_000))
			f.want("chunk", a, http.StatusAccepted)
			return f.do("PUT", withDigest(l, d), bytes.NewReader(b[60_000:]), "Content-Range", chunk(60_000, len(b)))
		},
		"parts without ranges": func(f *fixture, begin string, d digest.Digest) answer {
			l := f.do("POST", begin, nil).Header.Get("Location")
			f.want("part", f.do("PATCH", l, bytes.NewReader(b[:1])), http.StatusAccepted)
			f.want("part", f.do("PATCH", l, unsized(b[1:50_000])), http.StatusAccepted)
			return f.do("PUT", withDigest(l, d), unsized(b[50_000:]))
		},
	}
	f := newFixture(t, registry.Options{})
	for name, push := range ways {
		for _, alg := range []digest.Algorithm{digest.SHA256, digest.SHA512} {
			for query, repo := range map[string]string{"": "plain", "?digest-algorithm=" + alg.String(): "said"} {
				repo := fmt.Sprintf("%s/%s/%s", strings.NewReplacer(" ", "-", ",", "").Replace(name), alg, repo)
				t.Run(repo, func(t *testing.T) {
					f.t = t
					d := alg.FromBytes(b)
					a := push(f, "/v2/"+repo+"/blobs/uploads/"+query, d)
					f.want("the last request", a, http.StatusCreated)
					if got := a.Header.Get("Docker-Content-Digest"); got != d.String() {
						t.Errorf("digest %q, want %s", got, d)
					}
					if got, want := a.Header.Get("Location"), "/v2/"+repo+"/blobs/"+d.String(); got != want {
						t.Errorf("location %q, want %q", got, want)
					}
					f.wantBlob(repo, d, b)
					f.wantUploads(0)
				})
			}
		}
	}
	f.t = t
	f.wantKeys(digest.SHA256.FromBytes(b), digest.SHA512.FromBytes(b))
}

// What is pulled is what was pushed, in whatever pieces it came, and whenever
// the registry was restarted in between.
func TestPushProperty(t *testing.T) {
	f := newFixture(t, registry.Options{})
	rapid.Check(t, func(rt *rapid.T) {
		b := rapid.SliceOfN(rapid.Byte(), 0, 5000).Draw(rt, "blob")
		alg := rapid.SampledFrom([]digest.Algorithm{digest.SHA256, digest.SHA512}).Draw(rt, "algorithm")
		l := f.begin("r")
		for sent := 0; sent < len(b); {
			end := rapid.IntRange(sent+1, len(b)).Draw(rt, "end")
			f.want("chunk", f.do("PATCH", l, bytes.NewReader(b[sent:end]), "Content-Range", chunk(sent, end)), http.StatusAccepted)
			sent = end
			if rapid.IntRange(0, 9).Draw(rt, "restart") == 0 {
				f.stop()
				f.start()
			}
		}
		d := alg.FromBytes(b)
		f.want("put", f.do("PUT", withDigest(l, d), nil), http.StatusCreated)
		f.wantBlob("r", d, b)
	})
}

func TestOutOfOrder(t *testing.T) {
	f := newFixture(t, registry.Options{})
	b := random(3000)
	l := f.begin("r")
	status := func(want string) {
		t.Helper()
		a := f.do("GET", l, nil)
		f.want("status", a, http.StatusNoContent)
		if got := a.Header.Get("Range"); got != want {
			t.Errorf("range %q, want %q", got, want)
		}
		if got := a.Header.Get("Location"); got != l {
			t.Errorf("location %q, want %q", got, l)
		}
	}
	status("0-0")
	f.want("a chunk ahead", f.do("PATCH", l, bytes.NewReader(b[1000:2000]), "Content-Range", "1000-1999"), 416, "BLOB_UPLOAD_INVALID")
	status("0-0")
	f.want("the first", f.do("PATCH", l, bytes.NewReader(b[:1000]), "Content-Range", "0-999"), http.StatusAccepted)
	a := f.do("PATCH", l, bytes.NewReader(b[:1000]), "Content-Range", "0-999")
	f.want("the first again", a, 416)
	if got := a.Header.Get("Range"); got != "0-999" {
		t.Errorf("range %q with the 416", got)
	}
	d := digest.FromBytes(b)
	f.want("the last too soon", f.do("PUT", withDigest(l, d), bytes.NewReader(b[2000:]), "Content-Range", "2000-2999"), 416)
	status("0-999")
	for header, code := range map[string]string{
		"bytes 1000-1999/3000": "BLOB_UPLOAD_INVALID",
		"1000":                 "BLOB_UPLOAD_INVALID",
		"-1-5":                 "BLOB_UPLOAD_INVALID",
		// More than an int64 has.
		"1000-9999999999999999999": "BLOB_UPLOAD_INVALID",
		"1000-1998":                "SIZE_INVALID",
		"1000-900":                 "SIZE_INVALID",
	} {
		f.want(header, f.do("PATCH", l, bytes.NewReader(b[1000:2000]), "Content-Range", header), 400, code)
	}
	status("0-999")
	// Unsized bodies of another length than the range: less is kept, more is not.
	f.want("less", f.do("PATCH", l, io.MultiReader(bytes.NewReader(b[1000:1500])), "Content-Range", "1000-1999"), 400, "SIZE_INVALID")
	status("0-1499")
	f.want("more", f.do("PATCH", l, io.MultiReader(bytes.NewReader(b[1500:])), "Content-Range", "1500-1999"), 400, "SIZE_INVALID")
	status("0-1999")
	f.want("the last", f.do("PUT", withDigest(l, d), bytes.NewReader(b[2000:]), "Content-Range", "2000-2999"), http.StatusCreated)
	f.wantBlob("r", d, b)
}

func TestWrongDigest(t *testing.T) {
	f := newFixture(t, registry.Options{})
	d := digest.FromString("something else")
	b := random(1000)
	f.want("post", f.do("POST", withDigest("/v2/r/blobs/uploads/", d), bytes.NewReader(b)), 400, "DIGEST_INVALID")
	l := f.begin("r")
	f.want("put", f.do("PUT", withDigest(l, d), bytes.NewReader(b)), 400, "DIGEST_INVALID")
	f.want("the upload", f.do("GET", l, nil), 404, "BLOB_UPLOAD_UNKNOWN")
	l = f.begin("r")
	f.want("patch", f.do("PATCH", l, bytes.NewReader(b)), http.StatusAccepted)
	f.want("put without a digest", f.do("PUT", l, nil), 400, "DIGEST_INVALID")
	f.want("put", f.do("PUT", withDigest(l, digest.SHA512.FromString("x")), nil), 400, "DIGEST_INVALID")
	f.wantUploads(0)
	f.wantKeys()
	f.wantNoBlob("r", d)
}

func TestCancel(t *testing.T) {
	f := newFixture(t, registry.Options{})
	l := f.begin("r")
	f.want("patch", f.do("PATCH", l, bytes.NewReader(random(1000))), http.StatusAccepted)
	other := strings.Replace(l, "/r/", "/s/", 1)
	for _, method := range []string{"GET", "PATCH", "DELETE"} {
		f.want(method+" by another repository", f.do(method, other, nil), 404, "BLOB_UPLOAD_UNKNOWN")
	}
	f.want("cancel", f.do("DELETE", l, nil), http.StatusNoContent)
	f.wantUploads(0)
	for _, method := range []string{"GET", "PATCH", "DELETE"} {
		f.want(method+" after cancel", f.do(method, l, nil), 404, "BLOB_UPLOAD_UNKNOWN")
	}
}

func TestMount(t *testing.T) {
	f := newFixture(t, registry.Options{})
	b := random(1000)
	d := f.push("from", b)
	mount := func(to, query string) answer { return f.do("POST", "/v2/"+to+"/blobs/uploads/?"+query, nil) }
	a := mount("one", "mount="+d.String()+"&from=from")
	f.want("mount", a, http.StatusCreated)
	if got, want := a.Header.Get("Location"), "/v2/one/blobs/"+d.String(); got != want {
		t.Errorf("location %q, want %q", got, want)
	}
	f.wantBlob("one", d, b)
	f.want("mount from anywhere", mount("two", "mount="+d.String()), http.StatusCreated)
	f.wantBlob("two", d, b)
	f.wantUploads(0)
	f.wantKeys(d)

	for _, query := range []string{
		"mount=" + d.String() + "&from=three",
		"mount=" + digest.FromString("x").String() + "&from=from",
		"mount=" + digest.FromString("x").String(),
	} {
		a := mount("four", query)
		f.want(query, a, http.StatusAccepted)
		f.want("put instead", f.do("PUT", withDigest(a.Header.Get("Location"), d), bytes.NewReader(b)), http.StatusCreated)
		f.wantBlob("four", d, b)
		f.want("delete", f.do("DELETE", "/v2/four/blobs/"+d.String(), nil), http.StatusAccepted)
	}
}

// An upload goes on after a restart, and after the machine was restarted, when
// what is known of the digest is worth nothing.
func TestResumeAfterRestart(t *testing.T) {
	b := random(100_000)
	d := digest.FromBytes(b)
	tests := map[string]func(t *testing.T, data, state string){
		"process": func(t *testing.T, data, state string) {},
		"machine": func(t *testing.T, data, state string) {
			s := read(t, state)
			boot := strings.TrimSpace(read(t, "/proc/sys/kernel/random/boot_id"))
			if !strings.Contains(s, boot) {
				t.Fatalf("the state does not name the boot %s: %s", boot, s)
			}
			// Another boot, and a state that is of no use.
			s = strings.Replace(s, boot, "another", 1)
			i := strings.Index(s, `"state":"`) + len(`"state":"`)
			write(t, state, s[:i]+"AAAA"+s[i+4:])
		},
		"machine, and bytes were lost": func(t *testing.T, data, state string) {
			if err := os.Truncate(data, 12_345); err != nil {
				t.Fatal(err)
			}
		},
		"process, in the middle of a chunk": func(t *testing.T, data, state string) {
			// Bytes that came after the state was saved.
			write(t, data, string(b[:70_000]))
		},
	}
	for name, damage := range tests {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, registry.Options{})
			l := f.begin("r")
			f.want("patch", f.do("PATCH", l, bytes.NewReader(b[:60_000])), http.StatusAccepted)
			f.stop()
			base := filepath.Join(f.uploads(), l[strings.LastIndexByte(l, '/')+1:])
			damage(t, base+".data", base+".json")
			f.start()
			a := f.do("GET", l, nil)
			f.want("status", a, http.StatusNoContent)
			var last int
			if _, err := fmt.Sscanf(a.Header.Get("Range"), "0-%d", &last); err != nil {
				t.Fatal(err)
			}
			a = f.do("PATCH", l, bytes.NewReader(b[last+1:]), "Content-Range", chunk(last+1, len(b)))
			f.want("continue", a, http.StatusAccepted)
			f.want("put", f.do("PUT", withDigest(l, d), nil), http.StatusCreated)
			f.wantBlob("r", d, b)
			f.wantUploads(0)
		})
	}
}

// The state of the digest is used: without it each chunk would cost reading
// all chunks before it. Bytes changed behind the registry's back show it.
func TestResumeReadsNothingTwice(t *testing.T) {
	f := newFixture(t, registry.Options{})
	b := random(1000)
	l := f.begin("r")
	f.want("patch", f.do("PATCH", l, bytes.NewReader(b[:500])), http.StatusAccepted)
	f.stop()
	f.start()
	data := filepath.Join(f.uploads(), l[strings.LastIndexByte(l, '/')+1:]+".data")
	write(t, data, strings.Repeat("x", 500))
	f.want("put", f.do("PUT", withDigest(l, digest.FromBytes(b)), bytes.NewReader(b[500:])), http.StatusCreated)
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func write(t *testing.T, path, s string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(s), 0o600); err != nil {
		t.Fatal(err)
	}
}

// A connection that breaks in the middle of a body leaves what came.
func TestResumeAfterBreak(t *testing.T) {
	f := newFixture(t, registry.Options{})
	b := random(200_000)
	for _, how := range []string{"Content-Length: 200000", "Transfer-Encoding: chunked"} {
		l := f.begin("r")
		conn, err := net.Dial("tcp", f.http.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "PATCH %s HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n", l, how)
		for part := range slices.Chunk(b[:150_000], 50_000) {
			if strings.Contains(how, "chunked") {
				part = fmt.Appendf(nil, "%x\r\n%s\r\n", len(part), part)
			}
			if _, err := conn.Write(part); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, "the bytes arrive", func() bool {
			return f.do("GET", l, nil).Header.Get("Range") == "0-149999"
		})
		conn.Close()
		a := f.do("PUT", withDigest(l, digest.FromBytes(b)), bytes.NewReader(b[150_000:]), "Content-Range", chunk(150_000, len(b)))
		f.want("put the rest", a, http.StatusCreated)
		f.wantBlob("r", digest.FromBytes(b), b)
	}
}

// A client whose connection is stuck comes back on another one: it need not
// wait until the server has given up the first.
func TestLastRequestWins(t *testing.T) {
	f := newFixture(t, registry.Options{})
	b := random(1000)
	l := f.begin("r")
	pr, pw := io.Pipe()
	defer pw.Close()
	stuck := make(chan error, 1)
	go func() {
		a, err := f.try("PATCH", l, pr)
		if err == nil && a.StatusCode == http.StatusAccepted {
			err = errors.New("the stuck request was accepted")
		} else {
			err = nil
		}
		stuck <- err
	}()
	if _, err := pw.Write(b[:400]); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the bytes arrive", func() bool { return f.do("GET", l, nil).Header.Get("Range") == "0-399" })
	f.want("patch", f.do("PATCH", l, bytes.NewReader(b[400:]), "Content-Range", "400-999"), http.StatusAccepted)
	pw.Close()
	if err := <-stuck; err != nil {
		t.Error(err)
	}
	f.want("put", f.do("PUT", withDigest(l, digest.FromBytes(b)), nil), http.StatusCreated)
	f.wantBlob("r", digest.FromBytes(b), b)
}

func TestDiskFull(t *testing.T) {
	m := objectstest.NewMemory()
	f := newFixture(t, registry.Options{Store: m})
	m.SetLimit(1000)
	b := random(2000)
	d := digest.FromBytes(b)
	f.want("post", f.do("POST", withDigest("/v2/r/blobs/uploads/", d), bytes.NewReader(b)), http.StatusInsufficientStorage, "INSUFFICIENT_STORAGE")
	l := f.begin("r")
	f.want("put", f.do("PUT", withDigest(l, d), bytes.NewReader(b)), http.StatusInsufficientStorage, "INSUFFICIENT_STORAGE")
	f.wantUploads(0)
	f.wantKeys()
	f.wantNoBlob("r", d)
	if m.Used() != 0 {
		t.Errorf("%d bytes are used", m.Used())
	}
	small := random(900)
	f.wantBlob("r", f.push("r", small), small)
}

// The same on a real disk, where writes fail in the middle of an upload.
func TestDiskFullOnDisk(t *testing.T) {
	dir := smallDisk(t, 16<<20)
	f := &fixture{t: t, dir: dir}
	f.start()
	t.Cleanup(f.stop)
	b := random(20 << 20)
	d := digest.FromBytes(b)
	l := f.begin("r")
	for what, request := range map[string]func() (answer, error){
		"post": func() (answer, error) {
			return f.try("POST", withDigest("/v2/r/blobs/uploads/", d), bytes.NewReader(b))
		},
		"patch": func() (answer, error) { return f.try("PATCH", l, bytes.NewReader(b)) },
	} {
		a, err := request()
		// The server answers before it has read all; a client that still
		// writes may see the connection end instead.
		if err == nil {
			f.want(what, a, http.StatusInsufficientStorage, "INSUFFICIENT_STORAGE")
		} else if !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: %v", what, err)
		}
		eventually(t, "the upload is dropped", func() bool {
			entries, err := os.ReadDir(f.uploads())
			return err == nil && (len(entries) == 0 || what == "post" && len(entries) == 2)
		})
	}
	f.wantKeys()
	small := random(4 << 20)
	f.wantBlob("r", f.push("r", small), small)
}

// A push is acknowledged or it is not, whatever fails at whatever point; when
// it was not, it can be tried again.
func TestStoreFails(t *testing.T) {
	m := objectstest.NewMemory()
	f := newFixture(t, registry.Options{Store: m})
	boom := errors.New("boom")
	for n := 1; ; n++ {
		b := random(1000 + n)
		d := digest.FromBytes(b)
		ops := 0
		m.Inject(func(_ int, op objectstest.Op, _ string) error {
			if op == objectstest.OpList {
				return nil // the cleaner's
			}
			if ops++; ops == n {
				return boom
			}
			return nil
		})
		l := f.begin("r")
		a := f.do("PUT", withDigest(l, d), bytes.NewReader(b))
		m.Inject(nil)
		if ops < n {
			f.want("nothing failed", a, http.StatusCreated)
			break
		}
		f.want("put", a, http.StatusInternalServerError, "INTERNAL")
		if bytes.Contains(a.body, []byte("boom")) {
			t.Errorf("the client is told of the inside: %s", a.body)
		}
		f.wantNoBlob("r", d)
		f.want("put again", f.do("PUT", withDigest(l, d), nil), http.StatusCreated)
		f.wantBlob("r", d, b)
	}
	f.wantUploads(0)
}

// Pushes and deletions of one blob, all at once: a push that was acknowledged
// after the last deletion is there.
func TestConcurrent(t *testing.T) {
	f := newFixture(t, registry.Options{})
	b := random(50_000)
	d := digest.FromBytes(b)
	var wg sync.WaitGroup
	for i := range 6 {
		repo := fmt.Sprintf("r%d", i)
		wg.Go(func() {
			for range 10 {
				a, err := f.try("POST", withDigest("/v2/"+repo+"/blobs/uploads/", d), bytes.NewReader(b))
				if err != nil || a.StatusCode != http.StatusCreated {
					t.Errorf("push: %v %s", err, a.body)
					return
				}
				// Nobody else deletes from this repository.
				a, err = f.try("GET", "/v2/"+repo+"/blobs/"+d.String(), nil)
				if err != nil || a.StatusCode != http.StatusOK || !bytes.Equal(a.body, b) {
					t.Errorf("pull after push: %v, status %d", err, a.StatusCode)
				}
				if i%2 == 0 {
					a, err = f.try("DELETE", "/v2/"+repo+"/blobs/"+d.String(), nil)
					if err != nil || a.StatusCode != http.StatusAccepted {
						t.Errorf("delete: %v %s", err, a.body)
					}
				}
			}
		})
	}
	wg.Wait()
	f.wantKeys(d)
	f.wantUploads(0)
}

// Who is refused while they send hears why: the connection is read on, so that it is
// not reset while the answer is on its way.
func TestRefusedWhileSending(t *testing.T) {
	f := newFixture(t, registry.Options{})
	conn, err := net.Dial("tcp", f.http.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	const size = 32 << 20 // more than sockets take that nobody reads
	if _, err := fmt.Fprintf(conn, "PUT /v2/r/blobs/uploads/no-such-upload?digest=sha256:0 HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n", size); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode < 400 || !strings.Contains(string(b), "errors") {
		t.Errorf("%s: %s, %v", resp.Status, b, err)
	}
	for sent := 0; sent < size; {
		n, err := conn.Write(make([]byte, 1<<20))
		if err != nil {
			t.Fatalf("after %d bytes: %v", sent, err)
		}
		sent += n
	}
}
