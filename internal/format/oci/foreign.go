package oci

import (
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Foreign reports whether a descriptor is of something that clients fetch from where
// its urls say, and that its registry need not keep. Neither server nor worker
// follows urls: who may write a manifest would choose what they ask, and where.
func Foreign(d ocispec.Descriptor) bool {
	return len(d.URLs) > 0 ||
		strings.HasPrefix(d.MediaType, "application/vnd.oci.image.layer.nondistributable.") ||
		strings.HasPrefix(d.MediaType, "application/vnd.docker.image.rootfs.foreign.")
}
