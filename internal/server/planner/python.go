package planner

import (
	"bytes"
	"io"
	"maps"
	"path"
	"slices"
	"strings"

	"hydrofoil.dev/foil/internal/format/toc"
)

// A Python program begins by importing: thousands of small files, one after the other, each of which would
// be a round trip. What a module imports when it is imported itself stands in its text: import
// statements outside of functions. They are followed in the order in which Python runs them. A module is
// read from its compiled form, where the image has one, and its text only to see what it imports.
const (
	maxModules     = 4000
	maxModuleBytes = 48 << 20 // of text that is looked into
	maxModuleText  = 1 << 20  // of one module; a longer one imports what is not followed
	// wholeExtension is what an extension may have, bytes, to be ranked whole: to begin it runs most of its code.
	wholeExtension = 2 << 20
)

// pythonRun is what a command has Python run: a script, or a module.
type pythonRun struct {
	script string
	inode  int
	module string
}

// pythonStart is what Python imports before anything else (Python 3.11, Lib/site.py).
var pythonStart = []string{
	"encodings", "encodings.aliases", "encodings.utf_8", "io", "abc", "site", "os", "stat", "posixpath", "genericpath",
	"_collections_abc", "codecs", "_sitebuiltins", "encodings.latin_1", "sitecustomize", "usercustomize",
}

// python ranks what Python imports at the start of what the command names.
func (g *guesser) python() {
	lib := g.pythonLibrary()
	if lib == "" {
		return
	}
	version := path.Base(lib)
	dirs := []string{lib, lib + "/lib-dynload"}
	sites := []string{lib + "/site-packages", "/usr/local/lib/" + version + "/dist-packages", "/usr/lib/python3/dist-packages"}
	for _, d := range strings.Split(g.env["PATH"], ":") {
		if _, ok := g.file(path.Join("/", d, "../pyvenv.cfg")); ok { // a virtual environment
			sites = append(sites, path.Join("/", d, "../lib", version, "site-packages"))
		}
	}
	m := &modules{g: g, dirs: dirs, listed: map[string]map[string]module{}, done: map[string]bool{}, extended: map[string]bool{}}
	for _, name := range pythonStart {
		m.load(name)
	}
	m.dirs = append(m.dirs, sites...)
	for _, site := range sites {
		m.pathFiles(site)
	}
	for _, run := range g.pythons {
		front := []string{path.Join("/", g.config.WorkingDir)}
		if run.script != "" {
			front = []string{path.Dir(run.script)}
		}
		for _, d := range strings.Split(g.env["PYTHONPATH"], ":") {
			if d != "" {
				front = append(front, path.Join("/", g.config.WorkingDir, d))
			}
		}
		m.dirs = slices.Concat(front, m.dirs)
		if run.script != "" {
			m.follow(run.inode, "")
		} else {
			m.load(run.module)
			m.load(run.module + ".__main__")
		}
		m.dirs = m.dirs[len(front):]
	}
	m.siblings(lib)
}

// pythonLibrary is the directory of Python's standard library, such as /usr/lib/python3.11; "" if
// nothing needs it.
func (g *guesser) pythonLibrary() string {
	if !slices.ContainsFunc(g.langs, func(l *language) bool { return l.name == "python" }) {
		return ""
	}
	for _, prefix := range []string{"/usr/local", "/usr"} {
		i, ok := g.t.Resolve(prefix + "/lib")
		if !ok {
			continue
		}
		for _, d := range g.t.Children(i) {
			lib := path.Join(prefix, "lib", d.Name)
			if _, ok := g.file(lib + "/os.py"); ok && strings.HasPrefix(d.Name, "python3.") {
				return lib
			}
		}
	}
	return ""
}

// modules are what has been imported.
type modules struct {
	g      *guesser
	dirs   []string                     // sys.path
	listed map[string]map[string]module // by directory and name
	done   map[string]bool              // by full name
	bytes  int64

	extended map[string]bool // directories that have extensions which have been imported
}

// siblings ranks the extensions that lie next to those that have been imported, unless that is in lib: one that is compiled
// imports others, and has no text that says so.
func (m *modules) siblings(lib string) {
	for _, dir := range slices.Sorted(maps.Keys(m.extended)) {
		if strings.HasPrefix(dir, lib+"/lib-dynload") {
			continue
		}
		list := m.list(dir)
		for _, name := range slices.Sorted(maps.Keys(list)) {
			if one := list[name]; one.lib >= 0 {
				m.extension(path.Join(dir, name), one.lib, dir+"/"+name)
			}
		}
	}
}

// module is what a directory has of one name; -1: nothing of that kind.
type module struct {
	pkg  int // an inode of a directory
	text int
	lib  int // an extension
}

// list returns what a directory has to import.
func (m *modules) list(dir string) map[string]module {
	if l, ok := m.listed[dir]; ok {
		return l
	}
	l := map[string]module{}
	m.listed[dir] = l
	i, ok := m.g.t.Resolve(dir)
	if !ok || !m.g.t.Inodes[i].IsDir() {
		return l
	}
	for _, d := range m.g.t.Children(i) {
		base, ext, _ := strings.Cut(d.Name, ".")
		one, ok := l[base]
		if !ok {
			one = module{-1, -1, -1}
		}
		inode, n := int(d.Inode), &m.g.t.Inodes[d.Inode]
		if n.IsSymlink() {
			if inode, ok = m.g.t.Resolve(path.Join(dir, d.Name)); !ok {
				continue
			}
			n = &m.g.t.Inodes[inode]
		}
		switch {
		case ext == "" && n.IsDir():
			one.pkg = inode
		case ext == "py" && n.Content >= 0:
			one.text = inode
		case strings.HasSuffix(ext, "so") && n.Content >= 0:
			one.lib = inode
		default:
			continue
		}
		l[base] = one
	}
	return l
}

// load follows the import of a module by its full name: of the packages that it is in first.
func (m *modules) load(name string) {
	dirs, full := m.dirs, ""
	for part := range strings.SplitSeq(name, ".") {
		if full += "." + part; part == "" {
			return
		}
		dirs = m.one(dirs, part, full[1:])
	}
}

// one imports one module that lies in one of dirs. It returns where those below it lie.
func (m *modules) one(dirs []string, part, full string) (below []string) {
	for _, dir := range dirs {
		one, ok := m.list(dir)[part]
		if !ok {
			continue
		}
		p := path.Join(dir, part)
		switch {
		case one.pkg >= 0:
			if init, ok := m.list(p)["__init__"]; ok {
				m.run(p, "__init__", init.text, full, full)
			}
			return []string{p}
		case one.lib >= 0:
			m.extension(p, one.lib, full)
			return nil
		case one.text >= 0:
			pkg, _, _ := cutLast(full)
			m.run(dir, part, one.text, full, pkg)
			return nil
		}
	}
	return nil
}

func cutLast(name string) (pkg, last string, ok bool) {
	if i := strings.LastIndexByte(name, '.'); i >= 0 {
		return name[:i], name[i+1:], true
	}
	return "", name, false
}

// first reports whether a module is imported for the first time.
func (m *modules) first(full string) bool {
	if m.done[full] || len(m.done) >= maxModules || m.g.ctx.Err() != nil {
		return false
	}
	m.done[full] = true
	return true
}

func (m *modules) extension(p string, inode int, full string) {
	if m.first(full) {
		if m.g.t.Inodes[inode].Size <= wholeExtension {
			m.g.rank(inode)
		}
		m.g.library(p, inode)
		m.extended[path.Dir(p)] = true
	}
}

// run ranks a module's compiled form, or its text, and follows what that imports.
func (m *modules) run(dir, base string, text int, full, pkg string) {
	if text < 0 || !m.first(full) {
		return
	}
	compiled := -1
	if i, ok := m.g.t.Resolve(path.Join(dir, "__pycache__")); ok && m.g.t.Inodes[i].IsDir() {
		list := m.g.t.Children(i)
		k, _ := slices.BinarySearchFunc(list, base+".", func(d toc.Dirent, name string) int { return strings.Compare(d.Name, name) })
		for ; k < len(list) && strings.HasPrefix(list[k].Name, base+"."); k++ {
			if rest := list[k].Name[len(base)+1:]; strings.HasSuffix(rest, ".pyc") && !strings.Contains(rest, "opt-") {
				compiled = int(list[k].Inode)
			}
		}
	}
	if compiled >= 0 {
		m.g.rank(compiled)
	} else {
		m.g.rank(text)
	}
	m.follow(text, pkg)
}

// follow imports what a module's text imports; pkg is the package that the module is, or is in.
func (m *modules) follow(text int, pkg string) {
	size := m.g.t.Inodes[text].Size
	if size > maxModuleText || m.bytes+size > maxModuleBytes {
		return
	}
	m.bytes += size
	b := make([]byte, size)
	if _, err := m.g.c.Open(m.g.ctx, text).ReadAt(b, 0); err != nil && err != io.EOF {
		return
	}
	for _, im := range pythonImports(b) {
		name := im.module
		if im.level > 0 {
			at := pkg
			for range im.level - 1 {
				at, _, _ = cutLast(at)
			}
			if name = strings.Trim(at+"."+name, "."); at == "" {
				continue
			}
		}
		m.load(name)
		for _, sub := range im.names {
			m.load(name + "." + sub) // which may be a module, or not
		}
	}
}

// pathFiles ranks what site reads in a directory of packages.
func (m *modules) pathFiles(dir string) {
	i, ok := m.g.t.Resolve(dir)
	if !ok || !m.g.t.Inodes[i].IsDir() {
		return
	}
	for _, d := range m.g.t.Children(i) {
		if strings.HasSuffix(d.Name, ".pth") && m.g.t.Inodes[d.Inode].Content >= 0 {
			m.g.rank(int(d.Inode))
			m.follow(int(d.Inode), "")
		}
	}
}

// pythonImport is one import statement: "import module", or "from ..module import names", with as
// many dots as level.
type pythonImport struct {
	module string
	names  []string
	level  int
}

// pythonImports lists the import statements of a module that run when it is imported: those of functions,
// and those for type checkers, do not.
func pythonImports(text []byte) (list []pythonImport) {
	skip := -1 // of a block that does not run, the indentation of the line that begins it
	quoted := ""
	lines := bytes.Split(text, []byte("\n"))
	for k := 0; k < len(lines); k++ {
		line := string(lines[k])
		if quoted != "" { // in a string of several lines
			if strings.Contains(line, quoted) {
				quoted = ""
			}
			continue
		}
		s := strings.TrimLeft(line, " \t")
		if s == "" || s[0] == '#' || s[0] == '\r' {
			continue
		}
		indent := len(line) - len(s)
		if skip >= 0 && indent > skip {
			continue
		}
		skip = -1
		switch {
		case strings.HasPrefix(s, "def "), strings.HasPrefix(s, "async def "),
			strings.HasPrefix(s, "if TYPE_CHECKING"), strings.HasPrefix(s, "if typing.TYPE_CHECKING"):
			skip = indent
		case strings.HasPrefix(s, "import "):
			for part := range strings.SplitSeq(statement(s[len("import "):]), ",") {
				if f := strings.Fields(part); len(f) > 0 {
					list = append(list, pythonImport{module: f[0]})
				}
			}
		case strings.HasPrefix(s, "from "):
			for strings.Contains(s, "(") && !strings.Contains(s, ")") && k+1 < len(lines) {
				k++
				l, _, _ := strings.Cut(string(lines[k]), "#")
				s += " " + l
			}
			if im, ok := fromImport(s[len("from "):]); ok {
				list = append(list, im)
			}
		default:
			for _, q := range []string{`"""`, "'''"} {
				if strings.Count(s, q) == 1 {
					quoted = q
				}
			}
		}
	}
	return list
}

// statement is a line without what follows the statement.
func statement(s string) string {
	if i := strings.IndexAny(s, "#;"); i >= 0 {
		s = s[:i]
	}
	return s
}

// fromImport parses what follows "from".
func fromImport(s string) (im pythonImport, ok bool) {
	module, names, ok := strings.Cut(statement(s), " import ")
	module = strings.TrimSpace(module)
	im.module = strings.TrimLeft(module, ".")
	im.level = len(module) - len(im.module)
	for part := range strings.SplitSeq(strings.Trim(strings.TrimSpace(names), "()"), ",") {
		if f := strings.Fields(part); len(f) > 0 && f[0] != "*" && f[0] != `\` {
			im.names = append(im.names, f[0])
		}
	}
	return im, ok && module != ""
}
