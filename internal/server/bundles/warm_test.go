package bundles_test

import (
	"context"
	"io"
	"testing"

	"hydrofoil.dev/foil/internal/format/bundle"
)

func TestWarm(t *testing.T) {
	s := start(t, nil)
	for _, c := range []struct {
		body   any
		status int
		bytes  int64
	}{
		{bundle.Warm{}, 200, 0},
		{bundle.Warm{Bytes: 1}, 200, 1},
		{bundle.Warm{Bytes: 200_000}, 200, 200_000},
		{bundle.Warm{Bytes: bundle.MaxWarm}, 200, bundle.MaxWarm},
		{bundle.Warm{Bytes: bundle.MaxWarm + 1}, 400, -1},
		{bundle.Warm{Bytes: -1}, 400, -1},
		{[]byte("{"), 400, -1},
	} {
		resp := s.post(t, context.Background(), bundle.WarmPath, c.body)
		n, err := io.Copy(io.Discard, resp.Body)
		if err != nil || resp.StatusCode != c.status || c.bytes >= 0 && n != c.bytes {
			t.Errorf("%v: %s, %d bytes, %v", c.body, resp.Status, n, err)
		}
	}
}
