package rootfs

import (
	"bytes"
	"os"
	"testing"
)

func TestAFileInUseIsNoticed(t *testing.T) {
	r := &Rootfs{dir: t.TempDir()}
	if r.IsOpen() {
		t.Error("a file that is not there is in use")
	}
	path := r.Path("meta.erofs")
	if err := os.WriteFile(path, bytes.Repeat([]byte{1}, 100), 0o600); err != nil {
		t.Fatal(err)
	}
	if r.IsOpen() {
		t.Error("a file that nobody has open is in use")
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	if !r.IsOpen() {
		t.Error("a file that is open is not in use")
	}
	if err := os.Rename(path, r.Path(OldMetaName)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("made anew"), 0o600); err != nil {
		t.Fatal(err)
	}
	if !r.IsOpen() {
		t.Error("the image of before is open, and not in use")
	}
	f.Close()
	if r.IsOpen() {
		t.Error("a file that was closed is in use still")
	}
}
