package node

import (
	"hydrofoil.dev/foil/internal/format/toc/toctest"
	"hydrofoil.dev/foil/internal/worker/bundletest"
)

// files are an image's files by name, in its root directory.
type files = toctest.Files

var some = toctest.Some

type (
	fakeImage  = bundletest.Image
	fakeServer = bundletest.Server
)

var (
	newFakeImage  = bundletest.NewImage
	newFakeServer = bundletest.New
)
