package node

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/pull"
)

// before rewrites the state of a root, which no daemon uses, as the builds did that had
// the last version of each format: maps without page runs, and records of images that do
// not say whose startup set comes.
func (h *host) before(m *fakeImage) {
	h.t.Helper()
	edit := func(path string, change func(b []byte) []byte) {
		h.t.Helper()
		b, err := os.ReadFile(path)
		if err == nil {
			err = os.WriteFile(path, change(b), 0o600)
		}
		if err != nil {
			h.t.Fatal(err)
		}
	}
	words := func(b []byte) int { return 8 * int((binary.LittleEndian.Uint64(b)+63)/64) }
	edit(filepath.Join(h.dir(m), "presence"), func(b []byte) []byte {
		b = b[:len(b)-words(b[80:])] // the runs are the last map
		binary.LittleEndian.PutUint32(b[8:], 1)
		binary.LittleEndian.PutUint32(b[92:], crc32.Checksum(b[:92], crc32.MakeTable(crc32.Castagnoli)))
		return b
	})
	edit(filepath.Join(h.dir(m), "durable"), func(b []byte) []byte {
		b = b[:72+words(b[56:])]
		binary.LittleEndian.PutUint32(b[8:], 1)
		sum := sha256.Sum256(b)
		return append(b, sum[:]...)
	})
	records, err := filepath.Glob(filepath.Join(h.root, "images", "*.json"))
	if err != nil || len(records) != 1 {
		h.t.Fatal(records, err)
	}
	edit(records[0], func(b []byte) []byte {
		var record map[string]json.RawMessage
		if err := json.Unmarshal(b, &record); err != nil {
			h.t.Fatal(err)
		}
		for _, key := range []string{"entrypoint", "args", "no_startup"} {
			delete(record, key)
		}
		if b, err = json.Marshal(record); err != nil {
			h.t.Fatal(err)
		}
		return b
	})
}

// An upgrade takes over an image that is incomplete in the state of an older build: it
// goes on with what is here, and what has waited is read.
func TestUpgradeOfAnIncompleteImage(t *testing.T) {
	for name, reboot := range map[string]bool{"takeover": false, "reboot": true} {
		t.Run(name, func(t *testing.T) {
			const arrived, last = 3, "f001-009"
			s, m := newFakeServer(t), newFakeImage(t, some(1, 10, 5000))
			ref := s.Serve("app:1", m)
			s.SetLimit(arrived)
			h := newHost(t)
			if _, err := h.n.pulls.Start(t.Context(), api.PullRequest{Ref: ref, Entrypoint: []string{"/f"}, Args: []string{"x"}}, pull.How{}); err != nil {
				t.Fatal(err)
			}
			h.mustPull(ref, api.Mounted)
			here := int64(0)
			for _, seg := range m.Tree.Segments[:arrived] {
				here += int64(seg.Length)
			}
			h.here(ref, here)
			end, out := cat(t, filepath.Join(h.dir(m), "mnt", last))
			if reboot {
				h.stop()
				h.before(m)
				h.reboot() // the read ends with its mount
				_ = ends(t, "the read", end)
			} else {
				h.stop()
				h.before(m)
			}
			before := len(s.Requests())
			h.start()
			if reboot {
				end, out = cat(t, filepath.Join(h.dir(m), "mnt", last))
			}
			s.SetLimit(-1)
			if err := ends(t, "the read", end); err != nil || out.String() != m.Files[last] {
				t.Errorf("read %d bytes, %v", out.Len(), err)
			}
			h.complete(ref)
			h.same(m)
			if have := s.Requests()[before].Have; len(have) != 1 || len(have[0].Present) == 0 || have[0].Present[0]&(1<<arrived-1) != 1<<arrived-1 {
				t.Errorf("the new daemon says that it has %+v, want the first %d segments", have, arrived)
			}
			if strings.Contains(h.log.String(), "what is missing is pulled again") {
				t.Error("the state of the older build is not believed")
			}
		})
	}
}
