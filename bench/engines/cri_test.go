package engines

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"pgregory.net/rapid"
)

// However much of a log has been written, its text is copied once, line by line.
func TestCRILog(t *testing.T) {
	const log = "2026-11-22T03:00:00.1Z stdout F hello\n" +
		"2026-11-22T03:00:00.2Z stderr F \n" +
		"2026-11-22T03:00:00.3Z stdout P half a \n" +
		"2026-11-22T03:00:00.4Z stdout F line\n" +
		"nonsense\n"
	const want = "hello\n\nhalf a line\n"
	dir := t.TempDir()
	rapid.Check(t, func(rt *rapid.T) {
		l := criLog{from: filepath.Join(dir, "from"), to: filepath.Join(dir, "to")}
		os.Remove(l.from)
		if err := os.WriteFile(l.to, nil, 0o644); err != nil {
			rt.Fatal(err)
		}
		for n := 0; ; n = rapid.IntRange(n, len(log)).Draw(rt, "written") {
			if n > 0 {
				if err := os.WriteFile(l.from, []byte(log[:n]), 0o644); err != nil {
					rt.Fatal(err)
				}
			}
			if err := l.copy(); err != nil {
				rt.Fatal(err)
			}
			if n == len(log) {
				break
			}
		}
		got, err := os.ReadFile(l.to)
		if err != nil {
			rt.Fatal(err)
		}
		if diff := cmp.Diff(want, string(got)); diff != "" {
			rt.Fatal(diff)
		}
	})
}

// The program of a sandbox waits, and ends when it is told to.
func TestPauseProgram(t *testing.T) {
	program, err := pauseCode.program()
	if err != nil {
		t.Skip(err)
	}
	path := filepath.Join(t.TempDir(), "pause")
	if err := os.WriteFile(path, program, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		t.Errorf("it has ended: %v", err)
	case <-time.After(50 * time.Millisecond):
		cmd.Process.Kill()
		<-ended
	}
}

// The program of the small image ends well.
func TestExitProgram(t *testing.T) {
	program, err := exitCode.program()
	if err != nil {
		t.Skip(err)
	}
	path := filepath.Join(t.TempDir(), "exit")
	if err := os.WriteFile(path, program, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := exec.Command(path).Run(); err != nil {
		t.Error(err)
	}
}

// The image is whole: each descriptor names what is in the archive.
func TestPauseArchive(t *testing.T) {
	b, err := pauseCode.image(PauseRef)
	if err != nil {
		t.Skip(err)
	}
	files := map[string][]byte{}
	for r := tar.NewReader(bytes.NewReader(b)); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if files[h.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
	read := func(name string, v any) {
		t.Helper()
		if err := json.Unmarshal(files[name], v); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	blob := func(d v1.Descriptor) string {
		t.Helper()
		name := "blobs/sha256/" + d.Digest.Encoded()
		if data, ok := files[name]; !ok || int64(len(data)) != d.Size || digest.FromBytes(data) != d.Digest {
			t.Fatalf("%+v is not in the archive", d)
		}
		return name
	}
	var index v1.Index
	read("index.json", &index)
	var manifest v1.Manifest
	read(blob(index.Manifests[0]), &manifest)
	var config v1.Image
	read(blob(manifest.Config), &config)
	layer := files[blob(manifest.Layers[0])]
	if got := digest.FromBytes(layer); len(config.RootFS.DiffIDs) != 1 || config.RootFS.DiffIDs[0] != got {
		t.Errorf("layers %v, want %v", config.RootFS.DiffIDs, got)
	}
	if _, ok := files[v1.ImageLayoutFile]; !ok {
		t.Errorf("no %s", v1.ImageLayoutFile)
	}
}
