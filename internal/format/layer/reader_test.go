package layer_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/layer"
	lt "hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/format/recipe"
	"hydrofoil.dev/foil/internal/format/toc"
)

type file struct {
	layer.Entry
	Data string
}

// read reads a whole layer.
func read(r io.Reader, d layer.Descriptor, o layer.Options) ([]file, error) {
	lr, err := layer.NewReader(context.Background(), r, d, o)
	if err != nil {
		return nil, err
	}
	defer lr.Close()
	var files []file
	for {
		e, err := lr.Next()
		if err == io.EOF {
			if lr.DiffID() == "" {
				return nil, errors.New("no diff ID at the end")
			}
			return files, nil
		}
		if err != nil {
			return files, err
		}
		data, err := io.ReadAll(lr)
		if err != nil {
			return files, err
		}
		files = append(files, file{*e, string(data)})
	}
}

func readBlob(b lt.Blob, o layer.Options) ([]file, error) {
	return read(bytes.NewReader(b.Bytes), layer.Descriptor{Digest: b.Digest, Size: int64(len(b.Bytes)), DiffID: b.DiffID}, o)
}

func TestReadsEveryFieldOfEveryFormat(t *testing.T) {
	nano := time.Unix(1_600_000_000, 123456789)
	long := strings.Repeat("directory/", 30) + strings.Repeat("n", 255)
	caps := "\x01\x00\x00\x02" + strings.Repeat("\x07", 16)
	l := lt.Layer{
		lt.Dir("./", 0o700),
		lt.Dir("./d", 0o1777).Owner(70000, 4294967294),
		lt.File("d//f", 0o4755, "some data").Mtime(nano).Xattr("user.bin", "\x00\xff\n=").Xattr("security.capability", caps).Xattr("trusted.overlay.opaque", "y").Xattr("nonsense", "x"),
		lt.File(long, 0o644, ""),
		lt.File("caf\xe9\xff", 0o644, "x"),
		lt.Link("d/l", "/d/./f"),
		lt.Symlink("s", "../../outside"),
		lt.Char("c", 0o600, 1, 3), lt.Block("b", 0o600, 4095, 1048575), lt.Fifo("p", 0o600),
		lt.Whiteout("d/gone"), lt.Opaque("d"),
		lt.File("gnu/"+strings.Repeat("g", 200), 0o644, "g").Format(tar.FormatGNU).Owner(1<<31, 5),
	}
	mtime := lt.Mtime.Unix()
	want := []file{
		{layer.Entry{Type: layer.Directory, Name: "d", Mode: 0o1777, UID: 70000, GID: 4294967294, Mtime: mtime}, ""},
		{layer.Entry{
			Type: layer.Regular, Name: "d/f", Mode: 0o4755, Mtime: 1_600_000_000, MtimeNsec: 123456789, Size: 9,
			Xattrs: []toc.Xattr{{Name: "security.capability", Value: []byte(caps)}, {Name: "user.bin", Value: []byte("\x00\xff\n=")}},
		}, "some data"},
		{layer.Entry{Type: layer.Regular, Name: long, Mode: 0o644, Mtime: mtime}, ""},
		{layer.Entry{Type: layer.Regular, Name: "caf\xe9\xff", Mode: 0o644, Mtime: mtime, Size: 1}, "x"},
		{layer.Entry{Type: layer.HardLink, Name: "d/l", Link: "d/f", Mode: 0o644, Mtime: mtime}, ""},
		{layer.Entry{Type: layer.Symlink, Name: "s", Link: "../../outside", Mode: 0o777, Mtime: mtime}, ""},
		{layer.Entry{Type: layer.CharDevice, Name: "c", Mode: 0o600, Major: 1, Minor: 3, Mtime: mtime}, ""},
		{layer.Entry{Type: layer.BlockDevice, Name: "b", Mode: 0o600, Major: 4095, Minor: 1048575, Mtime: mtime}, ""},
		{layer.Entry{Type: layer.Fifo, Name: "p", Mode: 0o600, Mtime: mtime}, ""},
		{layer.Entry{Type: layer.Regular, Name: "d/.wh.gone", Mtime: mtime}, ""},
		{layer.Entry{Type: layer.Regular, Name: "d/.wh..wh..opq", Mtime: mtime}, ""},
		{layer.Entry{Type: layer.Regular, Name: "gnu/" + strings.Repeat("g", 200), Mode: 0o644, UID: 1 << 31, GID: 5, Mtime: mtime, Size: 1}, "g"},
	}
	stream := l.TarBytes(t)
	for name, blob := range map[string]lt.Blob{
		"tar":             lt.TarBlob(stream),
		"tar, no end":     lt.TarBlob(stream[:len(stream)-1024]),
		"tar, more zeros": lt.TarBlob(append(stream[:len(stream):len(stream)], make([]byte, 9000)...)),
		"gzip":            lt.GzipBlob(t, stream),
		"gzip members":    lt.GzipBlob(t, stream, 1, 512, 513, 4000),
		"zstd":            lt.ZstdBlob(t, stream),
		"zstd frames":     lt.ZstdBlob(t, stream, 1, 512, 513, 4000),
		"zstd skippable":  skippable(lt.ZstdBlob(t, stream)),
	} {
		t.Run(name, func(t *testing.T) {
			got, err := readBlob(blob, layer.Options{})
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Error(d)
			}
			got, err = read(iotest.OneByteReader(bytes.NewReader(blob.Bytes)), layer.Descriptor{Digest: blob.Digest}, layer.Options{})
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Error("byte by byte: ", d)
			}
		})
	}
}

// skippable puts skippable frames around the frame of a blob, as zstd:chunked
// does with its table of contents.
func skippable(b lt.Blob) lt.Blob {
	frame := []byte{0x5a, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 'a', 'b', 'c'}
	b.Bytes = append(append(append([]byte{}, frame...), b.Bytes...), frame...)
	b.Digest = digest.FromBytes(b.Bytes)
	return b
}

func TestEmptyBlobIsAnEmptyLayer(t *testing.T) {
	got, err := readBlob(lt.TarBlob(nil), layer.Options{})
	if err != nil || len(got) != 0 {
		t.Errorf("%v, %v", got, err)
	}
}

// sparse returns a tar stream with one sparse file: 512 bytes of data at 1 MiB in
// a file of 2 MiB.
func sparse(kind lt.SparseKind) []byte {
	b := lt.Sparse(kind, "sparse", 2<<20, lt.Fragment{Offset: 1 << 20, Data: strings.Repeat("d", 512)})
	return append(b, make([]byte, 1024)...)
}

func TestSparseFiles(t *testing.T) {
	want := string(make([]byte, 1<<20)) + strings.Repeat("d", 512) + string(make([]byte, 1<<20-512))
	for _, kind := range lt.SparseKinds {
		got, err := readBlob(lt.TarBlob(sparse(kind)), layer.Options{})
		if err != nil {
			t.Fatalf("kind %v: %v", kind, err)
		}
		if len(got) != 1 || got[0].Name != "sparse" || got[0].Type != layer.Regular || got[0].Size != 2<<20 || got[0].Data != want {
			t.Errorf("kind %v: read something else", kind)
		}
	}
}

// TestTheStreamItself: what is named as the tar stream is not decompressed.
func TestTheStreamItself(t *testing.T) {
	b := lt.Layer{lt.File("a", 0o644, "data")}.Gzip(t)
	_, err := read(bytes.NewReader(b.Bytes), layer.Descriptor{Digest: b.Digest, DiffID: b.Digest}, layer.Options{})
	if refused, ok := errors.AsType[*layer.RefusedError](err); !ok || !strings.Contains(refused.Reason, "truncated") && !strings.Contains(refused.Reason, "header") {
		t.Errorf("a gzip blob: %v", err)
	}
	plain := lt.Layer{lt.File("a", 0o644, "data")}.Tar(t)
	files, err := read(bytes.NewReader(plain.Bytes), layer.Descriptor{Digest: plain.Digest, DiffID: plain.Digest}, layer.Options{})
	if err != nil || len(files) != 1 {
		t.Errorf("%d files, %v", len(files), err)
	}
	other := digest.FromString("other")
	_, err = read(bytes.NewReader(plain.Bytes), layer.Descriptor{Digest: other, DiffID: other}, layer.Options{})
	if wrong, ok := errors.AsType[*layer.DigestError](err); !ok || wrong.Got != plain.Digest || wrong.Want != other {
		t.Errorf("another stream: %v", err)
	}
}

// TestRecord: the recipe of a layer makes its tar stream again of the files that
// its reader got, numbered by their order in the list.
func TestRecord(t *testing.T) {
	stream := lt.Layer{
		lt.Dir("./", 0o755), lt.File("./.", 0o644, "of no name"), lt.File("a", 0o644, "first"), lt.File("empty", 0o644, ""),
		lt.Link("b", "a"), lt.File("c", 0o644, strings.Repeat("third", 1000)).Xattr("user.x", "y"),
	}.TarBytes(t)
	stream = append(sparse(lt.SparseGNU)[:1024], stream...)
	for name, b := range map[string]lt.Blob{
		"tar": lt.TarBlob(stream), "gzip": lt.GzipBlob(t, stream, 700), "zstd": lt.ZstdBlob(t, stream), "no end": lt.GzipBlob(t, stream[:len(stream)-1024]),
		"much after the end": lt.GzipBlob(t, append(bytes.Clone(stream), make([]byte, 100_000)...)),
	} {
		lr, err := layer.NewReader(context.Background(), bytes.NewReader(b.Bytes), layer.Descriptor{Digest: b.Digest, DiffID: b.DiffID}, layer.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer lr.Close()
		var encoded bytes.Buffer
		w := recipe.NewWriter(&encoded)
		lr.Record(w)
		var contents [][]byte
		for {
			e, err := lr.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			data, err := io.ReadAll(lr)
			if err != nil {
				t.Fatal(err)
			}
			if e.Size > 0 {
				contents = append(contents, data)
			}
		}
		if err := w.Close(recipe.End{DiffID: lr.DiffID()}); err != nil {
			t.Fatal(err)
		}
		r := recipe.NewReader(&encoded, func(n, offset, length int64) (io.Reader, error) {
			return bytes.NewReader(contents[n][offset:]), nil
		}, recipe.Limits{Size: lr.Size(), Contents: int64(len(contents))})
		got, err := io.ReadAll(r)
		if err != nil || digest.FromBytes(got) != b.DiffID || len(contents) != 3 {
			t.Errorf("%s: %d bytes of %d contents, %v", name, len(got), len(contents), err)
		}
	}
}

func TestRefusesWhatIsHostile(t *testing.T) {
	ok := lt.File("fine", 0o644, "data")
	gnuSize := func(size uint64) []byte {
		b := lt.Layer{lt.File("huge", 0o644, "").Format(tar.FormatGNU)}.TarBytes(t)
		copy(b[124:], "\x80\x00\x00\x00")
		binary.BigEndian.PutUint64(b[128:], size)
		copy(b[148:], "        ")
		sum := 0
		for _, c := range b[:512] {
			sum += int(c)
		}
		copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
		return b
	}
	typed := func(typ byte) []byte {
		e := lt.File("odd", 0o644, "")
		e.Header.Typeflag, e.Header.Format = typ, tar.FormatUnknown
		return lt.Layer{e}.TarBytes(t)
	}
	stream := lt.Layer{ok, lt.File("second", 0o644, strings.Repeat("x", 3000))}.TarBytes(t)
	for name, tc := range map[string]struct {
		blob  lt.Blob
		opts  layer.Options
		entry string
		want  string
	}{
		"absolute":                    {blob: lt.Layer{ok, lt.File("/etc/passwd", 0o644, "")}.Gzip(t), entry: "/etc/passwd", want: "absolute name"},
		"dotdot":                      {blob: lt.Layer{ok, lt.File("../x", 0o644, "")}.Gzip(t), entry: "../x", want: `".." in its name`},
		"dotdot inside":               {blob: lt.Layer{lt.File("a/../b", 0o644, "")}.Gzip(t), entry: "a/../b", want: `".." in its name`},
		"dotdot to the root":          {blob: lt.Layer{lt.Dir("a/..", 0o755)}.Gzip(t), entry: "a/../", want: `".." in its name`},
		"link out":                    {blob: lt.Layer{lt.Link("l", "../../etc/shadow")}.Gzip(t), entry: "l", want: "out of the tree"},
		"link to the root":            {blob: lt.Layer{lt.Link("l", "/")}.Gzip(t), entry: "l", want: "which is the root"},
		"empty symlink":               {blob: lt.Layer{lt.Symlink("l", "")}.Gzip(t), entry: "l", want: "target of 0 bytes"},
		"long symlink":                {blob: lt.Layer{lt.Symlink("l", strings.Repeat("a", 4096))}.Gzip(t), entry: "l", want: "target of 4096 bytes"},
		"long name":                   {blob: lt.Layer{lt.File("a/"+strings.Repeat("n", 256), 0o644, "")}.Gzip(t), entry: "a/n", want: "name of 256 bytes"},
		"long path":                   {blob: lt.Layer{lt.File(strings.Repeat("1234567/", 512)+"x", 0o644, "")}.Gzip(t), entry: "1234567/", want: "path of 4097 bytes"},
		"8 EiB":                       {blob: lt.TarBlob(gnuSize(1<<63 - 1)), entry: "huge", want: "file of 9223372036854775807 bytes"},
		"all files too much":          {blob: lt.Layer{ok, ok, ok}.Gzip(t), opts: layer.Options{MaxContent: 11}, entry: "fine", want: "more than 11 bytes in all"},
		"too many entries":            {blob: lt.Layer{ok, ok, ok}.Gzip(t), opts: layer.Options{MaxEntries: 2}, entry: "fine", want: "more than 2 entries"},
		"contiguous file":             {blob: lt.TarBlob(typed(tar.TypeCont)), entry: "odd", want: "unknown type"},
		"device":                      {blob: lt.Layer{lt.Char("c", 0, 4096, 0)}.Gzip(t), entry: "c", want: "device number 4096:0"},
		"xattr name":                  {blob: lt.Layer{ok.Xattr("user.", "v")}.Gzip(t), entry: "fine", want: "no name after"},
		"xattr value":                 {blob: lt.Layer{ok.Xattr("user.v", strings.Repeat("v", 65536))}.Gzip(t), entry: "fine", want: "of 65536 bytes"},
		"xattrs in all":               {blob: lt.Layer{ok.Xattr("user.v", strings.Repeat("v", 60000)).Xattr("user.w", strings.Repeat("v", 60000))}.Gzip(t), entry: "fine", want: "bytes of extended attributes"},
		"capability":                  {blob: lt.Layer{ok.Xattr("security.capability", "x")}.Gzip(t), entry: "fine", want: "no file capability"},
		"ACL":                         {blob: lt.Layer{ok.Xattr("system.posix_acl_access", "\x02\x00\x00\x00")}.Gzip(t), entry: "fine", want: "POSIX ACL"},
		"trailing data in tar":        {blob: lt.GzipBlob(t, append(stream[:len(stream):len(stream)], "more"...)), entry: "second", want: "data after the end of the tar stream"},
		"trailing data after gzip":    {blob: with(lt.GzipBlob(t, stream), func(b []byte) []byte { return append(b, "more"...) }), entry: "second", want: "in or after it"},
		"trailing data after zstd":    {blob: with(lt.ZstdBlob(t, stream), func(b []byte) []byte { return append(b, "more"...) }), entry: "second", want: "in or after it"},
		"truncated tar in file":       {blob: lt.TarBlob(stream[:2048]), entry: "second", want: "truncated"},
		"truncated tar in header":     {blob: lt.TarBlob(stream[:1024+100]), entry: "fine", want: "truncated"},
		"truncated gzip":              {blob: with(lt.GzipBlob(t, stream), func(b []byte) []byte { return b[:len(b)-9] }), entry: "", want: "truncated"},
		"truncated zstd":              {blob: with(lt.ZstdBlob(t, stream), func(b []byte) []byte { return b[:len(b)-5] }), entry: "", want: "truncated"},
		"gzip checksum":               {blob: with(lt.GzipBlob(t, stream), func(b []byte) []byte { b[len(b)-6] ^= 1; return b }), entry: "second", want: "checksum"},
		"no tar":                      {blob: lt.TarBlob(bytes.Repeat([]byte("no tar "), 200)), entry: "", want: "no valid tar header at the start"},
		"damaged header":              {blob: lt.TarBlob(append(stream[:1024:1024], bytes.Repeat([]byte("x"), 1024)...)), entry: "fine", want: "no valid tar header after"},
		"gzip bomb":                   {blob: lt.Layer{lt.File("zeros", 0o644, string(make([]byte, 4<<20)))}.Gzip(t), opts: layer.Options{Expansion: 1 << 20, MaxRatio: 100}, entry: "zeros", want: "of the blob"},
		"bomb of zeros after the end": {blob: lt.GzipBlob(t, append(stream[:len(stream):len(stream)], make([]byte, 4<<20)...)), opts: layer.Options{Expansion: 1 << 20, MaxRatio: 100}, entry: "second", want: "of the blob"},
		"sparse bomb":                 {blob: lt.TarBlob(sparse(lt.SparsePAX10)), opts: layer.Options{Expansion: 1 << 20, MaxRatio: 1}, entry: "sparse", want: "hold files of more than"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := readBlob(tc.blob, tc.opts)
			var refused *layer.RefusedError
			if !errors.As(err, &refused) {
				t.Fatalf("want a refusal, got %v", err)
			}
			if refused.Layer != tc.blob.Digest || !strings.HasPrefix(refused.Entry, tc.entry) {
				t.Errorf("layer %s entry %q, want %s %q", refused.Layer, refused.Entry, tc.blob.Digest, tc.entry)
			}
			for _, part := range []string{tc.want, tc.blob.Digest.String()} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("want %q in %q", part, err)
				}
			}
		})
	}
}

func with(b lt.Blob, change func([]byte) []byte) lt.Blob {
	b.Bytes = change(bytes.Clone(b.Bytes))
	b.Digest = digest.FromBytes(b.Bytes)
	return b
}

func TestNamesOfTheRootAndOfGlobalHeadersAreHarmless(t *testing.T) {
	global := lt.Entry{Header: tar.Header{Typeflag: tar.TypeXGlobalHeader, Name: "/tmp/GlobalHead.1.1", PAXRecords: map[string]string{"comment": "x"}}}
	b := lt.Layer{lt.Dir("/", 0o755), lt.Dir(".", 0o755), lt.Dir("./", 0o755), global}.Gzip(t)
	got, err := readBlob(b, layer.Options{})
	if err != nil {
		t.Fatal(err)
	}
	want := []file{{layer.Entry{Type: layer.Global, Name: "tmp/GlobalHead.1.1"}, ""}}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestWrongDigests(t *testing.T) {
	b := lt.Layer{lt.File("f", 0o644, "data")}.Gzip(t)
	other := digest.FromString("other")
	for name, tc := range map[string]struct {
		desc layer.Descriptor
		what string
	}{
		"blob":    {layer.Descriptor{Digest: other}, "blob"},
		"diff ID": {layer.Descriptor{Digest: b.Digest, DiffID: other}, "diff ID"},
	} {
		_, err := read(bytes.NewReader(b.Bytes), tc.desc, layer.Options{})
		var wrong *layer.DigestError
		if !errors.As(err, &wrong) || wrong.What != tc.what || wrong.Want != other {
			t.Errorf("%s: %v", name, err)
		}
	}
	// What a damaged blob holds is not the layer's fault.
	bad := lt.Layer{lt.File("../f", 0o644, "data")}.Gzip(t)
	_, err := read(bytes.NewReader(bad.Bytes), layer.Descriptor{Digest: other}, layer.Options{})
	var wrong *layer.DigestError
	if !errors.As(err, &wrong) || wrong.What != "blob" {
		t.Errorf("hostile bytes under another digest: %v", err)
	}
	_, err = read(bytes.NewReader(b.Bytes), layer.Descriptor{Digest: b.Digest, Size: 5}, layer.Options{})
	if err == nil || !strings.Contains(err.Error(), "descriptor says 5") {
		t.Errorf("wrong size: %v", err)
	}
	d := digest.SHA512.FromBytes(b.Bytes)
	if _, err = read(bytes.NewReader(b.Bytes), layer.Descriptor{Digest: d}, layer.Options{}); err != nil {
		t.Errorf("sha512: %v", err)
	}
}

func TestFailuresToReadAreNotRefusals(t *testing.T) {
	b := lt.Layer{lt.File("f", 0o644, strings.Repeat("data", 1000))}.Tar(t)
	broken := errors.New("disk on fire")
	for cut := 0; cut < len(b.Bytes); cut += 500 {
		r := io.MultiReader(bytes.NewReader(b.Bytes[:cut]), iotest.ErrReader(broken))
		_, err := read(r, layer.Descriptor{Digest: b.Digest}, layer.Options{})
		var refused *layer.RefusedError
		if !errors.Is(err, broken) || errors.As(err, &refused) {
			t.Fatalf("cut at %d: %v", cut, err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	r, err := layer.NewReader(ctx, bytes.NewReader(b.Bytes), layer.Descriptor{Digest: b.Digest}, layer.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := r.Next(); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestCloseInTheMiddle(t *testing.T) {
	b := lt.Layer{lt.File("a", 0o644, string(make([]byte, 8<<20))), lt.File("b", 0o644, "")}.Gzip(t)
	r, err := layer.NewReader(context.Background(), bytes.NewReader(b.Bytes), layer.Descriptor{Digest: b.Digest}, layer.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Next(); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Next(); err == nil || err == io.EOF {
		t.Errorf("Next after Close: %v", err)
	}
}

// Whatever is cut or flipped, what comes back is right or an error.
func TestDamagedBlobsNeverRead(t *testing.T) {
	l := lt.Layer{lt.Dir("d", 0o755), lt.File("d/f", 0o644, strings.Repeat("some data ", 300)), lt.Symlink("s", "d")}
	blobs := []lt.Blob{l.Tar(t), l.Gzip(t), l.Zstd(t)}
	rapid.Check(t, func(t *rapid.T) {
		b := rapid.SampledFrom(blobs).Draw(t, "blob")
		bytesOf := bytes.Clone(b.Bytes)
		at := rapid.IntRange(0, len(bytesOf)-1).Draw(t, "at")
		if rapid.Bool().Draw(t, "cut") {
			bytesOf = bytesOf[:at]
		} else {
			bytesOf[at] ^= byte(1 << rapid.IntRange(0, 7).Draw(t, "bit"))
		}
		_, err := read(bytes.NewReader(bytesOf), layer.Descriptor{Digest: b.Digest, DiffID: b.DiffID}, layer.Options{})
		var wrong *layer.DigestError
		if !errors.As(err, &wrong) {
			t.Fatalf("damaged blob: %v", err)
		}
	})
}

func FuzzReader(f *testing.F) {
	l := lt.Layer{lt.Dir("d", 0o755), lt.File("d/f", 0o644, "data").Xattr("user.k", "v"), lt.Symlink("s", "d"), lt.Link("l", "d/f"), lt.Opaque("d")}
	for _, b := range []lt.Blob{l.Tar(f), l.Gzip(f), l.Zstd(f)} {
		f.Add(b.Bytes)
	}
	f.Fuzz(func(t *testing.T, blob []byte) {
		files, err := read(bytes.NewReader(blob), layer.Descriptor{Digest: digest.FromBytes(blob)},
			layer.Options{Expansion: 1 << 20, MaxRatio: 10})
		var refused *layer.RefusedError
		if err != nil && !errors.As(err, &refused) {
			t.Fatalf("neither read nor refused: %v", err)
		}
		for _, f := range files {
			if f.Name == "" || f.Name[0] == '/' || strings.Contains("/"+f.Name+"/", "/../") {
				t.Fatalf("name %q", f.Name)
			}
			if f.Size != int64(len(f.Data)) {
				t.Fatalf("%q: %d bytes of %d", f.Name, len(f.Data), f.Size)
			}
		}
	})
}
