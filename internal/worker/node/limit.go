package node

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Limit is how much of the disk images may take before those that nothing uses
// go, the least recently used first. It is no quota: what is used stays, and no
// pull is refused because of it. The zero value is no limit.
type Limit struct {
	set     bool
	bytes   int64
	percent float64 // of the filesystem's size, when bytes is negative
}

// ParseLimit reads "80%", of the size of the filesystem, or a number of bytes
// with or without a unit: "20GB", "512MiB", "0". Empty is no limit.
func ParseLimit(s string) (Limit, error) {
	if s == "" {
		return Limit{}, nil
	}
	bad := fmt.Errorf("%q is no limit: write for example 80%%, 50GB or 500MiB", s)
	if p, ok := strings.CutSuffix(s, "%"); ok {
		v, err := strconv.ParseFloat(strings.TrimSpace(p), 64)
		if err != nil || !(v >= 0 && v <= 100) {
			return Limit{}, bad
		}
		return Limit{set: true, bytes: -1, percent: v}, nil
	}
	num := strings.TrimRight(s, "kKMGTiB ")
	unit := strings.TrimSpace(s[len(num):])
	scale, ok := map[string]float64{
		"": 1, "B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
		"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
	}[unit]
	v, err := strconv.ParseFloat(num, 64)
	if !ok || err != nil || !(v >= 0 && v*scale < math.MaxInt64) {
		return Limit{}, bad
	}
	return Limit{set: true, bytes: int64(v * scale)}, nil
}

// of returns the limit in bytes on a filesystem of a size.
func (l Limit) of(size int64) int64 {
	switch {
	case !l.set:
		return math.MaxInt64
	case l.bytes < 0:
		return int64(float64(size) * l.percent / 100)
	}
	return l.bytes
}
