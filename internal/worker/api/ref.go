package api

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/distribution/reference"
)

// maxShown is how much of a name that is none an error shows, bytes.
const maxShown = 128

// NormalRef checks an image name, HOST[:PORT]/REPOSITORY[:TAG][@DIGEST], and
// returns its normal form, by which the daemon lists it: with the tag "latest"
// when it has neither tag nor digest. The host must be there: which registry a
// name means is never guessed. The error is an *Error with CodeInvalid.
func NormalRef(s string) (string, error) {
	shown := s
	if len(s) > maxShown {
		shown = s[:maxShown] + "..."
	}
	bad := func(why string) (string, error) {
		return "", &Error{CodeInvalid, fmt.Sprintf(
			"image name %q: %s; write HOST[:PORT]/REPOSITORY[:TAG][@DIGEST], for example registry.example/redis:7", shown, why)}
	}
	parsed, err := reference.Parse(s)
	if err != nil {
		return bad(err.Error())
	}
	named, ok := parsed.(reference.Named)
	if !ok {
		return bad("it has no repository")
	}
	if host := reference.Domain(named); host != "localhost" && !strings.ContainsAny(host, ".:") {
		return bad("it has no registry host")
	}
	host, port, _ := strings.Cut(reference.Domain(named), ":")
	if i := strings.LastIndex(reference.Domain(named), "]"); i >= 0 {
		host, port = reference.Domain(named)[:i+1], strings.TrimPrefix(reference.Domain(named)[i+1:], ":")
	}
	if len(host) > 255 {
		return bad("no host has such a long name")
	}
	if n, err := strconv.ParseUint(port, 10, 64); port != "" && (err != nil || n < 1 || n > 65535) {
		return bad("ports are 1 to 65535")
	}
	// One registry's short names have a long form; the library knows which.
	if named, err = reference.ParseNormalizedNamed(s); err != nil {
		return bad(err.Error())
	}
	return reference.TagNameOnly(named).String(), nil
}
