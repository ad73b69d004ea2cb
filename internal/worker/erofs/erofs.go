// Package erofs writes EROFS metadata images: every directory, inode and xattr
// of a rootfs, with file data in other files (arenas) that are given to the
// kernel as extra devices.
package erofs
