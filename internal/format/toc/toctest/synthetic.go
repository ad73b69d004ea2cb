// Package toctest makes tables of contents for tests and benchmarks.
package toctest

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
)

// Synthetic returns a TOC with about the given number of files (names that are
// no directories), shaped like a distribution with an application on top: deep
// trees, many small files, names that look like others, a few large files,
// duplicates, hard links, symlinks and holes. Equal arguments give equal TOCs.
func Synthetic(files int, seed uint64) *toc.TOC { return Update(files, seed, 0, seed) }

// Update returns Synthetic(files, seed) with about the given share of its
// contents (0 to 1) replaced, as a later version of an image has them; version
// chooses which ones and their bytes. Every layer differs: so does the chain ID.
func Update(files int, seed uint64, share float64, version uint64) *toc.TOC {
	g := generator{
		rand:   rand.New(rand.NewPCG(seed, 1)),
		change: rand.New(rand.NewPCG(version, 2)),
		share:  share, seed: seed, version: version,
		left: files,
	}
	root := g.dir()
	for _, name := range []string{"bin", "dev", "etc", "home", "proc", "root", "run", "sys", "tmp", "usr", "var"} {
		root.Children[name] = g.dir()
	}
	etc := root.Children["etc"]
	for _, name := range []string{"passwd", "group", "hosts", "nsswitch.conf", "ld.so.cache", "localtime"} {
		etc.Children[name] = g.regular(0o644)
	}
	usr := root.Children["usr"]
	for _, name := range []string{"bin", "lib", "share", "include", "sbin"} {
		usr.Children[name] = g.dir()
	}
	root.Children["lib"] = &toc.File{Mode: unix.S_IFLNK | 0o777, Target: "usr/lib", Mtime: g.mtime()}
	for g.left > 0 {
		d := usr.Children[[]string{"lib", "lib", "lib", "share", "share", "include", "bin"}[g.rand.IntN(7)]]
		for range g.rand.IntN(6) {
			name := g.word()
			c := d.Children[name]
			if c == nil {
				c = g.dir()
				d.Children[name] = c
			}
			if c.Children == nil {
				break
			}
			d = c
		}
		g.fill(d)
	}
	chain := sha256.Sum256(binary.LittleEndian.AppendUint64(nil, seed^version<<32^math.Float64bits(share)))
	t, err := toc.Build(digest.NewDigestFromBytes(digest.SHA256, chain[:]), root)
	if err != nil {
		panic(fmt.Sprintf("toctest: the generator makes an illegal tree: %v", err))
	}
	return t
}

type generator struct {
	rand, change  *rand.Rand
	share         float64
	seed, version uint64
	left          int
	contents      uint64
	clock         int64
	recent        []*toc.File
}

var syllables = []string{
	"lib", "py", "core", "util", "test", "doc", "net", "io", "data", "base", "conf", "time", "zone", "lang",
	"en", "de", "config", "module", "init", "main", "server", "client", "x86", "linux", "common", "abi", "ssl",
}

func (g *generator) word() string {
	w := syllables[g.rand.IntN(len(syllables))]
	for g.rand.IntN(2) == 0 {
		w += []string{"", "_", "-"}[g.rand.IntN(3)] + syllables[g.rand.IntN(len(syllables))]
	}
	if g.rand.IntN(4) == 0 {
		w += fmt.Sprint(g.rand.IntN(100))
	}
	return w
}

func (g *generator) mtime() int64 {
	if g.rand.IntN(20) == 0 { // another package
		g.clock = int64(g.rand.IntN(3 * 365 * 86400))
	}
	if g.rand.IntN(4) == 0 {
		g.clock++
	}
	return 1_650_000_000 + g.clock
}

func (g *generator) dir() *toc.File {
	return &toc.File{Mode: unix.S_IFDIR | 0o755, Mtime: g.mtime(), Children: map[string]*toc.File{}}
}

// fill puts some files into a directory.
func (g *generator) fill(d *toc.File) {
	suffix := []string{".py", ".so", ".h", ".js", ".txt", "", ".pyc", ".mo"}[g.rand.IntN(8)]
	mode := uint32(0o644)
	if suffix == ".so" || suffix == "" {
		mode = 0o755
	}
	for range 1 + g.rand.IntN(25) {
		name := g.word() + suffix
		if d.Children[name] != nil {
			continue
		}
		var f *toc.File
		switch k := g.rand.IntN(100); {
		case k < 4:
			f = &toc.File{Mode: unix.S_IFLNK | 0o777, Target: "../" + g.word() + suffix, Mtime: g.mtime()}
		case k < 5 && len(g.recent) > 0:
			f = g.recent[g.rand.IntN(len(g.recent))] // hard link
		case k < 13 && len(g.recent) > 0:
			c := *g.recent[g.rand.IntN(len(g.recent))] // equal bytes
			f = &c
		default:
			f = g.regular(mode)
		}
		if g.rand.IntN(1000) == 0 {
			f.Xattrs = []toc.Xattr{{Name: "security.capability", Value: []byte("\x01\x00\x00\x02\x00\x04\x00\x00")}}
		}
		d.Children[name] = f
		if f.Content != nil {
			if g.recent = append(g.recent, f); len(g.recent) > 500 {
				g.recent = g.recent[1:]
			}
		}
		if g.left--; g.left <= 0 {
			return
		}
	}
}

// regular makes a regular file: sizes are log-normal around 3 KiB, as in
// distributions, 3% are empty, and some are large.
func (g *generator) regular(mode uint32) *toc.File {
	f := &toc.File{Mode: unix.S_IFREG | mode, Mtime: g.mtime()}
	size := int64(math.Exp(8 + 1.8*g.rand.NormFloat64()))
	zeros := g.rand.IntN(500) == 0
	if g.rand.IntN(33) == 0 || size <= 0 {
		return f
	}
	size = min(size, 200<<20)
	g.contents++
	name := [3]uint64{g.seed, g.contents}
	if g.change.Float64() < g.share {
		name[2] = g.version + 1
		size += int64(g.change.IntN(100))
	}
	id := func(piece uint64) segment.ID {
		b := binary.LittleEndian.AppendUint64(nil, name[0])
		b = binary.LittleEndian.AppendUint64(b, name[1])
		b = binary.LittleEndian.AppendUint64(b, name[2])
		return segment.Sum(binary.LittleEndian.AppendUint64(b, piece))
	}
	f.Content = &toc.Bytes{ID: id(0), Size: size}
	if size <= segment.MaxLength {
		s := toc.Segment{ID: f.Content.ID, Length: uint32(size)}
		if zeros {
			s.ID = segment.ID{}
		}
		f.Content.Segments = []toc.Segment{s}
		return f
	}
	for at := int64(0); at < size; {
		n := min(size-at, int64(segment.MinLength+len(f.Content.Segments)%7*100_003))
		s := toc.Segment{ID: id(uint64(at) + 1), Offset: at, Length: uint32(n)}
		if zeros && len(f.Content.Segments)%3 == 1 {
			s.ID = segment.ID{}
		}
		f.Content.Segments = append(f.Content.Segments, s)
		at += n
	}
	return f
}
