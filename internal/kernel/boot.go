package kernel

import (
	"encoding/hex"
	"fmt"
	"os"
	"strings"
)

// BootID tells one boot of a machine from another.
type BootID [16]byte

// ReadBootID returns that of this boot.
func ReadBootID() (BootID, error) {
	const path = "/proc/sys/kernel/random/boot_id"
	text, err := os.ReadFile(path)
	if err != nil {
		return BootID{}, fmt.Errorf("read the boot ID: %w", err)
	}
	id, err := hex.DecodeString(strings.ReplaceAll(strings.TrimSpace(string(text)), "-", ""))
	if err != nil || len(id) != len(BootID{}) {
		return BootID{}, fmt.Errorf("read the boot ID: %s holds %q", path, text)
	}
	return BootID(id), nil
}

// String is the ID as the kernel writes it.
func (id BootID) String() string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}
