package api

import (
	"fmt"
	"strings"

	"github.com/distribution/reference"
)

// NormalRef checks an image name, HOST[:PORT]/REPOSITORY[:TAG][@DIGEST], and
// returns its normal form, by which the daemon lists it: with the tag "latest"
// when it has neither tag nor digest. The host must be there: which registry a
// name means is never guessed. The error is an *Error with CodeInvalid.
func NormalRef(s string) (string, error) {
	bad := func(why string) (string, error) {
		return "", &Error{CodeInvalid, fmt.Sprintf(
			"image name %q: %s; write HOST[:PORT]/REPOSITORY[:TAG][@DIGEST], for example registry.example/redis:7", s, why)}
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
	// One registry's short names have a long form; the library knows which.
	if named, err = reference.ParseNormalizedNamed(s); err != nil {
		return bad(err.Error())
	}
	return reference.TagNameOnly(named).String(), nil
}
