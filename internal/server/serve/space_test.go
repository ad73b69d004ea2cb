package serve_test

import (
	"bytes"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// A disk with less than the reserve takes no pushes, says so, and lets images be deleted, collected and pulled.
func TestReserve(t *testing.T) {
	root := t.TempDir()
	images := overlapping(t, 2, 3, 50_000)
	o := onDemand(root)
	o.Reserve = 1 << 20
	s := start(t, o)
	pushAll(t, s.Addr(), images, func(int) bool { return true })
	if _, body := get(t, "http://"+s.Addr()+"/healthz"); !strings.HasPrefix(string(body), "ok\n") {
		t.Errorf("healthz: %s", body)
	}
	info, err := os.Stat(filepath.Join(root, "reserve"))
	if err != nil || info.Size() != o.Reserve/2 {
		t.Errorf("the file of the reserve: %v, %v", info, err)
	}
	stop(t, s)

	// All that is free, and more, is the reserve now.
	var f unix.Statfs_t
	if err := unix.Statfs(root, &f); err != nil {
		t.Fatal(err)
	}
	o.Reserve = 4 * int64(f.Blocks) * f.Bsize
	s = start(t, o)
	base := "http://" + s.Addr()
	if status, body := get(t, base+"/healthz"); status != http.StatusOK || !strings.Contains(string(body), "disk full") {
		t.Errorf("healthz: %d %s", status, body)
	}
	blob := []byte("one more")
	res, err := http.Post(base+"/v2/r/blobs/uploads/?digest="+digest.FromBytes(blob).String(), "", bytes.NewReader(blob))
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != http.StatusInsufficientStorage {
		t.Errorf("a push to a full disk: %d", res.StatusCode)
	}
	wantWhole(t, s.Addr(), 1, images[1])
	remove(t, s.Addr(), 0)
	if r := collectAll(t, s.Addr()); r.Objects == 0 {
		t.Error("nothing is freed on a full disk")
	}
	if _, err := os.Stat(filepath.Join(root, "reserve")); err == nil {
		t.Error("what is kept for a full disk is kept on a full disk")
	}
	wantWhole(t, s.Addr(), 1, images[1])
}
