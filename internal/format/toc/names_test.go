package toc_test

import (
	"testing"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/toc/toctest"
)

func TestNames(t *testing.T) {
	for _, files := range []int{0, 1, 3000} {
		x := toctest.Synthetic(files, 1)
		names := toc.NamesOf(x)
		named := make(map[int32]bool)
		x.Walk(func(_ string, inode int) { named[x.Inodes[inode].Content] = true })
		for c := range int32(len(x.Contents)) {
			path, ok := names.Path(c)
			if !named[c] {
				if ok {
					t.Errorf("of %d files, content %d has no name, not %s", files, c, path)
				}
				continue
			}
			if inode, found := x.Lookup(path); !ok || !found || x.Inodes[inode].Content != c {
				t.Errorf("of %d files, content %d is named %q, %v: inode %d, %v", files, c, path, ok, inode, found)
			}
		}
	}
}
