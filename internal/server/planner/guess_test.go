package planner_test

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc/toctest"
	"hydrofoil.dev/foil/internal/server/planner"
	"hydrofoil.dev/foil/internal/server/planner/plannertest"
)

// guess stores the files and returns their paths in the guessed order.
func guess(t *testing.T, files plannertest.Files, config ocispec.ImageConfig) []string {
	t.Helper()
	w := plannertest.New(t, nil)
	x, r := w.Rootfs(t, digest.FromString("guess"), files)
	ix, err := planner.Build(context.Background(), x, r.TOC, w.Places)
	if err != nil {
		t.Fatal(err)
	}
	order := planner.Guess(context.Background(), &planner.Contents{TOC: x, Index: ix, Objects: w.Objects}, config)
	if len(order) != len(x.Segments) {
		t.Fatalf("%d ranks for %d segments", len(order), len(x.Segments))
	}
	all := slices.Clone(order)
	slices.Sort(all)
	for i, rank := range all {
		if int(rank) != i {
			t.Fatalf("rank %d is missing or twice", i)
		}
	}
	type ranked struct {
		path string
		rank uint32
	}
	var list []ranked
	x.Walk(func(p string, i int) {
		if n := x.Inodes[i]; n.Content >= 0 && n.IsRegular() {
			list = append(list, ranked{p, order[x.Contents[n.Content].First]})
		}
	})
	slices.SortFunc(list, func(a, b ranked) int { return int(a.rank) - int(b.rank) })
	var out []string
	for _, r := range list {
		out = append(out, r.path)
	}
	return out
}

// elfFile makes a small ELF file that asks for an interpreter and libraries.
func elfFile(interp, runpath string, needed ...string) string {
	dynstr := []byte{0}
	str := func(s string) uint64 {
		at := len(dynstr)
		dynstr = append(append(dynstr, s...), 0)
		return uint64(at)
	}
	var dyn bytes.Buffer
	entry := func(tag elf.DynTag, v uint64) {
		binary.Write(&dyn, binary.LittleEndian, []uint64{uint64(tag), v})
	}
	for _, n := range needed {
		entry(elf.DT_NEEDED, str(n))
	}
	if runpath != "" {
		entry(elf.DT_RUNPATH, str(runpath))
	}
	entry(elf.DT_NULL, 0)
	const headers = 64 + 56
	interpAt := uint64(headers)
	dynAt := interpAt + uint64(len(interp)) + 1
	strAt := dynAt + uint64(dyn.Len())
	shstr := "\x00.dynamic\x00.dynstr\x00.shstrtab\x00"
	shstrAt := strAt + uint64(len(dynstr))
	sections := shstrAt + uint64(len(shstr))
	var b bytes.Buffer
	binary.Write(&b, binary.LittleEndian, elf.Header64{
		Ident: [16]byte{0x7f, 'E', 'L', 'F', 2, 1, 1}, Type: uint16(elf.ET_DYN), Machine: uint16(elf.EM_X86_64), Version: 1,
		Phoff: 64, Shoff: sections, Ehsize: 64, Phentsize: 56, Phnum: 1, Shentsize: 64, Shnum: 4, Shstrndx: 3,
	})
	binary.Write(&b, binary.LittleEndian, elf.Prog64{Type: uint32(elf.PT_INTERP), Off: interpAt, Filesz: uint64(len(interp)) + 1})
	b.WriteString(interp + "\x00")
	b.Write(dyn.Bytes())
	b.Write(dynstr)
	b.WriteString(shstr)
	binary.Write(&b, binary.LittleEndian, []elf.Section64{
		{},
		{Name: 1, Type: uint32(elf.SHT_DYNAMIC), Off: dynAt, Size: uint64(dyn.Len()), Link: 2, Entsize: 16},
		{Name: 10, Type: uint32(elf.SHT_STRTAB), Off: strAt, Size: uint64(len(dynstr))},
		{Name: 18, Type: uint32(elf.SHT_STRTAB), Off: shstrAt, Size: uint64(len(shstr))},
	})
	return b.String()
}

func TestGuess(t *testing.T) {
	const ld = "/lib64/ld-linux-x86-64.so.2"
	files := plannertest.Files{
		"/usr/local/bin/entrypoint.sh":              "#!/usr/bin/env bash\n# gosu in a comment does not count: false\nexec gosu redis \"$@\"\n",
		"/usr/bin/env":                              elfFile(ld, "", "libc.so.6") + "env",
		"/bin/bash":                                 elfFile(ld, "", "libtinfo.so.6", "libc.so.6"),
		"/usr/bin/gosu":                             "gosu, static",
		"/bin/false":                                "not needed",
		"/usr/local/bin/redis-server":               elfFile(ld, "$ORIGIN/../lib:/opt/lib", "libm.so.6", "libmine.so", "libopt.so", "libconf.so", "libnone.so"),
		"/usr/local/lib/libmine.so":                 elfFile("", "", "libdeep.so"),
		"/opt/lib/libopt.so":                        "no ELF at all",
		"/conf/libconf.so":                          "from ld.so.conf.d",
		"/etc/ld.so.conf.d/x.conf":                  "# comment\n/conf\n",
		"/usr/lib/x86_64-linux-gnu/libdeep.so":      "deep",
		"/usr/lib/x86_64-linux-gnu/libc.so.6":       "the c library",
		"/usr/lib/x86_64-linux-gnu/libtinfo.so.6":   "-> libtinfo.so.6.4",
		"/usr/lib/x86_64-linux-gnu/libtinfo.so.6.4": "terminals",
		"/usr/lib/x86_64-linux-gnu/libm.so.6":       "mathematics",
		"/lib64/ld-linux-x86-64.so.2":               "the linker",
		"/etc/ld.so.cache":                          "cache",
		"/etc/passwd":                               "root",
		"/etc/redis.conf":                           "port 1",
		"/data/dump":                                strings.Repeat("d", 100),
		"/usr/share/doc/redis/README":               "d",
		"/usr/include/x.h":                          "h",
		"/srv/small":                                "s",
		"/srv/larger":                               "larger",
	}
	got := guess(t, files, ocispec.ImageConfig{
		Entrypoint: []string{"entrypoint.sh"}, Cmd: []string{"redis-server", "/etc/redis.conf"}, WorkingDir: "/data",
	})
	want := []string{
		"/etc/passwd", "/etc/ld.so.cache", "/usr/local/bin/entrypoint.sh",
		"/usr/bin/env", ld, "/usr/lib/x86_64-linux-gnu/libc.so.6", "/bin/bash", "/usr/lib/x86_64-linux-gnu/libtinfo.so.6.4",
		"/usr/bin/gosu",
		"/usr/local/bin/redis-server", "/usr/lib/x86_64-linux-gnu/libm.so.6", "/usr/local/lib/libmine.so",
		"/usr/lib/x86_64-linux-gnu/libdeep.so", "/opt/lib/libopt.so", "/conf/libconf.so",
		"/etc/redis.conf",
		"/data/dump",
		"/srv/small", "/srv/larger", "/bin/false", "/etc/ld.so.conf.d/x.conf",
		"/usr/share/doc/redis/README", "/usr/include/x.h",
	}
	// Equal sizes fall back to paths; what matters is above.
	if !slices.Equal(got[:17], want[:17]) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if !slices.Equal(got[len(got)-2:], []string{"/usr/include/x.h", "/usr/share/doc/redis/README"}) {
		t.Errorf("last are %v", got[len(got)-2:])
	}
	if slices.Index(got, "/srv/small") > slices.Index(got, "/srv/larger") {
		t.Error("a larger file comes first")
	}
}

// Nothing runs before its libraries are there, but little of a large program is
// needed at once.
func TestGuessLargeProgram(t *testing.T) {
	var rest strings.Builder
	for i := range 400_000 {
		fmt.Fprintf(&rest, "%d ", i*i)
	}
	w := plannertest.New(t, nil)
	x, r := w.Rootfs(t, digest.FromString("large"), plannertest.Files{
		"/bin/large":     elfFile("", "/lib", "libone.so") + rest.String(),
		"/lib/libone.so": "library",
	})
	ix, err := planner.Build(context.Background(), x, r.TOC, w.Places)
	if err != nil {
		t.Fatal(err)
	}
	order := planner.Guess(context.Background(), &planner.Contents{TOC: x, Index: ix, Objects: w.Objects},
		ocispec.ImageConfig{Entrypoint: []string{"large"}})
	ranks := func(path string) []uint32 {
		i, _ := x.Lookup(path)
		c := x.Contents[x.Inodes[i].Content]
		return order[c.First : c.First+c.Segments]
	}
	large := ranks("/bin/large")
	if len(large) < 3 || large[0] != 0 || large[1] != 2 || large[2] != 3 || ranks("/lib/libone.so")[0] != 1 {
		t.Errorf("program %v, library %v", large, ranks("/lib/libone.so"))
	}
}

// Of a library what it is linked with comes first, its code when all else that
// is sure has come.
func TestGuessLibraryCode(t *testing.T) {
	const code, entry, data, end = 1_500_000, 3_000_000, 3_500_000, 4_000_000
	var b bytes.Buffer
	binary.Write(&b, binary.LittleEndian, elf.Header64{
		Ident: [16]byte{0x7f, 'E', 'L', 'F', 2, 1, 1}, Type: uint16(elf.ET_DYN), Machine: uint16(elf.EM_X86_64), Version: 1,
		Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 3, Shentsize: 64, Entry: 0x10000 + entry,
	})
	binary.Write(&b, binary.LittleEndian, []elf.Prog64{
		{Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R), Off: 0, Filesz: code},
		{Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_X), Off: code, Vaddr: 0x10000 + code, Filesz: data - code},
		{Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_W), Off: data, Filesz: end - data},
	})
	for i := 0; b.Len() < end; i++ {
		fmt.Fprintf(&b, "%d ", i*i)
	}
	w := plannertest.New(t, nil)
	x, r := w.Rootfs(t, digest.FromString("library"), plannertest.Files{
		"/bin/program": elfFile("", "/lib", "libone.so"), "/lib/libone.so": b.String()[:end], "/etc/hosts": "here",
	})
	ix, err := planner.Build(context.Background(), x, r.TOC, w.Places)
	if err != nil {
		t.Fatal(err)
	}
	order := planner.Guess(context.Background(), &planner.Contents{TOC: x, Index: ix, Objects: w.Objects},
		ocispec.ImageConfig{Entrypoint: []string{"program"}})
	rank := func(path string, off int64) uint32 {
		i, _ := x.Lookup(path)
		c := x.Contents[x.Inodes[i].Content]
		for n := c.First; n < c.First+c.Segments; n++ {
			if s := x.Segments[n]; s.Offset <= off && off < s.Offset+int64(s.Length) {
				return order[n]
			}
		}
		t.Fatalf("%s has no byte %d", path, off)
		return 0
	}
	got := []uint32{
		rank("/bin/program", 0), rank("/lib/libone.so", 0), rank("/lib/libone.so", code), rank("/lib/libone.so", data),
		rank("/lib/libone.so", end-1), rank("/lib/libone.so", entry), rank("/etc/hosts", 0), rank("/lib/libone.so", (code+data)/2),
	}
	if !slices.IsSorted(got) || got[3] >= got[6] || got[6] >= got[7] {
		t.Errorf("program, linked, code, data, its end, entry, hosts, the middle of the code: %v", got)
	}
}

func TestGuessLanguages(t *testing.T) {
	files := plannertest.Files{
		"/usr/local/bin/python3":                                           "-> python3.12",
		"/usr/local/bin/python3.12":                                        elfFile("", ""),
		"/usr/local/lib/python3.12/encodings/utf_8.py":                     "a large file of the standard library",
		"/usr/local/lib/python3.12/os.py":                                  "another large one",
		"/usr/local/lib/python3.12/json/decoder.py":                        "decoder",
		"/usr/local/lib/python3.12/test/support/x.py":                      "x",
		"/usr/local/lib/python3.12/site-packages/django/db/models/base.py": "django",
		"/app/manage.py":                                                   "#!/usr/local/bin/python3\nimport django\n",
		"/app/deep/a/b.py":                                                 "b",
		"/zzz":                                                             "z",
	}
	got := guess(t, files, ocispec.ImageConfig{Cmd: []string{"python3", "manage.py", "runserver"}, WorkingDir: "/app"})
	want := []string{
		"/usr/local/bin/python3.12", "/app/manage.py", "/usr/local/lib/python3.12/encodings/utf_8.py",
		"/usr/local/lib/python3.12/os.py", "/app/deep/a/b.py", "/usr/local/lib/python3.12/json/decoder.py",
		"/usr/local/lib/python3.12/site-packages/django/db/models/base.py", "/zzz",
		"/usr/local/lib/python3.12/test/support/x.py",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// What Python and its script import comes in the order in which it is imported, compiled where that is there.
func TestGuessPython(t *testing.T) {
	const lib, site = "/usr/lib/python3.11", "/usr/local/lib/python3.11/dist-packages"
	files := plannertest.Files{
		"/usr/bin/python3":                      "-> python3.11",
		"/usr/bin/python3.11":                   elfFile("", ""),
		lib + "/os.py":                          "import stat\nimport posixpath as path\n",
		lib + "/__pycache__/os.cpython-311.pyc": "compiled os",
		lib + "/stat.py":                        "# stat",
		lib + "/posixpath.py":                   "import genericpath",
		lib + "/genericpath.py":                 "# generic",
		lib + "/encodings/__init__.py":          "from . import aliases",
		lib + "/encodings/aliases.py":           "aliases = {}",
		lib + "/a_never.py":                     "",
		lib + "/a_small.py":                     "x",
		lib + "/lib-dynload/_fast.cpython-311-x86_64-linux-gnu.so": elfFile("", "/lib", "libfast.so"),
		"/lib/libfast.so":                "fast",
		site + "/z.pth":                  "import hook",
		site + "/hook.py":                "# a hook",
		site + "/server/__init__.py":     "__version__ = 1",
		site + "/server/app/__init__.py": "",
		site + "/server/app/main.py":     "from ..core import Core\nimport _fast\n",
		site + "/server/core.py":         "def f():\n  import server.late\nimport server.core, gone\n",
		site + "/server/late.py":         "late",
		"/usr/local/bin/serve":           "#!/usr/bin/python3\nimport sys\nfrom server.app.main import run\n",
		"/srv/site/wsgi.py":              "import shelf.book\n",
		"/srv/shelf/__init__.py":         "# shelf",
		"/srv/shelf/book.py":             "# book",
	}
	got := guess(t, files, ocispec.ImageConfig{Cmd: []string{"serve", "site.wsgi:application"}, WorkingDir: "/srv"})
	want := []string{
		"/usr/local/bin/serve", "/usr/bin/python3.11",
		lib + "/encodings/__init__.py", lib + "/encodings/aliases.py",
		lib + "/__pycache__/os.cpython-311.pyc", lib + "/stat.py", lib + "/posixpath.py", lib + "/genericpath.py",
		site + "/z.pth", site + "/hook.py",
		site + "/server/__init__.py", site + "/server/app/main.py", site + "/server/core.py",
		lib + "/lib-dynload/_fast.cpython-311-x86_64-linux-gnu.so", "/lib/libfast.so",
		"/srv/site/wsgi.py", "/srv/shelf/__init__.py", "/srv/shelf/book.py",
	}
	if len(got) < len(want) || !slices.Equal(got[:len(want)], want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// What the configuration of a server loads comes with it, also when it is an interpreter with a configuration of its own.
func TestGuessConfigured(t *testing.T) {
	files := plannertest.Files{
		"/usr/sbin/apache2":                      elfFile("", ""),
		"/etc/apache2/apache2.conf":              "Include mods-enabled/*.load\n",
		"/etc/apache2/mods-available/never.load": "LoadModule never /usr/lib/apache2/modules/never.so\n",
		"/etc/apache2/mods-available/php.load":   "LoadModule php_module /usr/lib/apache2/modules/libphp8.so\n",
		"/etc/apache2/mods-enabled/php.load":     "-> ../mods-available/php.load",
		"/etc/php/8/conf.d/20-curl.ini":          "; a comment\nextension=curl.so\n",
		"/usr/lib/apache2/modules/libphp8.so":    elfFile("", "/lib", "libxml.so"),
		"/usr/lib/apache2/modules/never.so":      elfFile("", "") + "never",
		"/usr/lib/php/2022/curl.so":              elfFile("", "/lib", "libcurl.so"),
		"/lib/libxml.so":                         "xml",
		"/lib/libcurl.so":                        "curl",
		"/lib/a.so":                              "a",
		"/srv/x":                                 "x",
	}
	got := guess(t, files, ocispec.ImageConfig{Cmd: []string{"apache2", "-D", "FOREGROUND"}})
	want := []string{
		"/usr/sbin/apache2", "/etc/apache2/apache2.conf", "/etc/apache2/mods-available/php.load",
		"/usr/lib/apache2/modules/libphp8.so", "/lib/libxml.so",
		"/etc/php/8/conf.d/20-curl.ini", "/usr/lib/php/2022/curl.so", "/lib/libcurl.so",
	}
	if len(got) < len(want) || !slices.Equal(got[:len(want)], want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// What an image says may be anything: the guess is worse then, and nothing else.
func TestGuessHostile(t *testing.T) {
	cut := elfFile("/ld", "", "liba.so")
	files := plannertest.Files{
		"/bin/a": cut[:len(cut)-30], "/bin/b": "\x7fELF", "/bin/c": "#!/bin/c\n", "/bin/d": "-> d",
		"/bin/e": elfFile("/bin/e", "$ORIGIN:relative:", "../../e", "e", ""), "/lib/e": elfFile("", "", "e"),
	}
	for _, argv := range [][]string{nil, {""}, {"a"}, {"b"}, {"c"}, {"d"}, {"e"}, {"/"}, {"../../.."}, {"sh", "-c", "a; $(b) `c`"}} {
		guess(t, files, ocispec.ImageConfig{Entrypoint: argv, WorkingDir: "../..", Env: []string{"PATH=:.:/bin", "X"}})
	}
}

// The libraries of this machine's own programs are found as its own dynamic
// linker finds them.
func TestGuessRealProgram(t *testing.T) {
	out, err := exec.Command("ldd", "/usr/bin/git").Output()
	if err != nil {
		t.Skipf("ldd /usr/bin/git: %v", err)
	}
	files := plannertest.Files{}
	add := func(p string) {
		b, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		files[p] = string(b)
	}
	add("/usr/bin/git")
	want := map[string]bool{"/usr/bin/git": true}
	for _, p := range regexp.MustCompile(`(/\S+) \(0x`).FindAllStringSubmatch(string(out), -1) {
		add(p[1])
		want[p[1]] = true
	}
	files["/a"] = "small"
	got := guess(t, files, ocispec.ImageConfig{Entrypoint: []string{"git"}})
	for _, p := range got[:len(want)] {
		if !want[p] {
			t.Errorf("%s is among the first %d", p, len(want))
		}
	}
}

func TestContents(t *testing.T) {
	w := plannertest.New(t, nil)
	big := strings.Repeat("0123456789abcdef", 150_000) + strings.Repeat("\x00", 300_000) + "end"
	x, r := w.Rootfs(t, digest.FromString("contents"), plannertest.Files{"/big": big, "/small": "small"})
	ix, err := planner.Build(context.Background(), x, r.TOC, w.Places)
	if err != nil {
		t.Fatal(err)
	}
	c := &planner.Contents{TOC: x, Index: ix, Objects: w.Objects}
	i, _ := x.Lookup("/big")
	at := c.Open(context.Background(), i)
	all, err := io.ReadAll(io.NewSectionReader(at, 0, int64(len(big))))
	if err != nil || string(all) != big {
		t.Errorf("%d of %d bytes, %v", len(all), len(big), err)
	}
	b := make([]byte, 10)
	if n, err := at.ReadAt(b, int64(len(big))-3); n != 3 || err != io.EOF || string(b[:3]) != "end" {
		t.Errorf("at the end: %d, %v", n, err)
	}
	if _, err := at.ReadAt(b, -1); err == nil {
		t.Error("read before the start")
	}
}

// BenchmarkGuess orders 84,000 files; no programs are looked into.
func BenchmarkGuess(b *testing.B) {
	x := toctest.Synthetic(benchFiles, 1)
	p := newPacker(segment.FrameTarget)
	p.layer("packs/1", x.Segments)
	c := &planner.Contents{TOC: x, Index: p.index(b, x)}
	for b.Loop() {
		planner.Guess(context.Background(), c, ocispec.ImageConfig{Cmd: []string{"nothing"}})
	}
}
