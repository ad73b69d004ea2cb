package registries

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"

	digest "github.com/opencontainers/go-digest"
)

// layer is one that is pushed.
type layer struct {
	blob   []byte
	digest digest.Digest
	diffID digest.Digest
}

// pool is files of this machine, of which layers are made: what programs and libraries are like, and not random bytes.
type pool struct {
	files []string
	sizes []int64
}

const (
	maxFile = 4 << 20
	maxPool = 60_000
)

// newPool lists regular files below some directories.
func newPool(dirs ...string) (*pool, error) {
	p := new(pool)
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err != nil || !e.Type().IsRegular() || len(p.files) >= maxPool {
				return nil // what cannot be read is no file of a layer
			}
			info, err := e.Info()
			if err == nil && info.Size() > 0 && info.Size() <= maxFile {
				p.files, p.sizes = append(p.files, path), append(p.sizes, info.Size())
			}
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("bench: %w", err)
		}
	}
	if len(p.files) < 1000 {
		return nil, fmt.Errorf("bench: only %d files in %q to make layers of", len(p.files), dirs)
	}
	return p, nil
}

// layer makes a layer of about so many bytes, compressed as docker and BuildKit do (level 6), or kaniko and ko (1). Its files are a few runs of
// neighbours of the pool, as packages are; every second run is one of a few that many layers have.
func (p *pool) layer(r *rand.Rand, size int64, level int) (l layer, err error) {
	var blob bytes.Buffer
	z, err := gzip.NewWriterLevel(&blob, level)
	if err != nil {
		return l, fmt.Errorf("bench: %w", err)
	}
	plain := digest.Canonical.Digester()
	t := tar.NewWriter(io.MultiWriter(z, plain.Hash()))
	raw := size * 5 / 2 // what compresses to that, more or less
	seen := map[int]bool{}
	for total := int64(0); total < raw; {
		at := r.IntN(len(p.files))
		if r.IntN(2) == 0 {
			at = r.IntN(12) * len(p.files) / 12
		}
		for n := 1 + r.IntN(60); n > 0 && total < raw; n, at = n-1, (at+1)%len(p.files) {
			if seen[at] || p.sizes[at] > max(raw/2, 4096) {
				continue
			}
			seen[at] = true
			b, err := os.ReadFile(p.files[at])
			if err != nil {
				continue
			}
			if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: p.files[at][1:], Mode: 0o644, Size: int64(len(b))}); err != nil {
				return l, fmt.Errorf("bench: %w", err)
			}
			if _, err := t.Write(b); err != nil {
				return l, fmt.Errorf("bench: %w", err)
			}
			total += int64(len(b)) + 512
		}
	}
	// No two layers are the same.
	name := fmt.Sprintf("etc/layer-%016x", r.Uint64())
	if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644}); err != nil {
		return l, fmt.Errorf("bench: %w", err)
	}
	if err := t.Close(); err != nil {
		return l, fmt.Errorf("bench: %w", err)
	}
	if err := z.Close(); err != nil {
		return l, fmt.Errorf("bench: %w", err)
	}
	l.blob = blob.Bytes()
	l.digest, l.diffID = digest.FromBytes(l.blob), plain.Digest()
	return l, nil
}
