package flatten_test

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"github.com/opencontainers/go-digest"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/flatten"
	"hydrofoil.dev/foil/internal/format/layer"
	lt "hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/format/toc"
)

// A layer on a tree gives what it gives on the layers that made that.
func TestTree(t *testing.T) {
	n, taken := 0, 0
	rapid.Check(t, func(rt *rapid.T) {
		n++
		var layers []lt.Layer
		for range rapid.IntRange(2, 3).Draw(rt, "layers") {
			layers = append(layers, rapid.SliceOfN(rapid.Custom(drawEntry), 1, 8).Draw(rt, "layer"))
		}
		streams := streamsOf(t, layers)
		below, last := streams[:len(streams)-1], streams[len(streams)-1]
		base, err := flattened(below)
		if err != nil {
			return
		}
		want, wantErr := flattened(streams)
		list, err := readEntries(last)
		if err != nil {
			return
		}
		d := digest.FromBytes(last)
		got, err := flatten.Rootfs(context.Background(), []flatten.Layer{
			{Digest: base.ChainID, DiffID: base.ChainID, Entries: flatten.Tree(base)}, {Digest: d, DiffID: d, Entries: &list},
		})
		if (err != nil) != (wantErr != nil) {
			rt.Fatalf("on the tree: %v; on its layers: %v\n%s", err, wantErr, describe(layers))
		}
		if err != nil {
			if _, ok := errors.AsType[*layer.RefusedError](err); !ok {
				rt.Fatalf("no refusal: %v", err)
			}
			return
		}
		taken++
		got.ChainID = want.ChainID
		var encoded [2][]byte
		for i, made := range []*toc.TOC{got, want} {
			if encoded[i], err = toc.Encode(made); err != nil {
				rt.Fatal(err)
			}
		}
		if !bytes.Equal(encoded[0], encoded[1]) {
			rt.Fatalf("another table of contents than the layers make:\n%s", describe(layers))
		}
	})
	if taken < n/20 {
		t.Errorf("%d of %d were compared", taken, n)
	}
}
