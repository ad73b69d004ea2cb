package s3_test

import (
	"bytes"
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/objects/objectstest"
	"hydrofoil.dev/foil/internal/server/objects/s3"
	"hydrofoil.dev/foil/internal/server/objects/s3/s3test"
)

func TestBucket(t *testing.T) {
	server := s3test.Start(t)
	objectstest.Run(t, func(t *testing.T) objects.Store { return s3test.Open(t, server.Location()) })
	t.Run("NoPrefix", func(t *testing.T) {
		objectstest.Run(t, func(t *testing.T) objects.Store {
			at := server.Location()
			at.Prefix = ""
			return s3test.Open(t, at)
		})
	})
}

// Where everything that was replaced or deleted stays as an older version nobody sees it. (The whole suite cannot be run: versitygw does not
// delete a missing object there that has the name of a directory.)
func TestBucketWithVersions(t *testing.T) {
	server := s3test.Start(t)
	client, err := minio.New(strings.TrimPrefix(server.URL(), "http://"), &minio.Options{Creds: credentials.NewStaticV4(s3test.AccessKey, s3test.SecretKey, ""), Region: "us-east-1"})
	if err != nil {
		t.Fatal(err)
	}
	at := server.Location()
	if err := client.EnableVersioning(t.Context(), at.Bucket); err != nil {
		t.Fatal(err)
	}
	b := s3test.Open(t, at)
	large := fill(s3.PartSize + 1000)
	write(t, b, "a/o", []byte("one"))
	write(t, b, "a/o", large)
	wantBytes(t, b, "a/o", large)
	write(t, b, "a/p", []byte("two"))
	if err := b.Delete(t.Context(), "a/o"); err != nil {
		t.Fatal(err)
	}
	if _, err := read(t.Context(), b, "a/o"); !errors.Is(err, objects.ErrNotFound) {
		t.Errorf("what was deleted: %v", err)
	}
	if _, err := b.Stat(t.Context(), "a/o"); !errors.Is(err, objects.ErrNotFound) {
		t.Errorf("its size: %v", err)
	}
	if diff := cmp.Diff([]string{"a/p"}, objectstest.Keys(t, b, "")); diff != "" {
		t.Error(diff)
	}
	versions := 0
	for info := range client.ListObjects(t.Context(), at.Bucket, minio.ListObjectsOptions{Recursive: true, WithVersions: true}) {
		if info.Err != nil {
			t.Fatal(info.Err)
		}
		versions++
	}
	if versions < 4 {
		t.Errorf("the bucket has %d versions: it keeps none", versions)
	}
	write(t, b, "a/o", []byte("again"))
	wantBytes(t, b, "a/o", []byte("again"))
}

// The suite passes though every other request fails, in one way or another.
func TestBucketWithFaults(t *testing.T) {
	server := s3test.Start(t)
	faults := []s3test.Fault{s3test.SlowDown, s3test.Reset, s3test.Lost, s3test.Cut, s3test.Trouble, s3test.Flip}
	server.Inject(func(n int, _, _ string) s3test.Fault {
		if n%2 == 0 {
			return faults[n/2%len(faults)]
		}
		return s3test.None
	})
	objectstest.Run(t, func(t *testing.T) objects.Store { return s3.Hurry(s3test.Open(t, server.Location()), 30) })
}

func fill(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{1}).Read(b)
	return b
}

func read(ctx context.Context, s objects.Store, key string) ([]byte, error) {
	r, err := s.Open(ctx, key, 0, -1)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(r)
	return b, errors.Join(err, r.Close())
}

func write(t *testing.T, s objects.Store, key string, b []byte) {
	t.Helper()
	if err := objects.Put(t.Context(), s, key, b); err != nil {
		t.Fatal(err)
	}
}

func wantBytes(t *testing.T, s objects.Store, key string, want []byte) {
	t.Helper()
	if got, err := read(t.Context(), s, key); err != nil || !bytes.Equal(got, want) {
		t.Errorf("object %s: %d bytes, %v; want %d", key, len(got), err, len(want))
	}
}

// wantCount compares what was asked of the store since the last time.
func wantCount(t *testing.T, server *s3test.Server, what string, want map[string]int) {
	t.Helper()
	if diff := cmp.Diff(want, server.Count().Requests); diff != "" {
		t.Errorf("%s: requests (-want +got):\n%s", what, diff)
	}
	server.Reset()
}

func TestRequests(t *testing.T) {
	server := s3test.Start(t)
	b := s3test.Open(t, server.Location())
	small, large := fill(100_000), fill(2*s3.PartSize+1000)
	write(t, b, "small", small)
	wantCount(t, server, "a small object", map[string]int{"put": 1})
	wantBytes(t, b, "small", small)
	wantCount(t, server, "reading it", map[string]int{"get": 1})
	write(t, b, "part", large[:s3.PartSize])
	wantCount(t, server, "an object of one part", map[string]int{"put": 1})
	write(t, b, "large", large)
	wantCount(t, server, "a large one", map[string]int{"create": 1, "part": 3, "complete": 1})
	wantBytes(t, b, "large", large)
	wantCount(t, server, "reading it", map[string]int{"get": 1})

	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, large, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := objects.Adopt(t.Context(), b, "file", path); err != nil {
		t.Fatal(err)
	}
	wantCount(t, server, "a large file", map[string]int{"create": 1, "part": 3, "complete": 1})
	wantBytes(t, b, "file", large)
	server.Reset()

	if _, err := b.Stat(t.Context(), "small"); err != nil {
		t.Error(err)
	}
	wantCount(t, server, "its size", map[string]int{"head": 1})
	if keys := objectstest.Keys(t, b, ""); len(keys) != 4 {
		t.Errorf("keys %q", keys)
	}
	wantCount(t, server, "a listing", map[string]int{"list": 1})
	if err := b.Delete(t.Context(), "small"); err != nil {
		t.Error(err)
	}
	wantCount(t, server, "a deletion", map[string]int{"delete": 1})

	// Reading some of an object, and dropping the reader, moves no more than that and what was under way.
	r, err := b.OpenWithin(t.Context(), "large", int64(len(large))-100, 1000)
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(r)
	if err != nil || !bytes.Equal(got, large[len(large)-100:]) || r.(objects.Sized).Size() != int64(len(large)) {
		t.Errorf("the end of an object: %d bytes, %v", len(got), err)
	}
	r.Close()
	wantCount(t, server, "the end of an object", map[string]int{"get": 1})
}

// An object is written, though nobody hears of what was done.
func TestLostAnswers(t *testing.T) {
	server := s3test.Start(t)
	large := fill(s3.PartSize + 10_000)
	for _, op := range []string{"put", "create", "part", "complete", "delete", "head", "get", "list"} {
		t.Run(op, func(t *testing.T) {
			b := s3.Hurry(s3test.Open(t, server.Location()), s3.Attempts)
			server.Inject(s3test.First(2, op, s3test.Lost))
			defer server.Inject(nil)
			write(t, b, "large", large)
			write(t, b, "small", large[:1000])
			wantBytes(t, b, "large", large)
			if size, err := b.Stat(t.Context(), "small"); err != nil || size != 1000 {
				t.Errorf("stat: %d, %v", size, err)
			}
			if err := b.Delete(t.Context(), "small"); err != nil {
				t.Error(err)
			}
			if diff := cmp.Diff([]string{"large"}, objectstest.Keys(t, b, "")); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// Completing an upload that another one's object hides is no success: what is under the key was not written here.
func TestLostUpload(t *testing.T) {
	server := s3test.Start(t)
	b := s3.Hurry(s3test.Open(t, server.Location()), s3.Attempts)
	large := fill(s3.PartSize + 1)
	write(t, b, "o", large)
	w, err := b.Create(t.Context(), "o")
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := w.Write(bytes.Repeat([]byte{1}, len(large))); err != nil {
		t.Fatal(err)
	}
	if n, err := b.Leftovers(t.Context(), time.Now().Add(time.Hour)); n != 0 || err != nil {
		t.Fatalf("%d uploads of this process were dropped, %v", n, err)
	}
	// Another process takes it for a leftover.
	other := s3test.Open(t, b.Location())
	if n, err := other.Leftovers(t.Context(), time.Now().Add(-time.Hour)); n != 0 || err != nil {
		t.Fatalf("%d young uploads were dropped, %v", n, err)
	}
	if n, err := other.Leftovers(t.Context(), time.Now().Add(time.Hour)); n != 1 || err != nil {
		t.Fatalf("%d uploads were dropped, %v; want 1", n, err)
	}
	if err := w.Commit(); err == nil {
		t.Error("an upload that was dropped was completed")
	}
	wantBytes(t, b, "o", large)
}

// What a store does not do in the end is told as what it is: neither lost objects nor damaged ones.
func TestTrouble(t *testing.T) {
	server := s3test.Start(t)
	large := fill(3 << 20)
	for name, fault := range map[string]s3test.Fault{
		"slow down": s3test.SlowDown, "trouble": s3test.Trouble, "reset": s3test.Reset, "lost": s3test.Lost, "cut": s3test.Cut, "foreign": s3test.Foreign,
	} {
		t.Run(name, func(t *testing.T) {
			b := s3.Hurry(s3test.Open(t, server.Location()), s3.Attempts)
			write(t, b, "o", large)
			want := func(what string, err error) {
				t.Helper()
				var u *objects.UnavailableError
				if !errors.As(err, &u) || errors.Is(err, objects.ErrNotFound) || dedup.Damage(err) {
					t.Errorf("%s: %v; want UnavailableError alone", what, err)
				}
			}
			server.Reset()
			server.Inject(func(int, string, string) s3test.Fault { return fault })
			defer server.Inject(nil)
			_, err := read(t.Context(), b, "o")
			if fault == s3test.Cut {
				// Half of what is left comes each time, and all of it in the end.
				if err != nil {
					t.Error(err)
				}
				server.Inject(func(n int, _, _ string) s3test.Fault {
					if n == 1 {
						return s3test.Cut
					}
					return s3test.Reset
				})
				_, err = read(t.Context(), b, "o")
			}
			want("open", err)
			if fault == s3test.Cut {
				return // others have no bodies to speak of
			}
			_, err = b.Stat(t.Context(), "o")
			want("stat", err)
			want("put", objects.Put(t.Context(), b, "p", large))
			want("list", b.List(t.Context(), "", func(string, int64) error { return nil }))
			// Where a connection breaks net/http tries again by itself, and what is not there is asked for twice.
			if n := server.Count().Total(); n < 4*s3.Attempts || n > 5*s3.Attempts {
				t.Errorf("%d requests, want %d for each of four", n, s3.Attempts)
			}
		})
	}
}

// A store that says nothing is asked again, when it has begun to answer as well.
func TestTimeouts(t *testing.T) {
	server := s3test.Start(t)
	at := server.Location()
	at.Timeout = time.Second
	b := s3.Hurry(s3test.Open(t, at), s3.Attempts)
	body := fill(1 << 20)
	write(t, b, "o", body)
	for _, fault := range []s3test.Fault{s3test.Hang, s3test.Stall} {
		server.Inject(s3test.First(1, "get", fault))
		wantBytes(t, b, "o", body)
	}
	server.Inject(s3test.First(1, "put", s3test.Hang))
	write(t, b, "p", body)
	server.Inject(nil)
	wantBytes(t, b, "p", body)
	// Who asked is not kept waiting.
	ctx, cancel := context.WithCancel(t.Context())
	server.Inject(func(int, string, string) s3test.Fault { cancel(); return s3test.Hang })
	if _, err := read(ctx, b, "o"); !errors.Is(err, context.Canceled) {
		t.Errorf("a read that was cancelled: %v", err)
	}
	server.Inject(nil)
}

// A listing may lack what is new and have what was deleted: the object itself says what is true.
func TestStaleListing(t *testing.T) {
	server := s3test.Start(t)
	b := s3test.Open(t, server.Location())
	write(t, b, "old", []byte("x"))
	if keys := objectstest.Keys(t, b, ""); len(keys) != 1 {
		t.Fatalf("keys %q", keys)
	}
	if err := b.Delete(t.Context(), "old"); err != nil {
		t.Fatal(err)
	}
	write(t, b, "new", []byte("y"))
	server.Inject(func(int, string, string) s3test.Fault { return s3test.Stale })
	if diff := cmp.Diff([]string{"old"}, objectstest.Keys(t, b, "")); diff != "" {
		t.Fatalf("the listing is not stale: %s", diff)
	}
	if _, err := read(t.Context(), b, "old"); !errors.Is(err, objects.ErrNotFound) {
		t.Errorf("what was deleted: %v", err)
	}
	wantBytes(t, b, "new", []byte("y"))
	if err := b.Delete(t.Context(), "old"); err != nil {
		t.Errorf("deleting what a listing has: %v", err)
	}
}

// What a store refuses says what to do, and is not asked again and again.
func TestRefusals(t *testing.T) {
	server := s3test.Start(t)
	at := server.Location()
	b := s3test.Open(t, at)
	write(t, b, "o", []byte("x"))
	refused := func(what, hint string, err error) {
		t.Helper()
		if err == nil || errors.Is(err, objects.ErrNotFound) || !strings.Contains(err.Error(), hint) {
			t.Errorf("%s: %v; want %q", what, err, hint)
		}
	}
	missing := at
	missing.Bucket = "no-such-bucket"
	_, err := read(t.Context(), s3test.Open(t, missing), "o")
	refused("a bucket that is not there", "make the bucket", err)
	_, err = s3test.Open(t, missing).Stat(t.Context(), "o")
	refused("the size of an object in it", "make the bucket", err)

	server.SetCredentials(s3test.AccessKey, "wrong")
	server.Reset()
	_, err = read(t.Context(), b, "o")
	refused("a wrong secret", "look at the credentials", err)
	wantCount(t, server, "a wrong secret", map[string]int{"get": 1})
	server.SetCredentials(s3test.AccessKey, s3test.SecretKey)
	wantBytes(t, b, "o", []byte("x")) // the file is read again
}

func TestCredentials(t *testing.T) {
	server := s3test.Start(t)
	at := server.Location()
	file := at.Credentials
	for _, name := range []string{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SHARED_CREDENTIALS_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE",
		"AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_EC2_METADATA_SERVICE_ENDPOINT"} {
		t.Setenv(name, "")
	}
	t.Setenv("HOME", t.TempDir())
	at.Credentials = ""
	if _, err := s3.Open(at, nil); err == nil || !strings.Contains(err.Error(), "AWS_ACCESS_KEY_ID") {
		t.Errorf("without credentials: %v", err)
	}
	works := func(what string) {
		t.Helper()
		write(t, s3test.Open(t, at), "o", []byte(what))
		wantBytes(t, s3test.Open(t, at), "o", []byte(what))
	}
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", file)
	works("the user's file")
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", "")

	// The machine's endpoint: a token, the role, its credentials.
	asked := 0
	machine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		switch req.Method + " " + req.URL.Path {
		case "PUT /latest/api/token":
			fmt.Fprint(w, "a-token")
		case "GET /latest/meta-data/iam/security-credentials/":
			fmt.Fprint(w, "a-role")
		case "GET /latest/meta-data/iam/security-credentials/a-role":
			if req.Header.Get("X-Aws-Ec2-Metadata-Token") != "a-token" {
				t.Error("the machine was asked without its token")
			}
			asked++
			fmt.Fprintf(w, `{"Code": "Success", "AccessKeyId": %q, "SecretAccessKey": %q, "Expiration": %q}`,
				s3test.AccessKey, s3test.SecretKey, time.Now().Add(time.Hour).UTC().Format(time.RFC3339))
		default:
			http.NotFound(w, req)
		}
	}))
	defer machine.Close()
	t.Setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", machine.URL)
	works("the machine's")
	if asked == 0 {
		t.Error("the machine was not asked")
	}
	t.Setenv("AWS_ACCESS_KEY_ID", s3test.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", s3test.SecretKey)
	asked = 0
	works("the environment's")
	if asked > 0 {
		t.Error("the machine was asked though the environment has credentials")
	}
}

func TestCustomAuthority(t *testing.T) {
	server := s3test.Start(t)
	front := httptest.NewTLSServer(server)
	defer front.Close()
	at := server.Location()
	at.Endpoint = front.URL
	b := s3test.Open(t, at)
	if err := objects.Put(t.Context(), b, "o", []byte("x")); err == nil || !strings.Contains(err.Error(), "ca=FILE") {
		t.Errorf("a certificate that nobody vouches for: %v", err)
	}
	at.CA = filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(at.CA, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: front.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	b = s3test.Open(t, at)
	write(t, b, "o", []byte("x"))
	wantBytes(t, b, "o", []byte("x"))
}

// The bucket is part of the host's name. No host has that name here: the store is asked through a proxy, which only
// another process can be told of.
func TestVirtualHost(t *testing.T) {
	const name = "FOIL_TEST_VIRTUAL_HOST"
	if s := os.Getenv(name); s != "" {
		at, err := s3.Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		b := s3test.Open(t, at)
		body := fill(s3.PartSize + 100)
		write(t, b, "a/o", body)
		wantBytes(t, b, "a/o", body)
		if diff := cmp.Diff([]string{"a/o"}, objectstest.Keys(t, b, "a/")); diff != "" {
			t.Error(diff)
		}
		return
	}
	server := s3test.Start(t, "--virtual-domain", "store.test")
	at := server.Location()
	at.Endpoint, at.Style = "http://store.test", s3.StyleHost
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestVirtualHost$")
	cmd.Env = append(os.Environ(), name+"="+at.String(), "HTTP_PROXY="+server.URL(), "NO_PROXY=")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if _, err := os.Stat(filepath.Join(server.Dir(at), "a", "o")); err != nil {
		t.Error(err)
	}
}

func TestParse(t *testing.T) {
	good := []string{
		"s3://bucket", "s3://bucket/a/b", "s3://bucket?region=eu-1",
		"s3://bucket/p?ca=%2Fetc%2Fca.pem&credentials=%2Fetc%2Fkeys&endpoint=https%3A%2F%2Fhost%3A9000&profile=p&region=r&style=host&timeout=10s",
	}
	for _, s := range good {
		l, err := s3.Parse(s)
		if err != nil || l.String() != s {
			t.Errorf("%s became %s, %v", s, l, err)
		}
	}
	for _, s := range []string{"", "bucket", "http://bucket", "s3:bucket", "s3://", "s3://Bucket", "s3://b", "s3://user:password@bucket", "s3://bucket/../x", "s3://bucket/a//b", "s3://bucket/A",
		"s3://bucket?endpoint=host", "s3://bucket?endpoint=ftp://host", "s3://bucket?endpoint=https://host/path", "s3://bucket?style=dns", "s3://bucket?timeout=1", "s3://bucket?timeout=1ms",
		"s3://bucket?region=", "s3://bucket?region=a&region=b", "s3://bucket?colour=red", "s3://bucket?%zz"} {
		if l, err := s3.Parse(s); err == nil {
			t.Errorf("%q is taken for %s", s, l)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("s3://bucket/p?endpoint=http://host&region=r&style=path")
	f.Fuzz(func(t *testing.T, s string) {
		l, err := s3.Parse(s)
		if err != nil {
			return
		}
		if again, err := s3.Parse(l.String()); err != nil || again != l {
			t.Errorf("%q is %+v, and its text is %+v, %v", s, l, again, err)
		}
	})
}
