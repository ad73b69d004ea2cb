package registry

import (
	"regexp"
	"slices"

	"github.com/opencontainers/go-digest"
)

// As the distribution-spec has them, but for lengths: a pattern is compiled whenever
// any command of foil begins, and one with 128 repetitions to as many states.
var (
	namePattern = regexp.MustCompile(`^[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*$`)
	tagPattern  = regexp.MustCompile(`^[a-zA-Z0-9_][a-zA-Z0-9._-]*$`)
)

// ValidName reports whether name is a repository's, of whatever length.
func ValidName(name string) bool { return namePattern.MatchString(name) }

// ValidTag reports whether tag is one.
func ValidTag(tag string) bool { return len(tag) <= 128 && tagPattern.MatchString(tag) }

// maxName leaves room for the registry's own name in the 255 bytes that many
// clients allow for both.
const maxName = 229

func checkName(name string) error {
	if len(name) > maxName || !ValidName(name) {
		return errorf(nameInvalid, "%q is no repository name: it wants lower-case words of a-z 0-9 joined by . _ - and /, at most %d bytes", name, maxName)
	}
	return nil
}

// algorithms are those that the specification asks registries to have.
var algorithms = []digest.Algorithm{digest.SHA256, digest.SHA512}

func checkAlgorithm(a digest.Algorithm) error {
	if !slices.Contains(algorithms, a) {
		return errorf(digestInvalid, "%q is no digest algorithm of this registry: it knows %v", a, algorithms)
	}
	return nil
}

func parseDigest(s string) (digest.Digest, error) {
	d, err := digest.Parse(s)
	if err != nil {
		return "", errorf(digestInvalid, "%q is no digest: %v", s, err)
	}
	return d, checkAlgorithm(d.Algorithm())
}

// parseReference reads a tag or a digest; the other one is empty.
func parseReference(s string) (tag string, d digest.Digest, err error) {
	if ValidTag(s) {
		return s, "", nil
	}
	d, err = parseDigest(s)
	if err != nil {
		err = errorf(manifestInvalid, "%q is neither a tag nor a digest that this registry knows", s)
	}
	return "", d, err
}
