package api_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/api/apitest"
)

// What is asked about traces and startup sets arrives as it was asked, and so
// does the answer.
func TestStartupRequests(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	var asked []any
	c := dial(t, apitest.Funcs{
		Started_: func(_ context.Context, id string, s api.Start) error { asked = append(asked, id, s); return nil },
		TraceStatus_: func(_ context.Context, id string) (*api.TraceStatus, error) {
			return &api.TraceStatus{Pages: 7, Last: now}, nil
		},
		Trace_: func(_ context.Context, id string, req api.TraceRequest) (*api.TraceResult, error) {
			asked = append(asked, id, req)
			return &api.TraceResult{Trace: []byte{0, 1, 255}, Sent: true}, nil
		},
		TOC_: func(_ context.Context, req api.AboutImage) ([]byte, error) {
			asked = append(asked, req)
			return []byte("toc\x00"), nil
		},
		Startup_: func(_ context.Context, req api.AboutImage) (*bundle.StartupReport, error) {
			return &bundle.StartupReport{ImageBytes: 5}, nil
		},
		StartupService_: func(_ context.Context, req api.AboutImage) (*bundle.ServiceReport, error) {
			return &bundle.ServiceReport{Service: bundle.Service{ID: req.Service}, Runs: []byte{9}}, nil
		},
		ForgetStartup_: func(_ context.Context, req api.AboutImage) error {
			asked = append(asked, req)
			return &api.Error{Code: api.CodeNotFound, Message: "no such service"}
		},
	})
	ctx := t.Context()
	start := api.Start{Args: []string{"a", strings.Repeat("b", 200_000)}, Started: now, Probe: true, Ready: now.Add(time.Second)}
	if err := c.ContainerStarted(ctx, "web 1", start); err != nil {
		t.Error(err)
	}
	if st, err := c.TraceStatus(ctx, "web 1"); err != nil || st.Pages != 7 || !st.Last.Equal(now) {
		t.Errorf("trace status: %+v, %v", st, err)
	}
	req := api.TraceRequest{Args: []string{"a"}, Started: now, Ready: now.Add(1), Send: true}
	if res, err := c.Trace(ctx, "web 1", req); err != nil || string(res.Trace) != "\x00\x01\xff" || !res.Sent {
		t.Errorf("trace: %+v, %v", res, err)
	}
	about := api.AboutImage{Ref: "r.example/a:1", Platform: "linux/arm64", PlainHTTP: true, Service: "0123", TOC: "sha256:1"}
	if b, err := c.TOC(ctx, about); err != nil || string(b) != "toc\x00" {
		t.Errorf("TOC: %q, %v", b, err)
	}
	if r, err := c.Startup(ctx, about); err != nil || r.ImageBytes != 5 {
		t.Errorf("startup: %+v, %v", r, err)
	}
	if r, err := c.StartupService(ctx, about); err != nil || r.ID != "0123" || string(r.Runs) != "\t" {
		t.Errorf("service: %+v, %v", r, err)
	}
	if err := c.ForgetStartup(ctx, about); err == nil || api.AsError(err).Code != api.CodeNotFound {
		t.Errorf("forget: %v", err)
	}
	if diff := cmp.Diff([]any{"web 1", start, "web 1", req, about, about}, asked); diff != "" {
		t.Error(diff)
	}
}
