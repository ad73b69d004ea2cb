// Package durable makes what was written survive a power cut.
package durable

import (
	"errors"
	"os"
	"path/filepath"
)

// Sync makes durable what path names: the content of a file, or the names in a
// directory. Other names of the file, or those of the directory itself, are not.
func Sync(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// Replace makes the file at path hold data, and its name durable. After a crash it
// holds data, or what it held before. Meanwhile there is a file path.new, which a
// crash may leave.
func Replace(path string, data []byte) error {
	f, err := os.OpenFile(path+".new", os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return Sync(filepath.Dir(path))
}
