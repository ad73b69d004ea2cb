package kernel

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestSELinux(t *testing.T) {
	const label = "system_u:object_r:container_ro_file_t:s0"
	tests := map[string]struct {
		files map[string]string
		want  string
		bad   bool
	}{
		"none": {},
		"a policy that is not loaded": {files: map[string]string{
			"etc/selinux/config": "SELINUXTYPE=targeted\n", "etc/selinux/targeted/contexts/lxc_contexts": `ro_file = "` + label + `"`}},
		"loaded": {files: map[string]string{
			"sys/fs/selinux/enforce": "1",
			"etc/selinux/config":     "# SELINUXTYPE=other\nSELINUX=enforcing\nSELINUXTYPE=default\n",
			"etc/selinux/default/contexts/lxc_contexts": "process = \"system_u:system_r:container_t:s0\"\n" +
				"file = \"system_u:object_r:container_file_t:s0\"\nro_file=\"" + label + "\"\n"}, want: label},
		"an old policy, the usual name": {files: map[string]string{
			"sys/fs/selinux/enforce":                     "0",
			"etc/selinux/targeted/contexts/lxc_contexts": `file = "` + label + `"`}, want: label},
		"no containers": {files: map[string]string{"sys/fs/selinux/enforce": "1", "etc/selinux/config": "SELINUXTYPE=mls\n"}, bad: true},
		"no files":      {files: map[string]string{"sys/fs/selinux/enforce": "1", "etc/selinux/targeted/contexts/lxc_contexts": "process = \"x\"\nfile =\n"}, bad: true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			s := selinux{t.TempDir()}
			for path, text := range tt.files {
				if err := os.MkdirAll(filepath.Dir(filepath.Join(s.root, path)), 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(s.root, path), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			got, err := s.containerFiles()
			if got != tt.want || (err != nil) != tt.bad {
				t.Errorf("files of containers have %q, %v; want %q", got, err, tt.want)
			}
			arena := filepath.Join(s.root, "arena")
			if err := os.WriteFile(arena, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if err := s.share(arena); err != nil {
					if os.Geteuid() != 0 {
						t.Skipf("labelling needs root: %v", err)
					}
					t.Fatal(err)
				}
			}
			had := make([]byte, 256)
			n, err := unix.Getxattr(arena, selinuxXattr, had)
			if got := string(had[:max(n, 0)]); tt.want != "" && got != tt.want+"\x00" || tt.want == "" && !(selinux{"/"}).enabled() && err == nil {
				t.Errorf("the arena has label %q, %v; want %q", got, err, tt.want)
			}
		})
	}
}

func TestSELinuxRefuses(t *testing.T) {
	if err := (selinux{t.TempDir()}).share("/nowhere"); err != nil {
		t.Errorf("without SELinux: %v", err)
	}
	root := t.TempDir()
	for path, text := range map[string]string{"sys/fs/selinux/enforce": "1", "etc/selinux/targeted/contexts/lxc_contexts": "ro_file = \"x:y:z\"\n"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(root, path)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, path), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := (selinux{root}).share(filepath.Join(root, "absent")); err == nil {
		t.Error("an absent file was labelled")
	}
}
