package engines

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
)

// PauseRef names the image of a pod's own process, which only waits. It is made
// here and imported: no registry has it, and no run counts it.
const PauseRef = "bench.invalid/pause:1"

// smallRef names an image that ends at once. It is pushed to the registry, for
// workers that are used before they are measured.
const smallRef = RegistryAddr + "/small:1"

// code is a program in machine code, by the name of its architecture, which touches
// no memory.
type code map[string]struct {
	machine uint16 // of ELF
	code    []byte
}

// exitCode ends well.
var exitCode = code{
	"amd64": {62, []byte{
		0x31, 0xff, // xor edi, edi: the status
		0xb8, 60, 0, 0, 0, // mov eax, exit
		0x0f, 0x05, // syscall
	}},
	"arm64": {183, []byte{
		0x00, 0x00, 0x80, 0xd2, // mov x0, 0: the status
		0xa8, 0x0b, 0x80, 0xd2, // mov x8, exit
		0x01, 0x00, 0x00, 0xd4, // svc 0
	}},
}

// pauseCode waits for signals, again and again.
var pauseCode = code{
	"amd64": {62, []byte{
		0xb8, 34, 0, 0, 0, // mov eax, pause
		0x0f, 0x05, // syscall
		0xeb, 0xf7, // jmp to the beginning
	}},
	"arm64": {183, []byte{
		0x00, 0x00, 0x80, 0xd2, // mov x0, 0: no descriptors
		0x01, 0x00, 0x80, 0xd2, // mov x1, 0
		0x02, 0x00, 0x80, 0xd2, // mov x2, 0: for ever
		0x03, 0x00, 0x80, 0xd2, // mov x3, 0: no signal mask
		0x28, 0x09, 0x80, 0xd2, // mov x8, ppoll
		0x01, 0x00, 0x00, 0xd4, // svc 0
		0xfa, 0xff, 0xff, 0x17, // b to the beginning
	}},
}

// program is an ELF file of one segment that has everything (elf(5)).
func (c code) program() ([]byte, error) {
	p, ok := c[runtime.GOARCH]
	if !ok {
		return nil, fmt.Errorf("bench: there are no programs for small images on %s", runtime.GOARCH)
	}
	const base, headers = 0x400000, 64 + 56
	size := uint64(headers + len(p.code))
	le := binary.LittleEndian
	b := append([]byte("\x7fELF"), 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0) // 64 bits, little-endian
	b = le.AppendUint16(b, 2)                                          // executable
	b = le.AppendUint16(b, p.machine)
	b = le.AppendUint32(b, 1)
	b = le.AppendUint64(b, base+headers) // entry
	b = le.AppendUint64(b, 64)           // program headers
	b = le.AppendUint64(b, 0)            // no sections
	b = le.AppendUint32(b, 0)
	for _, v := range []uint16{64, 56, 1, 0, 0, 0} { // sizes and counts of headers
		b = le.AppendUint16(b, v)
	}
	b = le.AppendUint32(b, 1) // to be loaded
	b = le.AppendUint32(b, 5) // readable and executable
	for _, v := range []uint64{0, base, base, size, size, 4096} {
		b = le.AppendUint64(b, v)
	}
	return append(b, p.code...), nil
}

// image is an image of the program, by this name, as an archive of an OCI layout.
func (c code) image(ref string) ([]byte, error) {
	program, err := c.program()
	if err != nil {
		return nil, err
	}
	layer, err := archive([]file{{"program", 0o755, program}})
	if err != nil {
		return nil, err
	}
	var files []file
	blob := func(mediaType string, b []byte) v1.Descriptor {
		d := v1.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(b), Size: int64(len(b))}
		files = append(files, file{"blobs/sha256/" + d.Digest.Encoded(), 0o644, b})
		return d
	}
	object := func(mediaType string, v any) v1.Descriptor {
		b, marshalErr := json.Marshal(v)
		if marshalErr != nil {
			err = marshalErr
		}
		return blob(mediaType, b)
	}
	platform := v1.Platform{OS: "linux", Architecture: runtime.GOARCH}
	manifest := object(v1.MediaTypeImageManifest, v1.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageManifest,
		Config: object(v1.MediaTypeImageConfig, v1.Image{
			Platform: platform, Config: v1.ImageConfig{Entrypoint: []string{"/program"}},
			RootFS: v1.RootFS{Type: "layers", DiffIDs: []digest.Digest{digest.FromBytes(layer)}},
		}),
		Layers: []v1.Descriptor{blob(v1.MediaTypeImageLayer, layer)},
	})
	manifest.Platform = &platform
	manifest.Annotations = map[string]string{"io.containerd.image.name": ref}
	index, marshalErr := json.Marshal(v1.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageIndex, Manifests: []v1.Descriptor{manifest}})
	if err == nil {
		err = marshalErr
	}
	if err != nil {
		return nil, fmt.Errorf("bench: make %s: %w", ref, err)
	}
	files = append(files, file{"index.json", 0o644, index}, file{v1.ImageLayoutFile, 0o644, []byte(`{"imageLayoutVersion":"` + v1.ImageLayoutVersion + `"}`)})
	return archive(files)
}

// file is one of an archive.
type file struct {
	name string
	mode int64
	data []byte
}

func archive(files []file) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: f.mode, Size: int64(len(f.data))}); err != nil {
			return nil, fmt.Errorf("bench: archive %s: %w", f.name, err)
		}
		if _, err := w.Write(f.data); err != nil {
			return nil, fmt.Errorf("bench: archive %s: %w", f.name, err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	return b.Bytes(), nil
}

// write writes the archive to a file.
func (c code) write(ref, path string) error {
	b, err := c.image(ref)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path, b, 0o644); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	return nil
}

// pushSmall pushes the small image, unless it is there.
func pushSmall(ctx context.Context, s *site.Site) error {
	repository, tag, _ := strings.Cut(strings.TrimPrefix(smallRef, RegistryAddr+"/"), ":")
	if _, _, err := exchange(ctx, s, http.MethodGet, "http://"+RegistryAddr+"/v2/"+repository+"/manifests/"+tag, nil, http.StatusOK); err == nil {
		return nil
	}
	path := filepath.Join(s.Dir, "small.tar")
	if err := exitCode.write(smallRef, path); err != nil {
		return err
	}
	_, err := s.Run(ctx, link.Cloud, "skopeo", "copy", "--dest-tls-verify=false", "oci-archive:"+path, "docker://"+smallRef)
	return err
}
