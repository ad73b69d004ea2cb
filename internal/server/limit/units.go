package limit

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Bytes is a setting: "64M", "1.5T" or 64000. K, M, G and T are powers of 1024.
type Bytes int64

// UnmarshalText reads one.
func (b *Bytes) UnmarshalText(text []byte) error {
	s, unit := string(text), int64(1)
	if i := strings.IndexAny(s, "KMGT"); i >= 0 && i == len(s)-1 {
		unit = 1 << (10 * (1 + strings.IndexByte("KMGT", s[i])))
		s = s[:i]
	}
	n, err := strconv.ParseFloat(s, 64)
	if n *= float64(unit); err != nil || !(n >= 0 && n < 1<<62) {
		return fmt.Errorf("want bytes like 500M, 100G or 2T, not %q", text)
	}
	*b = Bytes(n)
	return nil
}

// MarshalText writes one.
func (b Bytes) MarshalText() ([]byte, error) { return strconv.AppendInt(nil, int64(b), 10), nil }

// Duration is a setting: "90m", "24h" or "30d".
type Duration time.Duration

// UnmarshalText reads one.
func (d *Duration) UnmarshalText(text []byte) error {
	n, err := time.ParseDuration(string(text))
	if days, ok := strings.CutSuffix(string(text), "d"); ok {
		var f float64
		if f, err = strconv.ParseFloat(days, 64); err == nil && !(f >= 0 && f <= 36500) {
			err = errors.New("at most 100 years")
		}
		n = time.Duration(f * 24 * float64(time.Hour))
	}
	if err != nil || n < 0 {
		return fmt.Errorf("want a duration like 90m, 24h or 30d, not %q", text)
	}
	*d = Duration(n)
	return nil
}
