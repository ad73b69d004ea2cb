package bundles

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A pack that became shorter while it was being sent is damage, and nothing can
// follow on that connection: the reader is in the middle of a section.
func TestShortFile(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	path := filepath.Join(t.TempDir(), "pack")
	if err := os.WriteFile(path, []byte("0123456789"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	d := &direct{conn: c.(*net.TCPConn), most: time.Minute, sent: func(int64) {}}
	if d.raw, err = d.conn.SyscallConn(); err != nil {
		t.Fatal(err)
	}
	if err := d.frame(1, f, 2, 4); err != nil {
		t.Fatal(err)
	}
	if err := d.frame(2, f, 8, 4); !isDamage(err) {
		t.Errorf("two bytes of four: %v", err)
	}
	if _, err := d.Write([]byte("more")); err == nil {
		t.Error("the stream goes on in the middle of a section")
	}
	if err := d.end(); err == nil {
		t.Error("the response ends as if it were whole")
	}
	c.Close()
	b, err := io.ReadAll(client)
	if want := "b\r\n\x04\x01\x05\x00\x00\x00\x012345\r\nb\r\n\x04\x01\x05\x00\x00\x00\x0289"; string(b) != want || err != nil {
		t.Errorf("%q, %v, want %q", b, err, want)
	}
	if err := d.frame(3, f, 0, 4); !errors.As(err, new(writeFailed)) {
		t.Errorf("after an error: %v", err)
	}
}
