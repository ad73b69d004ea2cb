package main

import (
	"bytes"
	"testing"

	"hydrofoil.dev/foil/internal/worker/api"
)

func TestPrintGC(t *testing.T) {
	limit := int64(2_000_000_000)
	r := &api.GCReport{
		DryRun: true, Freed: 1_200_000_000, Used: 3_100_000_000, Limit: &limit, Free: 800_000_000, Size: 20_000_000_000,
		Items: []api.GCItem{
			{Kind: "image", Name: "registry.example/app:2", Bytes: 900_000_000, Why: "container web uses it"},
			{Kind: "image", Name: "registry.example/app:1", Goes: true, Bytes: 1_200_000_000, Why: "nothing uses it, and 1100000000 bytes are too many; last used 2026-01-02 03:04:05 UTC"},
			{Kind: "contents", Name: "sha256:0123", Bytes: 1_000_000, Why: "of images that were removed, and used by registry.example/app:2"},
		},
	}
	for name, r := range map[string]*api.GCReport{"gc-dry.txt": r, "gc-empty.txt": {Free: 1, Size: 2}} {
		var b bytes.Buffer
		if err := printGC(&b, r); err != nil {
			t.Fatal(err)
		}
		golden(t, name, b.Bytes())
	}
}
