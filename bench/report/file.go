package report

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
)

// sourceLines are how many lines a PNG file has for where it comes from, so that
// many commands do not take more room than the figure; all of it is in the file's
// text, see describe.
const sourceLines = 6

// file draws a figure as a PNG, which goes where the page does not: it has its
// title, and says itself where it comes from, readably and as text.
func file(f figure, p *plot.Plot, keys []key, width vg.Length) ([]byte, error) {
	title, small := p.Legend.TextStyle, p.Legend.TextStyle
	title.Font.Size, title.Font.Weight = 13, 2
	title.XAlign, title.YAlign = text.XLeft, text.YTop
	small.Font.Size, small.XAlign, small.YAlign = 7, text.XLeft, text.YTop
	small.Font = font.From(small.Font, 7)
	lines := wrap(small, f.Source, width-vg.Points(12))
	if len(lines) > sourceLines {
		lines = append(lines[:sourceLines-1], "... (the file's text has all of it: exiftool, identify -verbose)")
	}
	const head, row = 20, 9
	foot := vg.Points(row*float64(len(lines)) + 4)
	img := vgimg.NewWith(vgimg.UseWH(width, height+vg.Points(head)+foot), vgimg.UseDPI(192))
	c := margin(draw.New(img))
	compose(draw.Crop(c, 0, 0, foot, -vg.Points(head)), p, keys)
	c.FillText(title, vg.Point{X: c.Min.X, Y: c.Max.Y}, f.Title)
	for i, line := range lines {
		c.FillText(small, vg.Point{X: c.Min.X, Y: c.Min.Y + foot - vg.Points(4+row*float64(i))}, line)
	}
	var png bytes.Buffer
	if _, err := (vgimg.PngCanvas{Canvas: img}).WriteTo(&png); err != nil {
		return nil, err
	}
	return describe(png.Bytes(), "Title", f.Title, "Description", f.Caption, "Source", f.Source)
}

// wrap breaks a text into lines of at most a width.
func wrap(style text.Style, s string, width vg.Length) (lines []string) {
	var line string
	for _, word := range strings.Fields(s) {
		if longer := line + " " + word; line == "" {
			line = word
		} else if style.Width(longer) <= width {
			line = longer
		} else {
			lines, line = append(lines, line), word
		}
	}
	if line != "" {
		lines = append(lines, line)
	}
	return lines
}

// describe adds texts, keyword and value in turn, to a PNG file, as iTXt chunks
// before the image's data (PNG specification, 11.3.3.4).
func describe(png []byte, pairs ...string) ([]byte, error) {
	const signature, header = 8, 12 + 13 // and a chunk's length, type and checksum around the header
	if len(png) < signature+header || string(png[signature+4:signature+8]) != "IHDR" {
		return nil, fmt.Errorf("this is no PNG file")
	}
	out := bytes.Clone(png[:signature+header])
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] == "" {
			continue
		}
		// Not compressed, of no language, with no translated keyword.
		body := []byte("iTXt" + pairs[i] + "\x00\x00\x00\x00\x00" + pairs[i+1])
		out = binary.BigEndian.AppendUint32(out, uint32(len(body)-4))
		out = append(out, body...)
		out = binary.BigEndian.AppendUint32(out, crc32.ChecksumIEEE(body))
	}
	return append(out, png[signature+header:]...), nil
}
