package parts_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"

	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/parts"
)

// Any range is what it is in the whole, however it is cut.
func TestWrite(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		stream := make([]byte, rapid.IntRange(1, 300_000).Draw(t, "size"))
		for i := range stream {
			stream[i] = byte(i ^ i>>8 ^ i>>16)
		}
		begins := []int64{0}
		for at := int64(0); ; {
			if at += rapid.Int64Range(1, 90_000).Draw(t, "part"); at >= int64(len(stream)) {
				break
			}
			begins = append(begins, at)
		}
		from := rapid.Int64Range(0, int64(len(stream))).Draw(t, "from")
		to := rapid.Int64Range(from, int64(len(stream))).Draw(t, "to")
		write := rapid.IntRange(1, 100_000).Draw(t, "write")
		broken := rapid.IntRange(-1, len(begins)-1).Draw(t, "broken")
		errBroken := errors.New("broken")
		var out bytes.Buffer
		err := parts.Write(t.Context(), &out, begins, int64(len(stream)), from, to, rapid.IntRange(1, 4).Draw(t, "workers"),
			func(_ context.Context, i int, w io.Writer) error {
				part := stream[begins[i]:]
				if i+1 < len(begins) {
					part = part[:begins[i+1]-begins[i]]
				}
				for len(part) > 0 {
					n := min(write, len(part))
					if _, err := w.Write(part[:n]); err != nil {
						return err
					}
					part = part[n:]
				}
				if i == broken {
					return errBroken
				}
				return nil
			})
		end := int64(len(stream))
		if broken >= 0 && broken+1 < len(begins) {
			end = begins[broken+1]
		}
		touched := broken >= 0 && from < to && begins[broken] < to && end > from
		if touched {
			if !errors.Is(err, errBroken) || int64(out.Len()) >= to-from {
				t.Fatalf("part %d of %d fails: %v, %d bytes of %d", broken, len(begins), err, out.Len(), to-from)
			}
		} else if err != nil || !bytes.Equal(out.Bytes(), stream[from:to]) {
			t.Fatalf("bytes %d to %d: %v, or others", from, to, err)
		}
	})
}

// Parts that are not as long as they should be are found.
func TestOtherLengths(t *testing.T) {
	for n, want := range map[int]bool{9: false, 10: true, 11: false} {
		err := parts.Write(t.Context(), io.Discard, []int64{0}, 10, 0, 5, 2, func(_ context.Context, _ int, w io.Writer) error {
			_, err := w.Write(make([]byte, n))
			return err
		})
		if (err == nil) != want {
			t.Errorf("a part of 10 bytes that has %d: %v", n, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := parts.Write(ctx, io.Discard, []int64{0, 100_000_000}, 200_000_000, 0, 200_000_000, 2, func(ctx context.Context, _ int, w io.Writer) error {
		for ctx.Err() == nil {
			if _, err := w.Write(make([]byte, 1<<20)); err != nil {
				return err
			}
		}
		return ctx.Err()
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}
