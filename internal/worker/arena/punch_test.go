package arena

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"pgregory.net/rapid"
)

// Whatever is kept has its bytes, whatever is not reads as zeros and takes
// nothing; and no map is left that says otherwise.
func TestPunchKeepsWhatItIsTold(t *testing.T) {
	const blocks = 40
	rapid.Check(t, func(rt *rapid.T) {
		dir, err := os.MkdirTemp(t.TempDir(), "arena")
		if err != nil {
			rt.Fatal(err)
		}
		data := bytes.Repeat([]byte{0xa5}, blocks*BlockSize)
		for _, name := range []string{FileName, presenceName, durableName} {
			if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
				rt.Fatal(err)
			}
		}
		var keep []Range
		want := make([]byte, len(data))
		kept := int64(0)
		for at := int64(0); at < blocks; {
			at += rapid.Int64Range(0, 5).Draw(rt, "gap")
			if at >= blocks {
				break
			}
			n := rapid.Int64Range(1, min(8, blocks-at)*BlockSize).Draw(rt, "length")
			keep = append(keep, Range{at * BlockSize, n})
			whole := (n + BlockSize - 1) / BlockSize
			copy(want[at*BlockSize:(at+whole)*BlockSize], data)
			at, kept = at+whole, kept+whole
		}
		freed, err := Punch(dir, keep)
		if err != nil {
			rt.Fatal(err)
		}
		// The filesystem may need a block of its own for where the pieces that are
		// left lie: ext4 has room for four in the inode, once they are on the disk.
		if most := (blocks - kept) * BlockSize; freed > most || freed < most-BlockSize {
			rt.Errorf("freed %d bytes, want %d", freed, most)
		}
		got, err := os.ReadFile(filepath.Join(dir, FileName))
		if err != nil {
			rt.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			rt.Error("what is left is not what was to be kept")
		}
		for _, name := range []string{presenceName, durableName} {
			if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
				rt.Errorf("%s is there still", name)
			}
		}
	})
}

func TestPunchRefusesRangesThatMakeNoSense(t *testing.T) {
	dir := t.TempDir()
	data := bytes.Repeat([]byte{0xa5}, 4*BlockSize)
	path := filepath.Join(dir, FileName)
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, keep := range map[string][]Range{
		"not a block":  {{Off: 10, Len: 10}},
		"overlapping":  {{Off: 0, Len: 2 * BlockSize}, {Off: BlockSize, Len: 1}},
		"descending":   {{Off: 2 * BlockSize, Len: 1}, {Off: 0, Len: 1}},
		"past the end": {{Off: 5 * BlockSize, Len: 1}},
	} {
		if _, err := Punch(dir, keep); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
