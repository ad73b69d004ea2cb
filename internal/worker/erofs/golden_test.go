package erofs

import (
	"bytes"
	"encoding/hex"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"hydrofoil.dev/foil/internal/format/toc"
)

var update = flag.Bool("update", false, "rewrite the golden files in testdata")

// The bytes of an image are a format: workers keep them, and compare digests
// of them. The golden file is a hex dump without its lines of zeros.
func TestGolden(t *testing.T) {
	root := newDir(0o755)
	root.inode.Mtime, root.inode.MtimeNsec = 1_700_000_000, 123_456_789
	root.children["bin"] = newDir(0o755)
	program := newFile(0o4755, bytes.Repeat([]byte("x"), 5000))
	program.xattrs = []toc.Xattr{{Name: "user.comment", Value: []byte("why")}}
	root.children["bin"].children["program"] = program
	root.children["bin"].children["same"] = program
	root.children["empty"] = newFile(0o600, nil)
	root.children["hole"] = newFile(0o644, make([]byte, 4096))
	root.children["hole"].hole = true
	root.children["link"] = newSymlink("bin/program")
	root.children["null"] = &node{inode: toc.Inode{Mode: 0o020666, Major: 1, Minor: 3}}
	for i := range 2 {
		f := newFile(0o644, []byte{byte(i)})
		f.xattrs = []toc.Xattr{{Name: "security.capability", Value: []byte("01234567890123456789")}}
		root.children["capable"+string(rune('0'+i))] = f
	}
	b := build(root)
	var image bytes.Buffer
	o := anywhere(b.toc)
	o.Devices[0].Tag = "arena"
	if err := Write(&image, b.toc, o); err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	for line := range bytes.Lines([]byte(hex.Dump(image.Bytes()))) {
		if !bytes.Contains(line, []byte("00 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00")) {
			got.Write(line)
		}
	}
	name := filepath.Join("testdata", "small.hex")
	if *update {
		if err := os.WriteFile(name, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got.Bytes(), want) {
		t.Errorf("the image is not the one of %s (-update rewrites it):\n%s", name, got.Bytes())
	}
}
