package oci

import (
	"fmt"

	"github.com/containerd/platforms"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Choose returns the entry of an index that containerd takes for a platform: the one
// that its matcher prefers, of equals the first. One that names no platform is
// taken when nothing else matches; what its image's config says decides then (Fits).
//
// Errors: ErrNoPlatform; ErrRefused when the entry is not of an image.
func Choose(x *ocispec.Index, p ocispec.Platform) (ocispec.Descriptor, error) {
	match, err := matcher(p)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	var best *ocispec.Descriptor
	for i := range x.Manifests {
		d := &x.Manifests[i]
		switch {
		case d.Platform != nil && !match.Match(*d.Platform):
		case best == nil,
			best.Platform == nil && d.Platform != nil,
			best.Platform != nil && d.Platform != nil && match.Less(*d.Platform, *best.Platform):
			best = d
		}
	}
	switch {
	case best == nil:
		return ocispec.Descriptor{}, fmt.Errorf("%w: the index has nothing for %s; ask for another platform", ErrNoPlatform, platforms.Format(p))
	case !IsManifest(best.MediaType):
		return ocispec.Descriptor{}, refused("the index has %s for %s, of type %q, which is no image's manifest", best.Digest, platforms.Format(p), best.MediaType)
	}
	return *best, checkDescriptor("entry", *best, MaxDocument)
}

// Fits checks that the image of an entry that Choose returned is of the platform: an
// entry that does not say so leaves it to the image's config.
//
// Errors: ErrNoPlatform.
func Fits(d ocispec.Descriptor, c *ocispec.Image, p ocispec.Platform) error {
	if d.Platform != nil {
		return nil
	}
	match, err := matcher(p)
	if err == nil && !match.Match(c.Platform) {
		err = fmt.Errorf("%w: the index has nothing for %s, only %s, which is of %s; ask for another platform",
			ErrNoPlatform, platforms.Format(p), d.Digest, platforms.Format(c.Platform))
	}
	return err
}

// matcher is containerd's for a platform. It is as large as the number of the variant, which
// comes from the other side of a connection.
func matcher(p ocispec.Platform) (platforms.MatchComparer, error) {
	if len(p.Variant) > len("v8.9") {
		return nil, fmt.Errorf("%w: there is no variant %.20q of %s; ask for another platform", ErrNoPlatform, p.Variant, p.Architecture)
	}
	return platforms.Only(p), nil
}

// Own is the platform of this machine.
func Own() ocispec.Platform { return platforms.DefaultSpec() }
