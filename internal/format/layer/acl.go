package layer

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// The attributes that hold POSIX ACLs. Setting the first also sets permissions,
// and chmod changes it.
const (
	ACLAccess  = "system.posix_acl_access"
	ACLDefault = "system.posix_acl_default"
)

// ACL is a POSIX ACL as acl(5) and linux/posix_acl_xattr.h have it.
type acl []aclEntry

type aclEntry struct {
	tag, perm uint16
	id        uint32
}

const (
	aclVersion  = 2
	aclUserObj  = 0x01
	aclUser     = 0x02
	aclGroupObj = 0x04
	aclGroup    = 0x08
	aclMask     = 0x10
	aclOther    = 0x20
)

// parseACL accepts what the kernel does: entries in the order of their tags,
// one each of owner, group and others, and a mask when there are named ones.
func parseACL(v []byte) (acl, error) {
	if len(v) < 4 || (len(v)-4)%8 != 0 {
		return nil, fmt.Errorf("POSIX ACL of %d bytes", len(v))
	}
	if n := binary.LittleEndian.Uint32(v); n != aclVersion {
		return nil, fmt.Errorf("POSIX ACL of version %d, want %d", n, aclVersion)
	}
	var a acl
	last, count, named := uint16(0), map[uint16]int{}, false
	for b := v[4:]; len(b) > 0; b = b[8:] {
		e := aclEntry{
			tag:  binary.LittleEndian.Uint16(b),
			perm: binary.LittleEndian.Uint16(b[2:]),
			id:   binary.LittleEndian.Uint32(b[4:]),
		}
		if e.perm > 7 {
			return nil, fmt.Errorf("POSIX ACL with permissions %#o", e.perm)
		}
		switch e.tag {
		case aclUserObj, aclGroupObj, aclMask, aclOther:
			if count[e.tag] > 0 {
				return nil, errors.New("POSIX ACL with an entry given twice")
			}
		case aclUser, aclGroup:
			named = true
			if e.id == 1<<32-1 {
				return nil, errors.New("POSIX ACL with an invalid ID")
			}
		default:
			return nil, fmt.Errorf("POSIX ACL with tag %#x", e.tag)
		}
		if e.tag < last {
			return nil, errors.New("POSIX ACL out of order")
		}
		last = e.tag
		count[e.tag]++
		a = append(a, e)
	}
	if count[aclUserObj] != 1 || count[aclGroupObj] != 1 || count[aclOther] != 1 ||
		named && count[aclMask] == 0 {
		return nil, errors.New("POSIX ACL without an entry that it must have")
	}
	return a, nil
}

// ChmodACL returns the value of an access ACL after chmod to mode, as the
// kernel would change it; nil when the permissions alone then say all of it.
// Value must have passed CheckXattr.
func ChmodACL(value []byte, mode uint32) []byte {
	a, err := parseACL(value)
	if err != nil {
		return nil
	}
	group := uint16(aclGroupObj)
	for _, e := range a {
		if e.tag == aclMask {
			group = aclMask
		}
	}
	minimal := true
	out := binary.LittleEndian.AppendUint32(nil, aclVersion)
	for _, e := range a {
		switch e.tag {
		case aclUserObj:
			e.perm = uint16(mode >> 6 & 7)
		case aclOther:
			e.perm = uint16(mode & 7)
		case aclUser, aclGroup, aclMask:
			minimal = false
		}
		if e.tag == group {
			e.perm = uint16(mode >> 3 & 7)
		}
		if e.tag != aclUser && e.tag != aclGroup {
			e.id = 1<<32 - 1
		}
		out = binary.LittleEndian.AppendUint16(out, e.tag)
		out = binary.LittleEndian.AppendUint16(out, e.perm)
		out = binary.LittleEndian.AppendUint32(out, e.id)
	}
	if minimal {
		return nil
	}
	return out
}
