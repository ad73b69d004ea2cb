package scrub

import (
	"context"
	"errors"
	"slices"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/flatten"
	"hydrofoil.dev/foil/internal/format/oci"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat"
	"hydrofoil.dev/foil/internal/server/ingest"
)

type manifest = sqlcat.ImageManifest

// nameImages says of each finding which images need it.
func (s *Scrubber) nameImages(ctx context.Context) error {
	of := map[digest.Digest][]int{} // into Findings
	list := s.s.Report.Findings
	for i, f := range list {
		if list[i].Images = nil; f.Of != "" {
			of[f.Of] = append(of[f.Of], i)
		}
	}
	if len(of) == 0 {
		return nil
	}
	return s.o.Catalog.EachManifest(ctx, func(m manifest) error {
		needs, chain, err := s.needs(ctx, m)
		if err != nil {
			return err
		}
		hit := map[int]bool{}
		for _, d := range append(needs, m.Digest, chain) {
			for _, i := range of[d] {
				hit[i] = true
			}
		}
		for i := range hit {
			if f := &list[i]; len(f.Images) < maxImages {
				f.Images = append(f.Images, imageName(m))
			}
		}
		return nil
	})
}

func imageName(m manifest) string {
	if len(m.Tags) > 0 {
		return m.Repository + ":" + m.Tags[0]
	}
	return m.Repository + "@" + m.Digest.String()
}

// needs returns the blobs that a manifest names, and the chain ID of its layers if they were ingested.
func (s *Scrubber) needs(ctx context.Context, m manifest) (blobs []digest.Digest, chain digest.Digest, err error) {
	image, err := oci.ReadManifest(m.MediaType, m.Bytes)
	if err != nil {
		return nil, "", nil // an index, an artifact that is no image
	}
	blobs = append(blobs, image.Config.Digest)
	for _, l := range image.Layers {
		blobs = append(blobs, l.Digest)
	}
	if len(image.Layers) == 0 {
		return blobs, "", nil
	}
	rows, err := s.o.Catalog.Layers(ctx, blobs[1:])
	if errors.Is(err, catalog.ErrNotFound) {
		return blobs, "", nil
	}
	if err != nil {
		return nil, "", err
	}
	var diffIDs []digest.Digest
	for _, row := range rows {
		if row.Refused != "" {
			return blobs, "", nil
		}
		diffIDs = append(diffIDs, row.DiffID)
	}
	return blobs, flatten.ChainID(diffIDs), nil
}

var errFound = errors.New("found")

// layersOf returns the layers of an image whose rootfs it is; nil: there is none.
func (s *Scrubber) layersOf(ctx context.Context, chain digest.Digest) (layers []ingest.Descriptor, err error) {
	err = s.o.Catalog.EachManifest(ctx, func(m manifest) error {
		blobs, of, err := s.needs(ctx, m)
		if err != nil || of != chain {
			return err
		}
		for _, d := range slices.Clone(blobs[1:]) {
			layers = append(layers, ingest.Descriptor{Digest: d})
		}
		return errFound
	})
	if errors.Is(err, errFound) {
		err = nil
	}
	return layers, err
}
