package upstream

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
)

// Who has had an answer and asks again gets one that was asked for since.
func TestShareAgain(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	a := &Accelerator{ctx: ctx, stop: cancel}
	defer a.wg.Wait()
	var c checks
	var asked atomic.Int64
	for i := range int64(200_000) {
		got, err := a.share(ctx, &c, "key", false, func(context.Context) (any, error) { return asked.Add(1), nil })
		if err != nil {
			t.Fatal(err)
		}
		if got != i+1 {
			t.Fatalf("question %d got answer %d", i+1, got)
		}
	}
	failed := errors.New("once")
	if _, err := a.share(ctx, &c, "key", false, func(context.Context) (any, error) { return nil, failed }); !errors.Is(err, failed) {
		t.Errorf("%v, want %v", err, failed)
	}
}
