package kernel

import (
	"bytes"
	"encoding/binary"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// fuseRequest builds a request as the kernel does.
func fuseRequest(op FuseOp, unique, node uint64, pid uint32, body ...any) []byte {
	ne := binary.NativeEndian
	var b []byte
	for _, v := range body {
		switch v := v.(type) {
		case uint32:
			b = ne.AppendUint32(b, v)
		case uint64:
			b = ne.AppendUint64(b, v)
		case string:
			b = append(b, v...)
		}
	}
	h := ne.AppendUint32(nil, uint32(fuseInHeader+len(b)))
	h = ne.AppendUint32(h, uint32(op))
	h = ne.AppendUint64(h, unique)
	h = ne.AppendUint64(h, node)
	h = ne.AppendUint64(h, 0) // user, group
	h = ne.AppendUint32(h, pid)
	return append(ne.AppendUint32(h, 0), b...)
}

func TestParseFuseRequest(t *testing.T) {
	read := fuseRequest(FuseRead, 6, 77, 1234, uint64(0), uint64(8192), uint32(65536), uint32(0), uint64(0), uint32(0), uint32(0))
	for _, tt := range []struct {
		name string
		in   []byte
		want FuseRequest
		bad  bool
	}{
		{name: "read", in: read, want: FuseRequest{Op: FuseRead, Unique: 6, Node: 77, PID: 1234, Offset: 8192, Size: 65536}},
		{name: "read sent again", in: fuseRequest(FuseRead, 1<<63|6, 77, 1, uint64(0), uint64(0), uint32(1), uint32(0), uint64(0), uint64(0)),
			want: FuseRequest{Op: FuseRead, Unique: 1<<63 | 6, Node: 77, PID: 1, Size: 1}},
		{name: "short read", in: fuseRequest(FuseRead, 6, 77, 1, uint64(0), uint64(0)), bad: true},
		{name: "long read", in: fuseRequest(FuseRead, 6, 77, 1, uint64(0), uint64(0), uint32(FuseMaxRead+1), uint32(0), uint64(0), uint64(0)), bad: true},
		{name: "read at a negative offset", in: fuseRequest(FuseRead, 6, 77, 1, uint64(0), uint64(1<<63), uint32(1), uint32(0), uint64(0), uint64(0)), bad: true},
		{name: "truncated", in: read[:len(read)-1], bad: true},
		{name: "shorter than a header", in: read[:39], bad: true},
		{name: "empty", bad: true},
		{name: "lookup", in: fuseRequest(FuseLookup, 2, 1, 3, "123\x00"), want: FuseRequest{Op: FuseLookup, Unique: 2, Node: 1, PID: 3, Name: "123"}},
		{name: "lookup without an end", in: fuseRequest(FuseLookup, 2, 1, 3, "123"), bad: true},
		{name: "lookup of nothing", in: fuseRequest(FuseLookup, 2, 1, 3, "\x00\x00"), bad: true},
		{name: "open", in: fuseRequest(FuseOpen, 2, 9, 3, uint32(unix.O_RDWR), uint32(0)), want: FuseRequest{Op: FuseOpen, Unique: 2, Node: 9, PID: 3, Flags: unix.O_RDWR}},
		{name: "forget", in: fuseRequest(FuseForget, 0, 9, 0, uint64(4)), want: FuseRequest{Op: FuseForget, Node: 9, Forget: []uint64{9}}},
		{name: "forget two", in: fuseRequest(FuseBatchForget, 0, 0, 0, uint32(2), uint32(0), uint64(5), uint64(1), uint64(6), uint64(1)),
			want: FuseRequest{Op: FuseBatchForget, Forget: []uint64{5, 6}}},
		{name: "forget more than there are", in: fuseRequest(FuseBatchForget, 0, 0, 0, ^uint32(0), uint32(0), uint64(5), uint64(1)), bad: true},
		{name: "interrupt", in: fuseRequest(FuseInterrupt, 7, 0, 0, uint64(6)), want: FuseRequest{Op: FuseInterrupt, Unique: 7, Interrupt: 6}},
		{name: "unknown", in: fuseRequest(4711, 8, 3, 2), want: FuseRequest{Op: 4711, Unique: 8, Node: 3, PID: 2}},
		{name: "init", in: fuseRequest(FuseInit, 2, 0, 0, uint32(7), uint32(41), uint32(131072), uint32(fuseInitExt), uint32(fuseHasResend)),
			want: FuseRequest{Op: FuseInit, Unique: 2, minor: 41, readAhead: 131072, flags: fuseInitExt, flags2: fuseHasResend}},
		{name: "init of an old kernel", in: fuseRequest(FuseInit, 2, 0, 0, uint32(7), uint32(12), uint32(0), uint32(0)), bad: true},
		{name: "init of another protocol", in: fuseRequest(FuseInit, 2, 0, 0, uint32(8), uint32(40), uint32(0), uint32(0)), bad: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ParseFuseRequest(tt.in)
			if (err != nil) != tt.bad {
				t.Fatalf("error %v", err)
			}
			if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(FuseRequest{})); diff != "" && !tt.bad {
				t.Error(diff)
			}
		})
	}
}

// The kernel refuses answers of another length.
func TestFuseAnswerLengths(t *testing.T) {
	for name, tt := range map[string]struct {
		got  []byte
		want int
	}{
		"error":  {FuseError(nil, 1, unix.EIO), 16},
		"init":   {FuseInitAnswer(nil, FuseRequest{Unique: 1, minor: 45}), 16 + 64},
		"entry":  {FuseEntryAnswer(nil, 1, FuseFile{Node: 5, Size: 10}), 16 + 128},
		"attr":   {FuseAttrAnswer(nil, 1, FuseFile{Node: 5, Dir: true}), 16 + 104},
		"open":   {FuseOpenAnswer(nil, 1), 16 + 16},
		"statfs": {FuseStatfsAnswer(nil, 1), 16 + 80},
	} {
		if n := binary.NativeEndian.Uint32(tt.got); len(tt.got) != tt.want || int(n) != tt.want {
			t.Errorf("%s: %d bytes, says %d, want %d", name, len(tt.got), n, tt.want)
		}
	}
	if e := int32(binary.NativeEndian.Uint32(FuseError(nil, 1, unix.EIO)[4:])); e != -int32(unix.EIO) {
		t.Errorf("error %d", e)
	}
}

func FuzzParseFuseRequest(f *testing.F) {
	f.Add(fuseRequest(FuseRead, 6, 77, 1234, uint64(0), uint64(8192), uint32(65536), uint32(0), uint64(0), uint64(0)))
	f.Add(fuseRequest(FuseLookup, 2, 1, 3, "123\x00"))
	f.Add(fuseRequest(FuseBatchForget, 0, 0, 0, uint32(2), uint32(0), uint64(5), uint64(1), uint64(6), uint64(1)))
	f.Add(fuseRequest(FuseInit, 2, 0, 0, uint32(7), uint32(41), uint32(131072), uint32(fuseInitExt), uint32(fuseHasResend)))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := ParseFuseRequest(b)
		if err != nil {
			return
		}
		if r.Op == FuseRead && (r.Size > FuseMaxRead || int64(r.Offset)+int64(r.Size) < 0) {
			t.Errorf("read of %d bytes at %d", r.Size, r.Offset)
		}
		if len(r.Forget) > len(b)/8 || len(r.Name) > len(b) || bytes.IndexByte([]byte(r.Name), 0) >= 0 {
			t.Errorf("more than there is: %+v", r)
		}
	})
}

func TestMountFuse(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	if _, err := probeFUSE(t.Context(), ""); err != nil {
		t.Skip(err)
	}
	dir := t.TempDir()
	dev, err := MountFuse(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := Unmount(dir, true); err != nil {
			t.Error(err)
		}
	})
	var b [FuseRequestLen]byte
	n, err := dev.Read(b[:])
	if err != nil {
		t.Fatal(err)
	}
	r, err := ParseFuseRequest(b[:n])
	if err != nil || r.Op != FuseInit {
		t.Fatalf("first request %+v, %v", r, err)
	}
	if _, err := dev.Write(FuseInitAnswer(nil, r)); err != nil {
		t.Fatal(err)
	}
	if known, err := FuseKnows(int(dev.Fd()), 4711); known || err != nil {
		t.Errorf("the kernel knows a node that is not there: %v, %v", known, err)
	}
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.ReadDir(dir); err == nil {
		t.Error("a filesystem without a connection lists its files")
	}
}
