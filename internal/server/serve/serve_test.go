package serve_test

import (
	"context"
	"log/slog"
	"testing"

	"hydrofoil.dev/foil/internal/server/serve"
)

// start runs a server for the test.
func start(t *testing.T, opts serve.Options) *serve.Server {
	t.Helper()
	if opts.Root == "" {
		opts.Root = t.TempDir()
	}
	if opts.Listen == "" {
		opts.Listen = "127.0.0.1:0"
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	}
	s, err := serve.Start(context.Background(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}
