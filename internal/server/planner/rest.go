package planner

import (
	"cmp"
	"path"
	"slices"
	"strings"
)

// language notes that an interpreter is needed, from the name of its program or
// library.
func (g *guesser) language(base string) {
	base = strings.TrimPrefix(base, "lib")
	for i := range languages {
		if l := &languages[i]; strings.HasPrefix(base, l.name) && !slices.Contains(g.langs, l) {
			g.langs = append(g.langs, l)
		}
	}
}

// language is an interpreter and where it keeps what it loads first: patterns
// of directories (see matchDir) in the order of need.
type language struct {
	name string
	dirs []string
}

var languages = []language{
	{"python", []string{
		"*/lib/python3.*/encodings", "*/lib/python3.*/importlib", "*/lib/python3.*/collections",
		"*/lib/python3.*", "*/lib/python3.*/*", "*/lib/python3*/dist-packages/**", "*/lib/python3.*/site-packages/**",
	}},
	{"node", []string{"*/lib/node_modules/npm/bin"}},
	{"jli", []string{"*/lib/server", "*/conf/security/**", "*/lib/jvm/*/lib"}}, // java's launcher
	{"ruby", []string{
		"*/lib/ruby/3.*", "*/lib/ruby/3.*/rubygems/**", "*/lib/ruby/3.*/*", "*/lib/ruby/vendor_ruby/**", "*/lib/ruby/gems/**",
	}},
	{"perl", []string{"*/lib/*/perl-base/**", "*/lib/*/perl/5.*", "*/share/perl/5.*", "*/share/perl5"}},
	{"php", []string{"*/etc/php/**", "*/lib/php/*"}},
	{"beam", []string{"*/lib/erlang/lib/kernel-*/ebin", "*/lib/erlang/lib/stdlib-*/ebin"}},
}

// named is a content by its first name.
type named struct {
	path  string
	inode int
	size  int64
	class int // lower ones first
}

// files lists the contents that have no rank yet, by their first names.
func (g *guesser) files() []named {
	if g.all == nil {
		met := make([]bool, len(g.ranked))
		lateDirs := map[string]int{}
		g.t.Walk(func(p string, i int) {
			n := &g.t.Inodes[i]
			if n.Content < 0 || met[n.Content] {
				return
			}
			met[n.Content] = true
			dir := p[:strings.LastIndexByte(p, '/')+1]
			class, ok := lateDirs[dir]
			if !ok {
				class = lateDir(dir)
				lateDirs[dir] = class
			}
			g.all = append(g.all, named{p, i, n.Size, max(class, lateName(p))})
		})
	}
	var list []named
	for _, f := range g.all {
		if !g.ranked[g.t.Inodes[f.inode].Content] {
			list = append(list, f)
		}
	}
	return list
}

// libraries ranks the standard libraries of the interpreters, then the
// application.
func (g *guesser) libraries() {
	var patterns []string
	for _, l := range g.langs {
		patterns = append(patterns, l.dirs...)
	}
	application := g.applications()
	if len(patterns)+len(application) == 0 {
		return
	}
	const none = 1 << 30
	byDir := map[string]int{} // class of the files of a directory
	class := func(p string) int {
		dir := path.Dir(p)
		if c, ok := byDir[dir]; ok {
			return c
		}
		c := none
		for i, pattern := range patterns {
			if matchDir(pattern, strings.TrimSuffix(dir, "/__pycache__")) {
				c = i
				break
			}
		}
		for i, a := range application {
			if c == none && (dir == a || strings.HasPrefix(dir, a+"/")) {
				c = len(patterns) + i
			}
		}
		byDir[dir] = c
		return c
	}
	var list []named
	for _, f := range g.files() {
		if f.class > 0 { // late
			continue
		}
		if f.class = class(f.path); f.class < none {
			list = append(list, f)
		}
	}
	g.rankAll(list)
}

const (
	smallFile = 64 << 10
	maxSmall  = 8 << 20 // bytes of small files of the application that come before the code of libraries
)

// application ranks small files of the application.
func (g *guesser) application() {
	dirs := g.applications()
	if len(dirs) == 0 {
		return
	}
	within := map[string]bool{}
	var list []named
	for _, f := range g.files() {
		dir := path.Dir(f.path)
		in, known := within[dir]
		if !known {
			in = slices.ContainsFunc(dirs, func(a string) bool { return dir == a || strings.HasPrefix(dir, a+"/") })
			within[dir] = in
		}
		if in && f.class == 0 && f.size <= smallFile {
			list = append(list, f)
		}
	}
	slices.SortFunc(list, func(a, b named) int { return cmp.Or(cmp.Compare(a.size, b.size), cmp.Compare(a.path, b.path)) })
	left := int64(maxSmall)
	for _, f := range list {
		if left -= f.size; left < 0 {
			return
		}
		g.rank(f.inode)
	}
}

// applications are the directories of what the image was made for: its working
// directory, those that its command and the configuration of its programs name, and those to which
// these link.
func (g *guesser) applications() []string {
	var dirs []string
	add := func(p string) {
		p = path.Join("/", p)
		if i, ok := g.t.Resolve(p); ok && g.t.Inodes[i].IsDir() && strings.Count(p, "/") >= 1 && !slices.Contains(systemDirs, p) && !slices.Contains(dirs, p) {
			dirs = append(dirs, p)
		}
	}
	add(g.config.WorkingDir)
	// What a program that has a directory of its own in PATH was installed with.
	for _, d := range strings.Split(g.env["PATH"], ":") {
		if root, ok := strings.CutSuffix(path.Clean(d), "/bin"); ok {
			add(root)
			if name, ok := strings.CutPrefix(root, "/usr/lib/"); ok {
				add("/usr/share/" + name)
			}
		}
	}
	for _, word := range slices.Concat(g.config.Entrypoint, g.config.Cmd) {
		if strings.HasPrefix(word, "/") {
			add(word)
			add(path.Dir(word))
		}
	}
	for _, p := range g.served {
		add(p)
	}
	for _, dir := range slices.Clone(dirs) {
		i, _ := g.t.Resolve(dir)
		for _, d := range g.t.Children(i) {
			if target := g.t.Inodes[d.Inode].Target; g.t.Inodes[d.Inode].IsSymlink() && strings.HasPrefix(target, "/") && len(dirs) < maxApplications {
				add(path.Dir(target))
			}
		}
	}
	return dirs
}

const maxApplications = 100

// systemDirs hold much more than one application.
var systemDirs = []string{
	"/", "/bin", "/sbin", "/lib", "/usr", "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/local", "/usr/local/bin",
	"/usr/local/sbin", "/etc", "/var", "/opt", "/home", "/root", "/tmp", "/usr/share",
	"/var/lib", "/var/log", "/var/run", "/var/cache", "/var/tmp", "/run", "/dev", "/proc", "/sys", "/boot", "/usr/lib/x86_64-linux-gnu",
	"/usr/lib/aarch64-linux-gnu", "/lib/x86_64-linux-gnu", "/usr/include", "/usr/share/doc", "/usr/share/man", "/usr/src",
}

// matchDir matches a directory with a pattern: the "*" at its start stands for
// any directories, "/**" at its end for any below, another "*" is path.Match's.
func matchDir(pattern, dir string) bool {
	ps, ds := strings.Split(strings.TrimSuffix(pattern, "/**"), "/"), strings.Split(dir, "/")
	below := strings.HasSuffix(pattern, "/**")
	ps = ps[1:]
	for at := 0; at+len(ps) <= len(ds); at++ {
		ok := below || at+len(ps) == len(ds)
		for i := 0; ok && i < len(ps); i++ {
			ok, _ = path.Match(ps[i], ds[at+i])
		}
		if ok {
			return true
		}
	}
	return false
}

// lateDir and lateName say how unlikely it is that a program reads a file at
// its start: 0 is not unlikely.
func lateDir(dir string) int {
	for _, s := range []string{"/share/doc/", "/share/man/", "/share/info/", "/share/locale/", "/share/help/", "/usr/include/", "/share/bug/", "/share/lintian/"} {
		if strings.Contains(dir, s) {
			return 2
		}
	}
	for _, s := range []string{"/test/", "/tests/", "/var/lib/dpkg/", "/var/cache/", "/share/zoneinfo/", "/i18n/", "/gconv/", "/src/"} {
		if strings.Contains(dir, s) {
			return 1
		}
	}
	return 0
}

func lateName(p string) int {
	switch path.Ext(p) {
	case ".a", ".h", ".hpp", ".la", ".pc", ".md", ".rst", ".map", ".po":
		return 2
	}
	return 0
}

// rest ranks everything else.
func (g *guesser) rest() { g.rankAll(g.files()) }

func (g *guesser) rankAll(list []named) {
	slices.SortFunc(list, func(a, b named) int {
		return cmp.Or(cmp.Compare(a.class, b.class), cmp.Compare(a.size, b.size), cmp.Compare(a.path, b.path))
	})
	for _, f := range list {
		g.rank(f.inode)
	}
}
