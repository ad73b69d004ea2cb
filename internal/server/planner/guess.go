package planner

import (
	"bytes"
	"cmp"
	"context"
	"debug/elf"
	"io"
	"math"
	"path"
	"slices"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/toc"
)

// Guess orders an image's segments by when a container is likely to need them,
// without any trace of a run:
//
//  1. what is read to find the user, and by the dynamic linker of any program;
//  2. what the entrypoint and the command name, scripts before the interpreters that their
//     first lines name, and before the small programs that they mention; of large programs, and of all the
//     libraries that these are linked with, what is read to link them: symbols, relocations and data;
//     after the first of all these, small files that nearly every program opens;
//  3. large programs that scripts mention, and what scripts among what is mentioned mention;
//  4. the code of these programs;
//  5. the configuration of these programs with the libraries that it names; what Python's start and the
//     scripts found import, as far as their text tells it; small files of the application: the
//     working directory and directories that the command and the configuration name;
//  6. the code of the libraries, of which few functions run at the start, and that of large programs;
//  7. the standard library of each interpreter found, and the application;
//  8. the rest, small files first; documentation, translations, headers and
//     static libraries last.
//
// Contents that cannot be read are skipped: a guess never fails. It reads a bounded number of files, and
// bytes of them.
func Guess(ctx context.Context, c *Contents, config ocispec.ImageConfig) Order {
	g := guesser{
		ctx: ctx, c: c, t: c.TOC, config: config,
		ranked: make([]bool, len(c.TOC.Contents)),
		seen:   map[int]bool{},
		order:  make(Order, len(c.TOC.Segments)),
	}
	for i := range g.order {
		g.order[i] = unranked
	}
	g.env = map[string]string{"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	for _, e := range config.Env {
		if k, v, ok := strings.Cut(e, "="); ok {
			g.env[k] = v
		}
	}
	for _, p := range firstFiles {
		g.path(p)
	}
	g.command()
	g.rankCode(g.programs, largeProgram)
	g.configured()
	g.python()
	g.application()
	g.rankCode(g.code, math.MaxInt64)
	g.rankCode(g.programs, math.MaxInt64)
	g.libraries()
	g.rest()
	return g.order
}

// firstFiles are read before a program runs, or by its dynamic linker before all else.
var firstFiles = []string{"/etc/passwd", "/etc/group", "/etc/ld.so.cache", "/etc/ld.so.preload"}

// startFiles are opened by nearly every program before anything else.
var startFiles = []string{
	"/etc/nsswitch.conf", "/etc/hosts",
	"/etc/host.conf", "/etc/resolv.conf", "/etc/localtime", "/etc/timezone", "/etc/services", "/etc/protocols",
	"/usr/lib/locale/C.utf8/LC_CTYPE",
	"/usr/lib/locale/C.utf8/LC_IDENTIFICATION", "/usr/lib/locale/C.utf8/LC_MEASUREMENT", "/usr/lib/locale/C.utf8/LC_TELEPHONE",
	"/usr/lib/locale/C.utf8/LC_ADDRESS", "/usr/lib/locale/C.utf8/LC_NAME", "/usr/lib/locale/C.utf8/LC_PAPER",
	"/usr/lib/locale/C.utf8/LC_MESSAGES/SYS_LC_MESSAGES", "/usr/lib/locale/C.utf8/LC_MONETARY", "/usr/lib/locale/C.utf8/LC_COLLATE",
	"/usr/lib/locale/C.utf8/LC_TIME", "/usr/lib/locale/C.utf8/LC_NUMERIC", "/usr/lib/x86_64-linux-gnu/gconv/gconv-modules.cache",
	"/etc/ssl/openssl.cnf", "/usr/lib/ssl/openssl.cnf", "/etc/terminfo/x/xterm", "/etc/os-release",
	"/lib/x86_64-linux-gnu/libnss_files.so.2", "/lib/x86_64-linux-gnu/libnss_dns.so.2", "/lib/x86_64-linux-gnu/libresolv.so.2",
	"/lib/aarch64-linux-gnu/libnss_files.so.2", "/lib/aarch64-linux-gnu/libnss_dns.so.2", "/lib/aarch64-linux-gnu/libresolv.so.2",
}

const (
	maxPrograms = 400      // looked into
	maxScript   = 64 << 10 // bytes of a script that are looked into
	maxMentions = 60       // programs mentioned by one script
	maxScripts  = 100      // files of a directory of scripts
	maxWords    = 20_000   // of all scripts

	// smallProgram is what a program or library may have, bytes, to be ranked whole with what it is linked with.
	smallProgram = 256 << 10
	// largeShell is the same of a shell.
	largeShell = 2 << 20
	// largeProgram is what a program has of which little is needed at once.
	largeProgram = 16 << 20
)

type guesser struct {
	ctx    context.Context
	c      *Contents
	t      *toc.TOC
	config ocispec.ImageConfig
	env    map[string]string

	next     uint32       // rank
	ranked   []bool       // by content: it has all its ranks
	seen     map[int]bool // inodes of programs looked into
	names    []string     // of programs looked into
	served   []string     // paths that configuration names
	programs []int        // inodes of programs whose code has no ranks yet
	code     []int        // the same of libraries
	pythons  []pythonRun
	order    Order
	langs    []*language // in the order found
	all      []named     // all contents; made by files
	conf     []string    // directories of ld.so.conf
	confRead bool
}

const unranked = math.MaxUint32

// rank gives the segments of an inode's content the next ranks.
func (g *guesser) rank(inode int) {
	if n := g.t.Inodes[inode].Content; n >= 0 && !g.ranked[n] {
		g.ranked[n] = true
		g.rankRange(inode, 0, math.MaxInt64)
	}
}

// rankRange ranks the segments that hold some of the bytes from one offset up to
// another.
func (g *guesser) rankRange(inode int, from, to int64) {
	n := g.t.Inodes[inode].Content
	if n < 0 {
		return
	}
	c := &g.t.Contents[n]
	for i := c.First; i < c.First+c.Segments; i++ {
		s := &g.t.Segments[i]
		if g.order[i] == unranked && s.Offset < to && s.Offset+int64(s.Length) > from {
			g.order[i] = g.next
			g.next++
		}
	}
}

// maxLinked bounds what is ranked at the start of a library for its symbols and
// relocations.
const maxLinked = 2 << 20

// readAround is how far before and behind a page that is touched Linux reads what is mapped, bytes: half
// of the read-ahead that a mount has by default (mm/filemap.c, do_sync_mmap_readahead). What is
// read waits for all of it.
const readAround = 64 << 10

// rankLinked ranks what a program or library is linked with: what the dynamic
// linker reads and writes, from the headers to the start of the code, and the writable data; and where
// it begins, or its constructors are.
func (g *guesser) rankLinked(f *elf.File, inode int) {
	g.rankRange(inode, 0, 1)
	for _, p := range f.Progs {
		if p.Type == elf.PT_LOAD && p.Flags&elf.PF_X != 0 && p.Off < maxLinked {
			g.rankRange(inode, 0, int64(p.Off)+readAround)
			break
		}
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_LOAD && p.Flags&elf.PF_W != 0 && p.Off < 1<<62 && p.Filesz < 1<<62 {
			g.rankRange(inode, int64(p.Off)-readAround, int64(p.Off)+int64(p.Filesz))
		}
	}
	for _, at := range starts(f) {
		g.rankRange(inode, at-readAround, at+readAround)
	}
}

// starts returns where in an ELF file the code is that runs first: its entry and its constructors.
func starts(f *elf.File) (offsets []int64) {
	add := func(addr uint64) {
		for _, p := range f.Progs {
			if p.Type == elf.PT_LOAD && addr >= p.Vaddr && addr-p.Vaddr < p.Filesz && p.Off < 1<<62 && p.Filesz < 1<<62 {
				offsets = append(offsets, int64(p.Off+addr-p.Vaddr))
			}
		}
	}
	if f.Entry != 0 {
		add(f.Entry)
	}
	if d := f.SectionByType(elf.SHT_DYNAMIC); d != nil && harmless(f, d) {
		if init, err := f.DynValue(elf.DT_INIT); err == nil && len(init) == 1 {
			add(init[0])
		}
	}
	for _, s := range f.Sections {
		if s.Type != elf.SHT_INIT_ARRAY || s.Flags&elf.SHF_COMPRESSED != 0 || s.Size > maxConstructors*8 || f.Class != elf.ELFCLASS64 {
			continue
		}
		b, err := s.Data()
		for ; err == nil && len(b) >= 8; b = b[8:] {
			add(f.ByteOrder.Uint64(b))
		}
	}
	return offsets
}

// maxConstructors bounds what is looked at of one file.
const maxConstructors = 1000

// rankCode ranks what has no ranks yet of programs and libraries that are not larger than that.
func (g *guesser) rankCode(inodes []int, most int64) {
	for _, i := range inodes {
		if g.t.Inodes[i].Size <= most {
			g.rank(i)
		}
	}
}

func (g *guesser) path(p string) {
	if i, ok := g.t.Resolve(p); ok {
		g.rank(i)
	}
}

// file resolves a path to a regular file that is not empty.
func (g *guesser) file(p string) (int, bool) {
	i, ok := g.t.Resolve(p)
	return i, ok && g.t.Inodes[i].Content >= 0
}

// find resolves a word of a command line: by PATH, or as a path below dir.
func (g *guesser) find(word, dir string) (p string, inode int, ok bool) {
	if word == "" || len(word) > 1024 || strings.HasPrefix(word, "-") {
		return "", 0, false
	}
	if strings.Contains(word, "/") {
		p := path.Join("/", dir, word)
		if strings.HasPrefix(word, "/") {
			p = path.Clean(word)
		}
		i, ok := g.file(p)
		return p, i, ok
	}
	for _, d := range strings.Split(g.env["PATH"], ":") {
		p := path.Join("/", d, word)
		if i, ok := g.file(p); ok && g.t.Inodes[i].Mode&0o111 != 0 {
			return p, i, true
		}
	}
	return "", 0, false
}

// command ranks what the image's command names.
func (g *guesser) command() {
	argv := slices.Concat(g.config.Entrypoint, g.config.Cmd)
	var mentions []string
	for i, word := range argv {
		before := ""
		if i > 0 {
			before = argv[i-1]
		}
		said := g.word(word, before)
		if i == 0 {
			g.opened()
		}
		// A script runs its small programs before it becomes the one that the image is for.
		for _, m := range said[:min(len(said), maxWords)] {
			if p, inode, ok := g.find(m, g.config.WorkingDir); ok && g.t.Inodes[inode].Size <= smallProgram {
				mentions = append(mentions, g.program(p, inode)...)
			}
		}
		mentions = append(mentions, said...)
	}
	g.opened()
	// Large ones come after all that is sure, and what scripts among them mention after it.
	for i := 0; i < min(len(mentions), maxWords); i++ {
		if p, inode, ok := g.find(mentions[i], g.config.WorkingDir); ok {
			mentions = append(mentions, g.program(p, inode)...)
		} else if strings.HasPrefix(mentions[i], "/") { // a directory of scripts
			mentions = append(mentions, g.scripts(path.Clean(mentions[i]))...)
		}
	}
}

// word ranks what a word of the command names. It returns words that may name programs.
func (g *guesser) word(word, before string) (mentions []string) {
	dir := g.config.WorkingDir
	if before == "-m" {
		g.pythons = append(g.pythons, pythonRun{module: word})
	}
	if p, inode, ok := g.find(word, dir); ok {
		return g.program(p, inode)
	}
	if before == "-c" || strings.ContainsAny(word, " ;") { // a shell's command
		return words([]byte(word))
	}
	if word == "" || strings.HasPrefix(word, "-") {
		return nil
	}
	if inode, ok := g.file(path.Join("/", dir, word)); ok { // next to the application, as in "python app.py"
		return g.program(path.Join("/", dir, word), inode)
	}
	if before != "" { // a module, as in "gunicorn site.wsgi:application"
		module, _, _ := strings.Cut(word, ":")
		g.pythons = append(g.pythons, pythonRun{module: module})
	}
	return nil
}

// opened ranks what nearly every program opens.
func (g *guesser) opened() {
	locale := cmp.Or(g.env["LC_ALL"], g.env["LANG"])
	if locale != "" && !strings.HasPrefix(locale, "C") && locale != "POSIX" {
		g.path("/usr/lib/locale/locale-archive")
	}
	for _, p := range startFiles {
		g.path(p)
	}
	if i, ok := g.file("/bin/sh"); ok {
		g.program("/bin/sh", i)
	}
}

// scripts does for each file of a directory what program does.
func (g *guesser) scripts(dir string) (mentions []string) {
	i, ok := g.t.Resolve(dir)
	if !ok || !g.t.Inodes[i].IsDir() || slices.Contains(systemDirs, dir) || g.t.Inodes[i].Children > maxScripts {
		return nil
	}
	for _, d := range g.t.Children(i) {
		p := path.Join(dir, d.Name)
		if inode, ok := g.file(p); ok && g.t.Inodes[inode].Size <= maxScript {
			mentions = append(mentions, g.program(p, inode)...)
		}
	}
	return mentions
}

// program ranks a program and what it needs to start. It returns the words of a
// shell script, which may be programs.
func (g *guesser) program(p string, inode int) (mentions []string) {
	if g.seen[inode] || len(g.seen) > maxPrograms || g.ctx.Err() != nil {
		return nil
	}
	g.seen[inode] = true
	size := g.t.Inodes[inode].Size
	r := g.c.Open(g.ctx, inode)
	head := make([]byte, min(size, 256))
	if _, err := r.ReadAt(head, 0); err != nil && err != io.EOF {
		g.rank(inode)
		return nil
	}
	switch {
	case bytes.HasPrefix(head, []byte(elf.ELFMAG)):
		g.language(path.Base(p))
		g.names = append(g.names, path.Base(p))
		g.elf(p, r, inode)
		if size > smallProgram && !(size <= largeShell && strings.HasSuffix(p, "sh")) {
			g.programs = append(g.programs, inode)
			return nil
		}
	case strings.HasSuffix(p, ".py"):
		g.rank(inode)
		g.pythons = append(g.pythons, pythonRun{script: p, inode: inode})
	case bytes.HasPrefix(head, []byte("#!")):
		if size <= maxScript { // it is read before its interpreter
			g.rank(inode)
		}
		line, _, _ := strings.Cut(string(head[2:]), "\n")
		shell := false
		for i, word := range strings.Fields(line) {
			if i > 1 && path.Base(strings.Fields(line)[0]) != "env" {
				break
			}
			if ip, in, ok := g.find(word, "/"); ok {
				g.program(ip, in)
				shell = shell || strings.HasSuffix(path.Base(ip), "sh")
				if strings.HasPrefix(path.Base(ip), "python") {
					g.pythons = append(g.pythons, pythonRun{script: p, inode: inode})
				}
			}
		}
		g.rank(inode)
		if shell {
			b := make([]byte, min(size, maxScript))
			if n, err := r.ReadAt(b, 0); err == nil || err == io.EOF {
				mentions = words(b[:n])
			}
		}
	}
	g.rank(inode)
	return mentions
}

// words lists the words of a script that could be programs, each once.
func words(script []byte) []string {
	var out []string
	for line := range bytes.Lines(script) {
		line = bytes.TrimSpace(line)
		if bytes.HasPrefix(line, []byte("#")) {
			continue
		}
		for _, w := range bytes.FieldsFunc(line, func(r rune) bool { return strings.ContainsRune(" \t\n;|&()`'\"{}<>=$", r) }) {
			if s := string(w); len(s) > 1 && !slices.Contains(out, s) {
				if out = append(out, s); len(out) >= 40*maxMentions {
					return out
				}
			}
		}
	}
	return out
}

// elf ranks what a program or library is linked with, of itself and then of its
// libraries. What is no ELF file is ranked whole.
func (g *guesser) elf(p string, r io.ReaderAt, inode int) {
	// debug/elf does not promise not to panic on hostile files.
	defer func() {
		if recover() != nil {
			g.rank(inode)
		}
	}()
	g.rankRange(inode, 0, 1)
	f, err := elf.NewFile(r)
	if err != nil {
		g.rank(inode)
		return
	}
	g.rankLinked(f, inode)
	if d := f.SectionByType(elf.SHT_DYNAMIC); d == nil || !harmless(f, d) {
		return
	}
	for _, prog := range f.Progs {
		if prog.Type != elf.PT_INTERP || prog.Filesz > 4096 {
			continue
		}
		name := make([]byte, prog.Filesz)
		if _, err := prog.ReadAt(name, 0); err == nil {
			if i, ok := g.file(strings.TrimRight(string(name), "\x00")); ok {
				g.rank(i)
				g.seen[i] = true
			}
		}
	}
	needed, err := f.DynString(elf.DT_NEEDED)
	if err != nil {
		return
	}
	origin := path.Dir(p)
	if i, ok := g.t.Lookup(p); ok && g.t.Inodes[i].IsSymlink() {
		target := g.t.Inodes[i].Target
		if !strings.HasPrefix(target, "/") {
			target = path.Join(origin, target)
		}
		origin = path.Dir(target)
	}
	var dirs []string
	add := func(list []string) {
		for _, l := range list {
			for _, d := range strings.Split(l, ":") {
				d = strings.NewReplacer("$ORIGIN", origin, "${ORIGIN}", origin).Replace(d)
				if strings.HasPrefix(d, "/") {
					dirs = append(dirs, d)
				}
			}
		}
	}
	runpath, _ := f.DynString(elf.DT_RUNPATH)
	if len(runpath) == 0 {
		rpath, _ := f.DynString(elf.DT_RPATH)
		add(rpath)
	}
	add([]string{g.env["LD_LIBRARY_PATH"]})
	add(runpath)
	add(g.confDirs())
	add(defaultDirs(f.Machine))
	for _, name := range needed {
		candidates := []string{name}
		if !strings.Contains(name, "/") {
			candidates = candidates[:0]
			for _, d := range dirs {
				candidates = append(candidates, path.Join(d, name))
			}
		}
		for _, lib := range candidates {
			if i, ok := g.file(lib); ok {
				if !g.seen[i] && len(g.seen) <= maxPrograms && g.ctx.Err() == nil {
					g.seen[i] = true
					g.language(name)
					g.elf(lib, g.c.Open(g.ctx, i), i)
					if strings.HasPrefix(name, "libc.") || g.t.Inodes[i].Size <= smallProgram {
						g.rank(i) // everything runs much of libc
					}
					g.code = append(g.code, i)
				}
				break
			}
		}
	}
}

// harmless reports whether reading a dynamic section and its strings takes no
// more memory than real files do: sections may be bombs of zlib.
func harmless(f *elf.File, dynamic *elf.Section) bool {
	if int(dynamic.Link) >= len(f.Sections) {
		return false
	}
	for _, s := range []*elf.Section{dynamic, f.Sections[dynamic.Link]} {
		if s.Flags&elf.SHF_COMPRESSED != 0 || s.FileSize > 16<<20 {
			return false
		}
	}
	return true
}

func defaultDirs(m elf.Machine) []string {
	arch := map[elf.Machine]string{
		elf.EM_X86_64: "x86_64-linux-gnu", elf.EM_AARCH64: "aarch64-linux-gnu", elf.EM_ARM: "arm-linux-gnueabihf",
		elf.EM_386: "i386-linux-gnu", elf.EM_RISCV: "riscv64-linux-gnu", elf.EM_PPC64: "powerpc64le-linux-gnu", elf.EM_S390: "s390x-linux-gnu",
	}[m]
	var dirs []string
	if arch != "" {
		dirs = append(dirs, "/usr/local/lib/"+arch, "/lib/"+arch, "/usr/lib/"+arch)
	}
	return append(dirs, "/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib")
}

// confDirs reads the directories that /etc/ld.so.conf and its includes name.
func (g *guesser) confDirs() []string {
	if g.confRead {
		return g.conf
	}
	g.confRead = true
	files := []string{"/etc/ld.so.conf"}
	if i, ok := g.t.Resolve("/etc/ld.so.conf.d"); ok {
		for _, d := range g.t.Children(i) {
			if strings.HasSuffix(d.Name, ".conf") {
				files = append(files, "/etc/ld.so.conf.d/"+d.Name)
			}
		}
	}
	for _, name := range files {
		i, ok := g.file(name)
		if !ok {
			continue
		}
		b := make([]byte, min(g.t.Inodes[i].Size, maxScript))
		if n, err := g.c.Open(g.ctx, i).ReadAt(b, 0); err == nil || err == io.EOF {
			for line := range strings.Lines(string(b[:n])) {
				if line = strings.TrimSpace(line); strings.HasPrefix(line, "/") {
					g.conf = append(g.conf, line)
				}
			}
		}
	}
	return g.conf
}
