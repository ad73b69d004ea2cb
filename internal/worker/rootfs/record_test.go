package rootfs

import (
	"bytes"
	"testing"

	"hydrofoil.dev/foil/internal/format/toc/toctest"
)

func FuzzPlacement(f *testing.F) {
	x, _, _ := toctest.Some(1, 3, 100).TOC(f)
	f.Add(Placement{0, 1, 0}.Encode(), 2)
	f.Add([]byte{1}, 1)
	f.Fuzz(func(t *testing.T, b []byte, arenas int) {
		p, err := decodePlacement(b, x, arenas)
		if err != nil {
			return
		}
		if len(p) != len(x.Contents) || !bytes.Equal(p.Encode(), b) {
			t.Errorf("placement %v of %x", p, b)
		}
		for _, d := range p {
			if int(d) >= arenas {
				t.Errorf("arena %d of %d", d, arenas)
			}
		}
	})
}
