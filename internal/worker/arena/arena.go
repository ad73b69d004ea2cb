// Package arena keeps the contents of one rootfs on the worker: a sparse file
// in which every content has a fixed, 4 KiB-aligned place before its bytes
// arrive, and the presence map that says which blocks are here and verified.
package arena
