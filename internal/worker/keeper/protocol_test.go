package keeper

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the golden files")

var samples = []message{
	{kind: kindHello, lowest: 1, highest: 7},
	{kind: kindPut, name: "gate/group"},
	{kind: kindDrop, name: strings.Repeat("n", 255)},
	{kind: kindAll},
	{kind: kindStop},
	{kind: kindWelcome, version: 1, pid: 4711, held: 3},
	{kind: kindOK},
	{kind: kindError, code: codeNotEmpty, text: "the keeper holds 3 descriptors"},
	{kind: kindItems, more: true, names: []string{"a", "arena/sha256:00"}},
	{kind: kindItems},
	{kind: kindMind},
	{kind: kindTake},
}

func TestProtocolGolden(t *testing.T) {
	var text strings.Builder
	for _, m := range samples {
		fmt.Fprintf(&text, "%x\n", appendMessage(nil, m))
	}
	golden := filepath.Join("testdata", "protocol.v1")
	if *update {
		if err := os.WriteFile(golden, []byte(text.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), text.String()); diff != "" {
		t.Errorf("messages differ from %s (-want +got):\n%s", golden, diff)
	}
	for i, line := range strings.Fields(string(want)) {
		var b []byte
		if _, err := fmt.Sscanf(line, "%x", &b); err != nil {
			t.Fatal(err)
		}
		m, err := parseMessage(b)
		if err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff(samples[i], m, cmp.AllowUnexported(message{})); diff != "" {
			t.Errorf("message %d (-want +got):\n%s", i, diff)
		}
	}
}

func TestParseMessageRefuses(t *testing.T) {
	for _, m := range samples {
		b := appendMessage(nil, m)
		if m.kind != kindError {
			if _, err := parseMessage(append(b, 0)); err == nil {
				t.Errorf("type %d with a byte too many: no error", m.kind)
			}
		}
		for n := range b {
			if m.kind == kindError && n >= 3 {
				break // text may end anywhere
			}
			if _, err := parseMessage(b[:n]); err == nil {
				t.Errorf("type %d cut off at %d: no error", m.kind, n)
			}
		}
	}
	for name, b := range map[string][]byte{
		"empty name":     {byte(kindPut), 0},
		"more than more": {byte(kindItems), 2, 0, 0},
		"too many names": append([]byte{byte(kindItems), 0, 254, 0}, bytes.Repeat([]byte{1, 'x'}, 254)...),
	} {
		if _, err := parseMessage(b); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	var unknown unknownKind
	if _, err := parseMessage([]byte{99, 1, 2}); !errors.As(err, &unknown) || unknown != 99 {
		t.Errorf("unknown type: %v", err)
	}
}

func FuzzParseMessage(f *testing.F) {
	for _, m := range samples {
		f.Add(appendMessage(nil, m))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := parseMessage(b)
		if err != nil {
			return
		}
		if got := appendMessage(nil, m); !bytes.Equal(got, b) {
			t.Fatalf("%x reads as %+v, which is %x", b, m, got)
		}
	})
}
