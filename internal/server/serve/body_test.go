package serve_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/server/serve"
)

// Bodies that bring nothing end, of every kind of request, over HTTP/1 and HTTP/2; those that go on do not.
func TestIdleBodiesEnd(t *testing.T) {
	s := start(t, serve.Options{IdleBody: 100 * time.Millisecond})
	d := digest.FromString("hello, world").String()
	for _, path := range []string{"POST /v2/r/blobs/uploads/?digest=" + d, "PUT /v2/r/manifests/1", "POST " + bundle.PullPath} {
		method, path, _ := strings.Cut(path, " ")
		c, err := net.Dial("tcp", s.Addr())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		fmt.Fprintf(c, "%s %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/vnd.oci.image.manifest.v1+json\r\nContent-Length: 100\r\n\r\nhello", method, path)
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		b, err := io.ReadAll(res.Body)
		if err != nil || res.StatusCode != http.StatusBadRequest || !strings.Contains(string(b), "too little for too long") {
			t.Errorf("%s: %d %s, %v", path, res.StatusCode, b, err)
		}
		if _, err := io.ReadAll(c); err != nil {
			t.Errorf("%s: the connection goes on: %v", path, err)
		}
	}
	pr, pw := io.Pipe()
	defer pw.Close()
	res, err := client("HTTP/2.0 without TLS").Post("http://"+s.Addr()+"/v2/r/blobs/uploads/?digest="+d, "", pr)
	if err != nil {
		t.Fatal(err)
	}
	if res.Body.Close(); res.StatusCode != http.StatusBadRequest {
		t.Errorf("HTTP/2: %s", res.Status)
	}
}

// One that brings bytes all the time is not ended, however long it takes.
func TestSlowBodies(t *testing.T) {
	s := start(t, serve.Options{IdleBody: 10 * time.Second})
	pr, pw := io.Pipe()
	text := strings.Repeat("x", 40)
	go func() {
		for i := range text {
			if _, err := io.WriteString(pw, text[i:i+1]); err != nil {
				t.Error(err)
			}
			time.Sleep(time.Millisecond)
		}
		pw.Close()
	}()
	res, err := http.Post("http://"+s.Addr()+"/v2/r/blobs/uploads/?digest="+digest.FromString(text).String(), "", pr)
	if err != nil {
		t.Fatal(err)
	}
	if res.Body.Close(); res.StatusCode != http.StatusCreated {
		t.Error(res.Status)
	}
}
