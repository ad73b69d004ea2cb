package startup

import (
	"fmt"
	"strconv"
	"strings"
)

// Limit is how large a startup set may be: a share of its image, but at least
// shareFloor, or bytes. The zero value is a quarter of the image.
type Limit struct {
	set     bool
	percent int64 // of the bytes of all contents
	bytes   int64 // if percent is 0
}

const (
	// defaultPercent is above what services of large images touch.
	defaultPercent = 25
	// shareFloor is for small images, of which a start needs most.
	shareFloor = 16 << 20
)

// Of returns the limit for an image of so many bytes.
func (l Limit) Of(image int64) int64 {
	switch {
	case !l.set:
		return max(image/100*defaultPercent, shareFloor)
	case l.percent > 0:
		return max(image/100*l.percent, shareFloor)
	}
	return l.bytes
}

// String, Set and Type make it the value of a flag.
func (l *Limit) String() string {
	switch {
	case !l.set:
		return strconv.Itoa(defaultPercent) + "%"
	case l.percent > 0:
		return strconv.FormatInt(l.percent, 10) + "%"
	}
	return strconv.FormatInt(l.bytes, 10)
}

// Type names what Set takes.
func (l *Limit) Type() string { return "size" }

// Set reads "25%", "64M" or "100000"; "0" means no startup sets.
func (l *Limit) Set(s string) error {
	wrong := fmt.Errorf("want a share like 25%%, or bytes like 64M, not %q", s)
	if p, ok := strings.CutSuffix(s, "%"); ok {
		n, err := strconv.ParseInt(p, 10, 64)
		if err != nil || n < 1 || n > 100 {
			return wrong
		}
		*l = Limit{set: true, percent: n}
		return nil
	}
	shift := 0
	if i := strings.IndexAny(s, "KMG"); i >= 0 && i == len(s)-1 {
		shift = 10 * (1 + strings.IndexByte("KMG", s[i]))
		s = s[:i]
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 || n > 1<<30 && shift > 0 {
		return wrong
	}
	*l = Limit{set: true, bytes: n << shift}
	return nil
}
