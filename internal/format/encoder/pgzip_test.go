package encoder

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"testing"

	"hydrofoil.dev/foil/internal/format/encoder/programs"
)

// pgzipPlain is more than two blocks of text, the same everywhere.
func pgzipPlain() []byte {
	var b bytes.Buffer
	state := uint64(5)
	for b.Len() < 5<<19 {
		state = state*6364136223846793005 + 1442695040888963407
		fmt.Fprintf(&b, "%d bottles of %x on wall %d\n", state>>59, state>>40, state>>33%1000)
	}
	return b.Bytes()[:5<<19]
}

// TestPgzip compares with what klauspost/pgzip made of the same: 1.2.6 with compress 1.18.0, 1.3.0 with 1.20.3.
func TestPgzip(t *testing.T) {
	plain := pgzipPlain()
	if name := os.Getenv("FOIL_TEST_PLAIN"); name != "" { // for who runs pgzip on it
		if err := os.WriteFile(name, plain, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	s := &Set{Programs: programs.Program}
	defer s.Close()
	for _, tc := range pgzipMade {
		p, err := s.program(tc.encoder)
		if errors.Is(err, ErrUnavailable) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		level, extra := tc.level, map[int]byte{1: 4, 9: 2}[tc.level]
		if level == -1 {
			level = 5
		}
		blob := bytes.NewBuffer([]byte{0x1f, 0x8b, 8, 0, 0, 9, 0x6e, 0x88, extra, 255})
		b := &blocks{program: p, level: level, size: pgzipBlock, end: int64(tc.n)}
		if err := b.part(t.Context(), blob, bytes.NewReader(plain), 0, 0, b.end); err != nil {
			t.Fatal(err)
		}
		trailer := binary.LittleEndian.AppendUint32(nil, crc32.ChecksumIEEE(plain[:tc.n]))
		blob.Write(binary.LittleEndian.AppendUint32(trailer, uint32(tc.n)))
		if got := fmt.Sprintf("%x", sha256.Sum256(blob.Bytes())); got != tc.sum {
			t.Errorf("%s, level %d, %d bytes: %d bytes, %s", tc.encoder, tc.level, tc.n, blob.Len(), got)
		}
	}
}

var pgzipMade = []struct {
	encoder  string
	n, level int
	sum      string
}{
	{KlauspostB, 2621440, -1, "9bd54573ddf8acce91de1494b536f2e27002d3e5bb193c5ea7e15684e64fb9a8"},
	{KlauspostB, 2621440, 1, "6c8e4ff855338012489619aff1073871634de7af86dc22fc1d0162f8732e3ec0"},
	{KlauspostB, 2621440, 9, "1a9a8044ea613c7f1f9795aabb000280b3a2db8f297719d3411a6bda7ee61ce0"},
	{KlauspostB, 2097152, -1, "9f09324b95f849d65479ec566f35ce2018722e5aa1f0f0bc212a175f854b68f9"},
	{KlauspostB, 2097152, 1, "79fb792edd1a567b60ea8c80bcbaf1c9e7f81335d866372b5ad73f988091e986"},
	{KlauspostB, 2097152, 9, "917a7b0050854b768b8c103f07fe23999fdba0b5903046586fdcffadc652b81f"},
	{KlauspostB, 1000, -1, "695df4b8bdaf182d6af4c9cd9dbb45524de5ad55c05a4d34a0c0ed4bfb5f6703"},
	{KlauspostB, 1000, 1, "11924dde9b0328fa61a554fa312805e8ce7af0d28de2406d4bae69a084178c87"},
	{KlauspostB, 1000, 9, "e2fd8c6327e002ad69459742e6cd22e4f49fd4ab07e85a281b06730bdb53da57"},
	{KlauspostA, 2621440, -1, "c2fd01bc7cbee118073361ad2d4a7bbcbec55e0b3763361e03ddd60c396df173"},
	{KlauspostA, 2621440, 1, "db8d9b41338e88f0016c2aa74aed0ba73e01352d9da6b9dd91e458259c2b3711"},
	{KlauspostA, 2621440, 9, "3c977c02860dc762785b5c49db5b92e19c1057a11c2b9a7955148a6c4794f126"},
	{KlauspostA, 2097152, -1, "cf7eba129bbbe18146ca96567561a2de323bba1fb5083390562efbdb00605331"},
	{KlauspostA, 2097152, 1, "7c886c491e8766da9acb3d961fe3dafa04a1c94cfb32448d2301c23997382ce4"},
	{KlauspostA, 2097152, 9, "a6b56931a62875972bb3e4e484a8391ba147f09a58bc58bda0018d2c79f1589c"},
	{KlauspostA, 1000, -1, "695df4b8bdaf182d6af4c9cd9dbb45524de5ad55c05a4d34a0c0ed4bfb5f6703"},
	{KlauspostA, 1000, 1, "11924dde9b0328fa61a554fa312805e8ce7af0d28de2406d4bae69a084178c87"},
	{KlauspostA, 1000, 9, "e2fd8c6327e002ad69459742e6cd22e4f49fd4ab07e85a281b06730bdb53da57"},
}

// TestPatched: a block that came out otherwise is stored, and what follows it is made.
func TestPatched(t *testing.T) {
	plain := append(pgzipPlain(), pgzipPlain()...)
	s := &Set{Programs: programs.Program}
	defer s.Close()
	p, err := s.program(KlauspostB)
	if err != nil {
		t.Skip(err)
	}
	blob := bytes.NewBuffer([]byte{0x1f, 0x8b, 8, 0, 0, 9, 0x6e, 0x88, 0, 255})
	end := int64(len(plain))
	for at := int64(0); at < end; at += pgzipBlock {
		b := &blocks{program: p, level: 5, size: pgzipBlock, end: end}
		if at == 2*pgzipBlock {
			b.level = 6
		}
		if err := b.part(t.Context(), blob, bytes.NewReader(plain), 0, at, min(at+pgzipBlock, end)); err != nil {
			t.Fatal(err)
		}
	}
	blob.WriteString("trailer.")
	e, _, err := s.Prove(t.Context(), input(blob.Bytes(), plain))
	if err != nil || e == nil {
		t.Fatalf("nothing was proven: %v", err)
	}
	if stored := e.StoredBytes(); e.Parts[2].Stored == nil || stored != e.Parts[2].Out || e.Level != 5 {
		t.Errorf("%d bytes are stored, level %d, %d parts", stored, e.Level, len(e.Parts))
	}
	checkRestore(t, s, e, blob.Bytes(), plain)
}
