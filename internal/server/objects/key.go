package objects

import (
	"crypto/rand"
	"fmt"
	"strings"
)

// maxKey keeps every key a valid path on common file systems and a valid key
// of S3 (1024 bytes) under some prefix.
const maxKey = 512

// CheckKey reports what is wrong with a key, or nil.
func CheckKey(key string) error {
	if key == "" || len(key) > maxKey {
		return fmt.Errorf("object key %q: want 1 to %d bytes", key, maxKey)
	}
	for element := range strings.SplitSeq(key, "/") {
		if element == "" || len(element) > 255 {
			return fmt.Errorf("object key %q: want elements of 1 to 255 bytes", key)
		}
		if element[0] == '.' {
			return fmt.Errorf("object key %q: an element must not start with a dot", key)
		}
		for i := range len(element) {
			c := element[i]
			if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '.' && c != '_' && c != '-' {
				return fmt.Errorf("object key %q: byte %q is not one of a-z 0-9 . _ -", key, c)
			}
		}
	}
	return nil
}

// CheckRange returns how many bytes a range has in an object of size bytes. Errors: ErrRange.
func CheckRange(offset, length, size int64) (int64, error) {
	if offset < 0 || offset > size {
		return 0, fmt.Errorf("%w: offset %d is not in its %d bytes", ErrRange, offset, size)
	}
	if length < 0 {
		return size - offset, nil
	}
	if length > size-offset {
		return 0, fmt.Errorf("%w: %d bytes from %d are not in its %d bytes", ErrRange, length, offset, size)
	}
	return length, nil
}

// Random returns an element of a key, or the end of one, that no object has.
func Random() string {
	var b [8]byte
	rand.Read(b[:]) //nolint:errcheck // never fails
	return fmt.Sprintf("%x", b)
}
