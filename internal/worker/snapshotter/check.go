package snapshotter

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	"go.etcd.io/bbolt"
)

// check reads the whole database of snapshots, before anybody relies on it: bbolt
// panics when it comes to a page that is not what it should be, and a daemon that
// dies of that leaves the reads of all containers waiting. A database that is empty
// while there are snapshots is damaged as well: what they hold would be taken for
// leftovers, and the writable layers of containers are among it.
func check(dir string) (err error) {
	path := filepath.Join(dir, "metadata.db")
	defer func() {
		if err != nil {
			err = fmt.Errorf("the database of snapshots %s is damaged: %w: put a copy of it back; or move %s away, start foil node again, and in containerd remove all containers and images of this snapshotter, and pull them again", path, err, dir)
		}
	}()
	fi, err := os.Stat(path)
	if err == nil && fi.Size() > 0 {
		return readAll(path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	made, err := filepath.Glob(filepath.Join(dir, "snapshots", "*", "fs"))
	if err == nil && len(made) > 0 {
		err = fmt.Errorf("it is empty, and there are %d snapshots", len(made))
	}
	return err
}

// readAll reads every key of a bbolt database.
func readAll(path string) (err error) {
	// The file is mapped: where it is cut, or the disk cannot be read, the kernel
	// says so by a fault.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = errors.Join(err, fmt.Errorf("%v", p))
		}
	}()
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{ReadOnly: true, Timeout: 10 * time.Second})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	tx, err := db.Begin(false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, tx.Rollback()) }()
	return tx.ForEach(func(_ []byte, b *bbolt.Bucket) error { return readBucket(b) })
}

func readBucket(b *bbolt.Bucket) error {
	return b.ForEach(func(k, v []byte) error {
		if v != nil {
			return nil
		}
		return readBucket(b.Bucket(k))
	})
}
