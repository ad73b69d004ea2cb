package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// fanEvent puts an event together as the kernel does.
func fanEvent(number, pid int32, infos ...[]byte) []byte {
	ne := binary.NativeEndian
	n := fanMetadataLen
	for _, i := range infos {
		n += len(i)
	}
	b := ne.AppendUint32(nil, uint32(n))
	b = append(b, unix.FANOTIFY_METADATA_VERSION, 0)
	b = ne.AppendUint16(b, fanMetadataLen)
	b = ne.AppendUint64(b, unix.FAN_PRE_ACCESS)
	b = ne.AppendUint32(b, uint32(number))
	b = ne.AppendUint32(b, uint32(pid))
	for _, i := range infos {
		b = append(b, i...)
	}
	return b
}

func fanInfo(kind byte, body ...uint64) []byte {
	ne := binary.NativeEndian
	b := []byte{kind, 0}
	b = ne.AppendUint16(b, uint16(8+8*len(body)))
	b = append(b, 0, 0, 0, 0)
	for _, v := range body {
		b = ne.AppendUint64(b, v)
	}
	return b
}

func TestParseFanotifyEvents(t *testing.T) {
	ranged := fanEvent(5, 100, fanInfo(unix.FAN_EVENT_INFO_TYPE_RANGE, 4096, 131072))
	plain := fanEvent(-1, 7)
	other := fanEvent(6, 101, fanInfo(unix.FAN_EVENT_INFO_TYPE_PIDFD), fanInfo(unix.FAN_EVENT_INFO_TYPE_RANGE, 1, 2))
	a := FanotifyEvent{Mask: unix.FAN_PRE_ACCESS, Number: 5, PID: 100, Offset: 4096, Count: 131072, Ranged: true}
	b := FanotifyEvent{Mask: unix.FAN_PRE_ACCESS, Number: -1, PID: 7}
	c := FanotifyEvent{Mask: unix.FAN_PRE_ACCESS, Number: 6, PID: 101, Offset: 1, Count: 2, Ranged: true}
	cat := func(bs ...[]byte) (all []byte) {
		for _, b := range bs {
			all = append(all, b...)
		}
		return all
	}
	with := func(b []byte, at int, v byte) []byte {
		b = append([]byte(nil), b...)
		b[at] = v
		return b
	}
	for _, tt := range []struct {
		name string
		in   []byte
		want []FanotifyEvent
		bad  bool
	}{
		{"nothing", nil, nil, false},
		{"several", cat(ranged, plain, other), []FanotifyEvent{a, b, c}, false},
		{"cut off", ranged[:20], nil, true},
		{"cut off later", cat(plain, ranged[:40]), []FanotifyEvent{b}, true},
		{"version", with(ranged, 4, 2), nil, true},
		{"metadata too short", with(ranged, 6, 23), nil, true},
		{"metadata longer than the event", with(plain, 6, 25), nil, true},
		{"event shorter than its metadata", with(ranged, 0, 8), nil, true},
		{"event of no length", with(ranged, 0, 0), nil, true},
		{"record of no length", with(ranged, fanMetadataLen+2, 0), nil, true},
		{"record too long", with(ranged, fanMetadataLen+2, 25), nil, true},
		{"short range", fanEvent(5, 1, fanInfo(unix.FAN_EVENT_INFO_TYPE_RANGE, 1)), nil, true},
		{"half a record", fanEvent(5, 1, []byte{1, 0}), nil, true},
	} {
		got, err := ParseFanotifyEvents(nil, tt.in)
		if (err != nil) != tt.bad {
			t.Errorf("%s: error %v", tt.name, err)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

func FuzzParseFanotifyEvents(f *testing.F) {
	f.Add(fanEvent(5, 100, fanInfo(unix.FAN_EVENT_INFO_TYPE_RANGE, 4096, 131072)))
	f.Add(append(fanEvent(5, 100), fanEvent(6, 100, fanInfo(unix.FAN_EVENT_INFO_TYPE_PIDFD))...))
	f.Fuzz(func(t *testing.T, b []byte) {
		events, err := ParseFanotifyEvents(nil, b)
		if len(events) > len(b)/fanMetadataLen {
			t.Fatalf("%d events in %d bytes", len(events), len(b))
		}
		if err == nil && len(b) > 0 && len(events) == 0 {
			t.Fatal("bytes left without an error")
		}
	})
}

// TestFanotifyEvent: one read of a marked file, denied and allowed.
func TestFanotifyEvent(t *testing.T) {
	group, err := NewFanotifyGroup()
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer group.Close()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, make([]byte, 10000), 0o600); err != nil {
		t.Fatal(err)
	}
	before, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer before.Close()
	err = MarkPreAccess(group, before)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	after, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer after.Close()
	if _, err := before.ReadAt(make([]byte, 100), 0); err != nil {
		t.Errorf("the descriptor from before the mark: %v", err)
	}

	read := func(answer func(group int, number int32) error) error {
		t.Helper()
		done := make(chan error, 1)
		go func() {
			_, err := after.ReadAt(make([]byte, 3000), 4097)
			done <- err
		}()
		if err := group.SetReadDeadline(time.Now().Add(2 * time.Minute)); err != nil {
			t.Fatal(err)
		}
		var buf [PreAccessEventLen]byte
		n, err := group.Read(buf[:])
		if err != nil {
			t.Fatal(err)
		}
		events, err := ParseFanotifyEvents(nil, buf[:n])
		if err != nil || len(events) != 1 {
			t.Fatalf("%d events, error %v", len(events), err)
		}
		e := events[0]
		defer unix.Close(int(e.Number))
		// The range is rounded to pages; what reads is a thread.
		_, own := os.Stat(fmt.Sprintf("/proc/self/task/%d", e.PID))
		if e.Mask != unix.FAN_PRE_ACCESS || own != nil || !e.Ranged || e.Offset > 4097 || e.Offset+e.Count < 7097 {
			t.Errorf("event %+v, want a range that has 4097+3000, of this process", e)
		}
		withFD(group, func(fd int) error {
			if err := FanotifyAllow(fd, e.Number+1); !errors.Is(err, unix.ENOENT) {
				t.Errorf("answer to a number without an event: %v, want ENOENT", err)
			}
			if err := answer(fd, e.Number); err != nil {
				t.Error(err)
			}
			return nil
		})
		return <-done
	}
	if err := read(func(g int, n int32) error { return FanotifyDeny(g, n, unix.EIO) }); !errors.Is(err, unix.EIO) {
		t.Errorf("denied read: %v, want EIO", err)
	}
	if err := read(FanotifyAllow); err != nil {
		t.Errorf("allowed read: %v", err)
	}
	for range 2 {
		if err := UnmarkPreAccess(group, before); err != nil {
			t.Error(err)
		}
	}
	if _, err := after.ReadAt(make([]byte, 100), 0); err != nil {
		t.Errorf("read of an unmarked file: %v", err)
	}
}
