package layertest

import (
	"fmt"
	"strings"
)

// SparseKind is one of the ways in which GNU tar writes sparse files.
type SparseKind int

// The kinds. archive/tar reads all of them and writes none.
const (
	SparseGNU   SparseKind = iota // the old one: type S
	SparsePAX00                   // pairs of records
	SparsePAX01                   // one record
	SparsePAX10                   // a map before the data
)

// SparseKinds are all of them.
var SparseKinds = []SparseKind{SparseGNU, SparsePAX00, SparsePAX01, SparsePAX10}

// Fragment is the bytes of a sparse file at an offset; what is between fragments
// is holes.
type Fragment struct {
	Offset int64
	Data   string
}

// Sparse returns the headers and data of one sparse file of size bytes, with
// padding: a part of a tar stream. Fragments are in order and do not overlap.
func Sparse(kind SparseKind, name string, size int64, fragments ...Fragment) []byte {
	var data strings.Builder
	pairs := make([][2]int64, 0, len(fragments)+1)
	for _, f := range fragments {
		data.WriteString(f.Data)
		pairs = append(pairs, [2]int64{f.Offset, int64(len(f.Data))})
	}
	pairs = append(pairs, [2]int64{size, 0})
	ustar := func(b []byte) { copy(b[257:], "ustar\x0000") }
	pax := func(typ byte, records, name, data string) []byte {
		out := pad(append(header('x', "PaxHeaders/"+name, len(records), ustar), records...))
		return pad(append(append(out, header(typ, name, len(data), ustar)...), data...))
	}
	switch kind {
	case SparseGNU:
		return sparseGNU(name, size, pairs, data.String())
	case SparsePAX00:
		records := record("GNU.sparse.size", fmt.Sprint(size)) + record("GNU.sparse.numblocks", fmt.Sprint(len(pairs)))
		for _, p := range pairs {
			records += record("GNU.sparse.offset", fmt.Sprint(p[0])) + record("GNU.sparse.numbytes", fmt.Sprint(p[1]))
		}
		return pax('0', records, name, data.String())
	case SparsePAX01:
		var list []string
		for _, p := range pairs {
			list = append(list, fmt.Sprint(p[0]), fmt.Sprint(p[1]))
		}
		records := record("GNU.sparse.size", fmt.Sprint(size)) + record("GNU.sparse.numblocks", fmt.Sprint(len(pairs))) +
			record("GNU.sparse.map", strings.Join(list, ",")) + record("GNU.sparse.name", name)
		return pax('0', records, "GNUSparseFile.0/"+name, data.String())
	}
	records := record("GNU.sparse.major", "1") + record("GNU.sparse.minor", "0") +
		record("GNU.sparse.name", name) + record("GNU.sparse.realsize", fmt.Sprint(size))
	table := fmt.Sprintln(len(pairs))
	for _, p := range pairs {
		table += fmt.Sprintf("%d\n%d\n", p[0], p[1])
	}
	return pax('0', records, "GNUSparseFile.0/"+name, string(pad([]byte(table)))+data.String())
}

// sparseGNU has four pairs in the header and 21 in each block after it.
func sparseGNU(name string, size int64, pairs [][2]int64, data string) []byte {
	fill := func(b []byte, most int) []byte {
		for ; most > 0 && len(pairs) > 0; most-- {
			b = append(b, fmt.Sprintf("%011o\x00%011o\x00", pairs[0][0], pairs[0][1])...)
			pairs = pairs[1:]
		}
		return b
	}
	out := header('S', name, len(data), func(b []byte) {
		copy(b[257:], "ustar  \x00")
		fill(b[386:386], 4)
		if len(pairs) > 0 {
			b[482] = 1
		}
		copy(b[483:], fmt.Sprintf("%011o\x00", size))
	})
	for len(pairs) > 0 {
		b := make([]byte, 512)
		fill(b[:0], 21)
		if len(pairs) > 0 {
			b[504] = 1
		}
		out = append(out, b...)
	}
	return pad(append(out, data...))
}

// header is one tar header with its checksum.
func header(typ byte, name string, size int, fill func(b []byte)) []byte {
	b := make([]byte, 512)
	copy(b, name)
	copy(b[100:], "0000644\x00")
	copy(b[108:], "0000000\x00")
	copy(b[116:], "0000000\x00")
	copy(b[124:], fmt.Sprintf("%011o\x00", size))
	copy(b[136:], "14524770400\x00")
	b[156] = typ
	fill(b)
	copy(b[148:], "        ")
	sum := 0
	for _, c := range b {
		sum += int(c)
	}
	copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
	return b
}

// record is one PAX record.
func record(k, v string) string {
	n := len(k) + len(v) + 3
	for len(fmt.Sprint(n))+len(k)+len(v)+3 != n {
		n = len(fmt.Sprint(n)) + len(k) + len(v) + 3
	}
	return fmt.Sprintf("%d %s=%s\n", n, k, v)
}

// pad appends zeros up to a whole block.
func pad(b []byte) []byte { return append(b, make([]byte, -len(b)&511)...) }
