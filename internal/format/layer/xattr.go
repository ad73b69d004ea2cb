package layer

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"hydrofoil.dev/foil/internal/format/toc"
)

const paxXattr = "SCHILY.xattr."

// maxXattrValue is what the kernel takes (64 KiB) and EROFS can hold.
const maxXattrValue = 65535

// xattrs returns the attributes that a tar header sets, sorted by name, without
// those that containerd passes over.
func xattrs(records map[string]string, o Options) ([]toc.Xattr, error) {
	var set []toc.Xattr
	total := 0
	for key, value := range records {
		name, ok := strings.CutPrefix(key, paxXattr)
		if !ok {
			continue
		}
		keep, err := CheckXattr(name, []byte(value))
		if err != nil {
			return nil, err
		}
		if !keep {
			continue
		}
		total += len(name) + len(value)
		set = append(set, toc.Xattr{Name: name, Value: []byte(value)})
	}
	if total > o.MaxXattrs {
		return nil, fmt.Errorf("%d bytes of extended attributes, the limit is %d", total, o.MaxXattrs)
	}
	slices.SortFunc(set, func(a, b toc.Xattr) int { return cmp.Compare(a.Name, b.Name) })
	return set, nil
}

// CheckXattr says whether an attribute is kept, or why the kernel would refuse
// it: a bad name, a value that is too long, or a security.capability or POSIX
// ACL that is not one. trusted.* (containerd's own rule) and name spaces that
// file systems do not have are not kept.
func CheckXattr(name string, value []byte) (keep bool, err error) {
	if name == "" || len(name) > maxName || strings.IndexByte(name, 0) >= 0 {
		return false, fmt.Errorf("extended attribute name of %d bytes", len(name))
	}
	if strings.HasPrefix(name, "trusted.") {
		return false, nil
	}
	if len(value) > maxXattrValue {
		return false, fmt.Errorf("extended attribute %q of %d bytes, at most %d are possible", name, len(value), maxXattrValue)
	}
	switch {
	case name == "user." || name == "security.":
		return false, fmt.Errorf("extended attribute %q has no name after its name space", name)
	case name == "security.capability":
		if !validCapability(value) {
			return false, fmt.Errorf("extended attribute %q is no file capability: %x", name, shorten(string(value)))
		}
	case name == ACLAccess || name == ACLDefault:
		if len(value) > 0 {
			if _, err := parseACL(value); err != nil {
				return false, fmt.Errorf("extended attribute %q: %w", name, err)
			}
		}
	case strings.HasPrefix(name, "user."), strings.HasPrefix(name, "security."):
	default:
		return false, nil
	}
	return true, nil
}

// validCapability knows revisions 2 and 3 of struct vfs_cap_data
// (linux/capability.h), which are those that the kernel lets one set.
func validCapability(v []byte) bool {
	if len(v) < 4 {
		return false
	}
	const effective = 1
	switch binary.LittleEndian.Uint32(v) &^ effective {
	case 0x02000000:
		return len(v) == 20
	case 0x03000000:
		return len(v) == 24
	}
	return false
}
