package ingest_test

import (
	"archive/tar"
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
	"hydrofoil.dev/foil/internal/server/ingest"
	"hydrofoil.dev/foil/internal/server/objects"
)

// corpus writes a gzip layer of real files to the store: the regular files of
// /usr/lib and /usr/share of this machine, in path order and up to 8 MiB each,
// half of the bytes from each, until there are size bytes. When the files do
// not suffice they come again under other names, with another constant added to
// every byte, so that nothing is deduplicated and everything compresses as
// before.
func corpus(b *testing.B, store objects.Store, size int64, level int) (d ingest.Descriptor, files int, bytes int64) {
	b.Helper()
	tmp, err := os.CreateTemp(b.TempDir(), "layer")
	if err != nil {
		b.Fatal(err)
	}
	defer tmp.Close()
	blob := digest.SHA256.Digester()
	z, err := gzip.NewWriterLevel(io.MultiWriter(tmp, blob.Hash()), level)
	if err != nil {
		b.Fatal(err)
	}
	w := tar.NewWriter(z)
	buf := make([]byte, 1<<20)
	for round := 0; bytes < size; round++ {
		before := bytes
		for half, root := range []string{"/usr/lib", "/usr/share"} {
			quota := size / 2 * int64(half+1)
			if round > 0 {
				quota = size
			}
			err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
				if err != nil || bytes >= quota {
					return fs.SkipAll
				}
				info, err := e.Info()
				if err != nil || !info.Mode().IsRegular() || info.Size() > 8<<20 {
					return nil
				}
				f, err := os.Open(path)
				if err != nil {
					return nil
				}
				defer f.Close()
				h := &tar.Header{Name: strconv.Itoa(round) + path, Mode: 0o644, Size: info.Size(), ModTime: info.ModTime()}
				if err := w.WriteHeader(h); err != nil {
					return err
				}
				for left := info.Size(); left > 0; {
					n, err := f.Read(buf[:min(left, int64(len(buf)))])
					if err != nil {
						return err
					}
					if round > 0 {
						for i := range buf[:n] {
							buf[i] += byte(round)
						}
					}
					if _, err := w.Write(buf[:n]); err != nil {
						return err
					}
					left -= int64(n)
				}
				files++
				bytes += info.Size()
				return nil
			})
			if err != nil {
				b.Fatal(err)
			}
		}
		if bytes == before {
			b.Fatal("no files in /usr/lib and /usr/share")
		}
	}
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
	if err := z.Close(); err != nil {
		b.Fatal(err)
	}
	d.Digest = blob.Digest()
	if err := objects.Adopt(context.Background(), store, catalog.BlobKey(d.Digest), tmp.Name()); err != nil {
		b.Fatal(err)
	}
	return d, files, bytes
}

// fresh is an Ingester with an empty catalog over a store that holds only blobs.
func fresh(b *testing.B, store objects.Store) (*ingest.Ingester, func()) {
	b.Helper()
	for _, key := range added(b, store) {
		if err := store.Delete(context.Background(), key); err != nil {
			b.Fatal(err)
		}
	}
	c, err := sqlite.Open(context.Background(), filepath.Join(b.TempDir(), "catalog"))
	if err != nil {
		b.Fatal(err)
	}
	g := &ingest.Ingester{Objects: store, Catalog: c}
	return g, func() {
		g.Close()
		c.Close()
	}
}

// BenchmarkIngest ingests one gzip layer of 256 MB of real files (see corpus)
// from a directory store into the same, with SQLite, everything made durable.
// Bytes are those of the files. MB/cpu-s is what one core does, all goroutines
// and the kernel's part counted: on a machine that does other work too it says
// more than MB/s.
func BenchmarkIngest(b *testing.B) {
	store, err := objects.OpenDir(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	d, files, size := corpus(b, store, 256<<20, 6)
	for _, cores := range []int{1, runtime.GOMAXPROCS(0)} {
		b.Run(fmt.Sprintf("cores=%d", cores), func(b *testing.B) {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(cores))
			b.SetBytes(size)
			b.ReportAllocs()
			var used time.Duration
			for b.Loop() {
				b.StopTimer()
				g, done := fresh(b, store)
				before := cpuTime(b)
				b.StartTimer()
				if _, err := g.Layer(context.Background(), d); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				used += cpuTime(b) - before
				done()
				b.StartTimer()
			}
			b.ReportMetric(float64(files), "files")
			b.ReportMetric(float64(size)/1e6*float64(b.N)/used.Seconds(), "MB/cpu-s")
		})
	}
}

// BenchmarkIngestMemory shows that memory does not grow with the layer: peak-MB
// is how much the process's resident memory grew at most while it ingested.
func BenchmarkIngestMemory(b *testing.B) {
	for _, size := range []int64{50, 2000} {
		b.Run(fmt.Sprintf("MB=%d", size), func(b *testing.B) {
			store, err := objects.OpenDir(b.TempDir())
			if err != nil {
				b.Fatal(err)
			}
			d, files, bytes := corpus(b, store, size*1e6, gzip.BestSpeed)
			b.SetBytes(bytes)
			var peak int64
			for b.Loop() {
				b.StopTimer()
				g, done := fresh(b, store)
				debug.FreeOSMemory()
				if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil { // resets VmHWM
					b.Skipf("cannot measure: %v", err)
				}
				before := status(b, "VmRSS")
				b.StartTimer()
				if _, err := g.Layer(context.Background(), d); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				peak = max(peak, status(b, "VmHWM")-before)
				done()
				b.StartTimer()
			}
			b.ReportMetric(float64(peak)/1e6, "peak-MB")
			b.ReportMetric(float64(files), "files")
		})
	}
}

// cpuTime is what the process has used so far, in user space and kernel.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// status returns a line of /proc/self/status in bytes.
func status(b *testing.B, name string) int64 {
	b.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, name+":"); ok {
			n, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			if err != nil {
				b.Fatal(err)
			}
			return n << 10
		}
	}
	b.Fatalf("/proc/self/status has no %s", name)
	return 0
}
