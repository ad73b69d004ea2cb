package erofs

import (
	"fmt"
	"strings"

	"hydrofoil.dev/foil/internal/format/toc"
)

// Namespaces of xattrs. A whole name has an empty rest.
var namespaces = []struct {
	prefix string
	index  byte
	whole  bool
}{
	{"user.", 1, false},
	{"system.posix_acl_access", 2, true},
	{"system.posix_acl_default", 3, true},
	{"trusted.", 4, false},
	{"security.", 6, false},
}

// namespace splits an xattr's name. ok is false for names that Linux has no
// namespace for.
func namespace(name string) (index byte, rest string, ok bool) {
	for _, ns := range namespaces {
		if rest, found := strings.CutPrefix(name, ns.prefix); found && ns.whole == (rest == "") {
			return ns.index, rest, true
		}
	}
	return 0, "", false
}

const (
	xattrHeader      = 12
	xattrEntryHeader = 4
	maxXattrName     = 255
	maxXattrValue    = 1<<16 - 1
	maxShared        = 255 // of one inode
)

// xattrPlan says what of the xattr sets is shared.
type xattrPlan struct {
	sizes      []uint32          // of the xattr area, by set
	shared     map[string]uint32 // place in the shared area by key
	order      []*toc.Xattr      // of the shared area
	sharedSize int64             // bytes
	key        []byte            // scratch
}

func (p *xattrPlan) size(set uint32) int64 {
	return int64(p.sizes[set])
}

// keyOf returns the scratch buffer filled with what makes x equal to another.
func (p *xattrPlan) keyOf(x *toc.Xattr) []byte {
	p.key = append(append(append(p.key[:0], x.Name...), 0), x.Value...)
	return p.key
}

func entrySize(rest string, value []byte) int {
	return roundUp(xattrEntryHeader+len(rest)+len(value), 4)
}

func (img *Image) planXattrs() error {
	t, p := img.t, &img.xattrs
	uses := make([]uint32, len(t.Xattrs))
	for i := range t.Inodes {
		if int(t.Inodes[i].Xattrs) >= len(uses) {
			return fmt.Errorf("inode %d has xattr set %d of %d", i, t.Inodes[i].Xattrs, len(uses))
		}
		uses[t.Inodes[i].Xattrs]++
	}

	counts := make(map[string]int)
	for set, xs := range t.Xattrs {
		for i := range xs {
			if uses[set] > 0 {
				counts[string(p.keyOf(&xs[i]))] += int(uses[set])
			}
		}
	}
	p.shared = make(map[string]uint32)
	p.sizes = make([]uint32, len(t.Xattrs))
	for set, xs := range t.Xattrs {
		if uses[set] == 0 {
			continue
		}
		size, entries, shared := xattrHeader, 0, 0
		for i := range xs {
			x := &xs[i]
			_, rest, ok := namespace(x.Name)
			if !ok {
				continue
			}
			if len(rest) > maxXattrName || len(x.Value) > maxXattrValue {
				return fmt.Errorf("xattr %q with a name of %d and a value of %d bytes, at most %d and %d are possible",
					x.Name, len(x.Name), len(x.Value), maxXattrName, maxXattrValue)
			}
			entries++
			n := entrySize(rest, x.Value)
			key := p.keyOf(x)
			if _, there := p.shared[string(key)]; !there && counts[string(key)]*n > n+4*counts[string(key)] {
				p.shared[string(key)] = uint32(p.sharedSize / 4)
				p.order = append(p.order, x)
				p.sharedSize += int64(n)
			}
			if _, there := p.shared[string(key)]; there && shared < maxShared {
				shared++
				n = 4
			}
			size += n
		}
		if entries == 0 {
			continue
		}
		if (size-xattrHeader)/4+1 > maxXattrUnits {
			return fmt.Errorf("xattrs of %d bytes on one inode, at most %d are possible", size, xattrHeader+4*(maxXattrUnits-1))
		}
		p.sizes[set] = uint32(size)
	}
	if p.sharedSize/4 > nullBlock {
		return fmt.Errorf("shared xattrs of %d bytes", p.sharedSize)
	}
	return nil
}

// emitXattrs writes the xattr area of an inode that has the set.
func (img *Image) emitXattrs(out *writer, set uint32) {
	p := &img.xattrs
	if p.sizes[set] == 0 {
		return
	}
	xs := img.t.Xattrs[set]
	shared := 0
	for i := range xs {
		if _, there := p.shared[string(p.keyOf(&xs[i]))]; there && shared < maxShared {
			shared++
		}
	}
	out.u32(0)
	out.u8(byte(shared))
	out.zero(7)
	done := 0
	for i := range xs {
		if at, there := p.shared[string(p.keyOf(&xs[i]))]; there && done < maxShared {
			out.u32(at)
			done++
		}
	}
	done = 0
	for i := range xs {
		if _, there := p.shared[string(p.keyOf(&xs[i]))]; there && done < maxShared {
			done++
			continue
		}
		emitEntry(out, &xs[i])
	}
}

// emitEntry writes x, or nothing when it is in no namespace.
func emitEntry(out *writer, x *toc.Xattr) {
	index, rest, ok := namespace(x.Name)
	if !ok {
		return
	}
	out.u8(byte(len(rest)))
	out.u8(index)
	out.u16(uint16(len(x.Value)))
	out.str(rest)
	out.bytes(x.Value)
	out.align(4)
}
