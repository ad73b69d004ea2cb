package bundle

import (
	"net/http"
	"strconv"
	"time"
)

// RetryAfter returns how long an answer of status 429 or 503 asks not to be asked
// again, by the header Retry-After: seconds, or a time. A time is compared with the
// answer's own Date, where it has one: the clocks here and there may differ. It
// returns 0 when the answer does not say, or says nonsense. How much of it is waited
// for is the caller's to bound.
func RetryAfter(h http.Header, now time.Time) time.Duration {
	s := h.Get("Retry-After")
	if n, err := strconv.Atoi(s); err == nil && n > 0 && n < 1<<30 {
		return time.Duration(n) * time.Second
	}
	if date, err := http.ParseTime(h.Get("Date")); err == nil {
		now = date
	}
	if t, err := http.ParseTime(s); err == nil && t.After(now) {
		return t.Sub(now)
	}
	return 0
}

// SetRetryAfter has an answer ask not to be asked again for so long; 0: it does not.
func SetRetryAfter(h http.Header, after time.Duration) {
	if after > 0 {
		h.Set("Retry-After", strconv.FormatInt(int64((after+time.Second-1)/time.Second), 10))
	}
}
