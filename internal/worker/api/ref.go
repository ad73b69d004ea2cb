package api

import (
	"fmt"

	"github.com/distribution/reference"
)

// NormalRef checks an image name, HOST[:PORT]/REPOSITORY[:TAG][@DIGEST], and
// returns its normal form: with the tag "latest" when it has neither tag nor
// digest. The host must be there: which registry a name means is never guessed.
// The error is an *Error with CodeInvalid.
func NormalRef(s string) (string, error) {
	named, err := reference.ParseNamed(s)
	if err != nil {
		if full, nerr := reference.ParseNormalizedNamed(s); nerr == nil {
			return "", &Error{CodeInvalid, fmt.Sprintf(
				"image name %q has no registry host: write HOST[:PORT]/REPOSITORY[:TAG], for example %s",
				s, reference.TagNameOnly(full))}
		}
		return "", &Error{CodeInvalid, fmt.Sprintf(
			"image name %q: %v: write HOST[:PORT]/REPOSITORY[:TAG][@DIGEST]", s, err)}
	}
	return reference.TagNameOnly(named).String(), nil
}
