package picture

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"hydrofoil.dev/foil/internal/progress"
)

// TextOptions say how to write for people.
type TextOptions struct {
	// Width in columns; 0 means 80.
	Width int
	// Terminal draws with block characters, Color with colours as well.
	Terminal, Color bool
	// Files bounds the table of files; 0 means 15, less than 0 all.
	Files int
}

const dirRows = 14

// shades are the cells of a map, from untouched to all touched.
var (
	plainShades    = []rune(".-=*#")
	terminalShades = []rune("·▂▄▆█")
)

// Text writes a map of the image by directory, with what is touched, and a table
// of the files with most pages.
func (s *Set) Text(w io.Writer, o TextOptions) error {
	if o.Width == 0 {
		o.Width = 80
	}
	if o.Files == 0 {
		o.Files = 15
	}
	var b strings.Builder
	pages, bytes := s.Pages()
	fmt.Fprintf(&b, "%s\n", s.Title)
	fmt.Fprintf(&b, "command: %s\n", strings.Join(s.Args, " "))
	fmt.Fprintf(&b, "%d pages, %s of %s (%.1f%%), in %d files", pages, progress.Bytes(bytes), progress.Bytes(s.img.bytes), share(bytes, s.img.bytes), len(s.files))
	for _, f := range s.Facts {
		fmt.Fprintf(&b, "; %s %s", f.Name, f.Value)
	}
	b.WriteString("\n\n")
	s.drawMap(&b, o)
	b.WriteByte('\n')
	s.drawFiles(&b, o)
	_, err := io.WriteString(w, b.String())
	return err
}

func share(part, whole int64) float64 {
	if whole == 0 {
		return 0
	}
	return 100 * float64(part) / float64(whole)
}

func (s *Set) drawMap(b *strings.Builder, o TextOptions) {
	const facts = len("  100.0%  999.9 MB  ")
	names := 0
	dirs := s.Dirs(1)
	for _, d := range dirs[:min(len(dirs), dirRows)] {
		names = max(names, len([]rune(d.Path)))
	}
	names = min(names, max(10, o.Width/3))
	dirs = s.Dirs(max(8, o.Width-1-names-facts))
	shades := plainShades
	if o.Terminal {
		shades = terminalShades
	}
	for i, d := range dirs {
		if i == dirRows || i > 0 && d.Touched == 0 && i >= 4 {
			size := int64(0)
			touched := int64(0)
			for _, rest := range dirs[i:] {
				size += rest.Size
				touched += rest.Touched
			}
			fmt.Fprintf(b, "%-*s  %5.1f%%  %8s\n", names, fmt.Sprintf("%d more", len(dirs)-i), share(touched, size), progress.Bytes(size))
			break
		}
		fmt.Fprintf(b, "%-*s  %5.1f%%  %8s  ", names, short(d.Path, names), share(d.Touched, d.Size), progress.Bytes(d.Size))
		last := -1
		for _, v := range d.Strip {
			k := 0
			if v > 0 {
				k = min(len(shades)-1, 1+int(v*float64(len(shades)-1)))
			}
			if c := min(k, 1); o.Color && c != last {
				b.WriteString([]string{"\x1b[2m", "\x1b[0;36m"}[c])
				last = c
			}
			b.WriteRune(shades[k])
		}
		if o.Color {
			b.WriteString("\x1b[0m")
		}
		b.WriteByte('\n')
	}
}

func (s *Set) drawFiles(b *strings.Builder, o TextOptions) {
	tw := tabwriter.NewWriter(b, 0, 0, 2, ' ', 0)
	first := "ORDER"
	if s.Timed {
		first = "FIRST"
	}
	fmt.Fprintf(tw, "PAGES\tTOUCHED\tOF\tSHARE\t%s\tFILE\n", first)
	files := s.files
	if o.Files > 0 {
		files = files[:min(len(files), o.Files)]
	}
	for _, f := range files {
		at := fmt.Sprint(f.First)
		if s.Timed {
			at = fmt.Sprintf("%.3fs", f.At)
		}
		fmt.Fprintf(tw, "%d\t%s\t%s\t%.0f%%\t%s\t%s\n", f.Pages, progress.Bytes(f.Bytes), progress.Bytes(f.Size), share(f.Bytes, f.Size), at, printable(f.Path))
	}
	_ = tw.Flush() // to a strings.Builder
	if n := len(s.files) - len(files); n > 0 {
		fmt.Fprintf(b, "and %d more\n", n)
	}
}

// short cuts the middle out of a name that is too long.
func short(name string, width int) string {
	r := []rune(printable(name))
	if len(r) <= width {
		return string(r)
	}
	head := (width - 1) / 2
	return string(r[:head]) + "~" + string(r[len(r)-(width-1-head):])
}

// printable takes from a name of an image what could command a terminal.
func printable(name string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7f && r < 0xa0 || r == '\ufffd' {
			return '?'
		}
		return r
	}, name)
}
