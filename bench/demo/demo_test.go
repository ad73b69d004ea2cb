package demo

import (
	"bytes"
	"context"
	"crypto/sha256"
	"flag"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

var update = flag.Bool("update", false, "write the golden files")

func TestParseReadiness(t *testing.T) {
	for _, c := range []struct {
		probe string
		redis bool
		port  string
		tries bool
		fails bool
	}{
		{probe: "tcp:6379", redis: true, port: "6379", tries: true},
		{probe: "tcp:80", port: "80", tries: true},
		{probe: "http:8080/health", port: "8080", tries: true},
		{probe: "http:8080", port: "8080", tries: true},
		{probe: "exit"},
		{probe: "exit:0", fails: true},
		{probe: "tcp", fails: true},
		{probe: "http:/", fails: true},
		{probe: "stdout:ready", fails: true},
		{probe: "", fails: true},
	} {
		r, err := parseReadiness(c.probe, c.redis)
		if (err != nil) != c.fails {
			t.Errorf("%q: error %v", c.probe, err)
			continue
		}
		if err == nil && (r.port != c.port || (r.try != nil) != c.tries) {
			t.Errorf("%q: port %q, tries %v", c.probe, r.port, r.try != nil)
		}
	}
}

// Whoever answers otherwise than a ready service is not taken for one.
func TestTries(t *testing.T) {
	for _, c := range []struct {
		probe, answer string
		redis, want   bool
	}{
		{"tcp:1", "+PONG\r\n", true, true},
		{"tcp:1", "-LOADING Redis is loading the dataset in memory\r\n", true, false},
		{"tcp:1", "", true, false},
		{"http:1/", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", false, true},
		{"http:1/", "HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 0\r\n\r\n", false, true},
		{"http:1/", "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", false, false},
		{"http:1/", "+PONG\r\n", false, false},
	} {
		r, err := parseReadiness(c.probe, c.redis)
		if err != nil {
			t.Fatal(err)
		}
		client, server := net.Pipe()
		go func() {
			server.Read(make([]byte, 4096))
			server.Write([]byte(c.answer))
			server.Close()
		}()
		if got := r.try(context.Background(), client); got != c.want {
			t.Errorf("%s answered %q: ready %v", c.probe, c.answer, got)
		}
		client.Close()
	}
}

func TestResidentPages(t *testing.T) {
	page := os.Getpagesize()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, bytes.Repeat([]byte("x"), 10*page+1), 0o644); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil {
		t.Fatal(err)
	}
	if fs.Type == unix.TMPFS_MAGIC {
		t.Skip("files of a tmpfs are always in memory")
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	for _, advice := range []int{unix.FADV_DONTNEED, unix.FADV_RANDOM} {
		if err := unix.Fadvise(int(f.Fd()), 0, 0, advice); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := f.ReadAt(make([]byte, 2), int64(3*page)-1); err != nil {
		t.Fatal(err)
	}
	pages, err := residentPages(path, int64(10*page+1))
	if err != nil {
		t.Fatal(err)
	}
	got := make([]bool, len(pages))
	for i, p := range pages {
		got[i] = p&1 == 1
	}
	want := make([]bool, 11)
	want[2], want[3] = true, true
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("resident (-want +got):\n%s", diff)
	}
}

// Only what is touched counts, links once, and known contents not as new.
func TestCollectTouched(t *testing.T) {
	tree := t.TempDir()
	content := bytes.Repeat([]byte("all of it has just been written, and so is in the page cache\n"), 1000)
	for _, name := range []string{"new", "known"} {
		if err := os.WriteFile(filepath.Join(tree, name), append(content, name...), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Link(filepath.Join(tree, "new"), filepath.Join(tree, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(tree, "empty"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	s, err := collectTouched(tree, nil)
	if err != nil {
		t.Fatal(err)
	}
	if want := int64(2*len(content) + len("new") + len("known")); s.touched != want {
		t.Errorf("touched %d bytes, want %d", s.touched, want)
	}
	if s.compressed == 0 || s.compressed > s.touched/10 {
		t.Errorf("%d bytes compressed to %d", s.touched, s.compressed)
	}
	all, err := collectTouched(tree, map[[sha256.Size]byte]bool{
		sha256.Sum256(append(content, "new"...)):   true,
		sha256.Sum256(append(content, "known"...)): true,
	})
	if err != nil {
		t.Fatal(err)
	}
	if all.touched != s.touched || all.compressed > 20 {
		t.Errorf("with every content known: touched %d, %d new ones compressed", all.touched, all.compressed)
	}
}

func TestTable(t *testing.T) {
	table := table{
		rtt: 100 * time.Millisecond, rate: 100e6, ready: "tcp:6379",
		rows: []comparison{
			{
				name: "fresh", layers: 45e6, warm: 100 * time.Millisecond,
				startup: startup{touched: 6e6, compressed: 2e6},
				results: []result{
					{time: 9 * time.Second, atReady: 47e6, moved: 47e6},
					{time: time.Second, atReady: 4e6, moved: 40e6, waits: 80, waited: 600 * time.Millisecond},
				},
			},
			{
				name: "update", layers: 45e6, warm: 100 * time.Millisecond,
				startup: startup{touched: 6e6, compressed: 1e6},
				results: []result{
					{time: 9 * time.Second, atReady: 47e6, moved: 47e6},
					{time: time.Second / 2, atReady: 1e6, moved: 4e6, waits: 8, waited: 60 * time.Millisecond},
				},
			},
		},
	}
	// 100 ms warm, 100 ms round trip, 2 MB at 12.5 MB/s.
	if got, want := table.rows[0].floor(table.rtt, table.rate), 360*time.Millisecond; got != want {
		t.Errorf("floor %v, want %v", got, want)
	}
	golden := filepath.Join("testdata", "table.txt")
	if *update {
		if err := os.WriteFile(golden, []byte(table.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(table.String(), "\n")); diff != "" {
		t.Errorf("table (-want +got; -update writes it anew):\n%s", diff)
	}
}
