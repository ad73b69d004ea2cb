//go:build !race

package fetch

import "time"

// stallTimeout: see race_test.go.
const stallTimeout = 50 * time.Millisecond
