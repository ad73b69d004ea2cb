package registry

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/server/guard"
	"hydrofoil.dev/foil/internal/server/leftover"
)

func limited(t *testing.T, limits string) (g *guard.Guard, change func(limits string)) {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "access.toml")
	change = func(limits string) {
		t.Helper()
		err := os.WriteFile(file+".new", []byte("[limits]\n"+limits+"\n[[rule]]\nto = [\"everyone\"]\nallow = [\"push\"]\nrepositories = [\"**\"]\n"), 0o600)
		if err = errors.Join(err, os.Rename(file+".new", file)); err != nil {
			t.Fatal(err)
		}
	}
	change(limits)
	g, err := guard.Open(guard.Options{File: file, Keys: filepath.Join(dir, "keys.json")})
	if err != nil {
		t.Fatal(err)
	}
	return g, change
}

// How long an idle upload stays is a setting, which is read again.
func TestExpirySetting(t *testing.T) {
	g, change := limited(t, "upload-idle = \"3h\"")
	r := &Registry{opts: Options{Guard: g, UploadExpiry: 7 * 24 * time.Hour}}
	if got := r.expiry(); got != 3*time.Hour {
		t.Errorf("%v, want 3h", got)
	}
	change("upload-idle = \"1.5d\"")
	if got := r.expiry(); got != 36*time.Hour {
		t.Errorf("%v, want 36h", got)
	}
	change("")
	if got := r.expiry(); got != 7*24*time.Hour {
		t.Errorf("%v, want a week", got)
	}
	if got := (&Registry{opts: Options{UploadExpiry: time.Hour}}).expiry(); got != time.Hour {
		t.Errorf("an open server: %v", got)
	}
}

// An upload that expires gives back what it took, and its files go; so does one of an earlier process.
func TestExpiredUploadsDoNotCount(t *testing.T) {
	g, _ := limited(t, "uploads = 1\nupload-bytes = \"10\"")
	dir := t.TempDir()
	begin := func(u *uploads) error {
		s, err := u.create(t.Context(), "r", "sha256", func() {})
		if err != nil {
			return err
		}
		_, err = s.Write([]byte("12345678"))
		return errors.Join(err, s.close())
	}
	first, err := openUploads(dir, g)
	if err != nil {
		t.Fatal(err)
	}
	if err := begin(first); err != nil {
		t.Fatal(err)
	}
	u, err := openUploads(dir, g)
	if err != nil {
		t.Fatal(err)
	}
	if got := u.ledger.clients[guard.Client{}]; got == nil || got.uploads != 1 || got.bytes != 8 {
		t.Errorf("counted after a restart: %+v", got)
	}
	if err, ok := errors.AsType[*guard.Beyond](begin(u)); !ok {
		t.Errorf("a second upload: %v", err)
	}
	ages := leftover.Ages{Keep: time.Hour}
	now := time.Now()
	for _, up := range []time.Duration{0, 2 * time.Hour} {
		if _, err := u.expire(t.Context(), &ages, now.Add(up), up); err != nil {
			t.Fatal(err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("files are left: %v, %v", left, err)
	}
	if err := begin(u); err != nil {
		t.Errorf("when it has expired: %v", err)
	}
}
