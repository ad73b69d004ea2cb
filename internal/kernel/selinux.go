package kernel

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// selinux is what a host says of SELinux in the tree at root, which is "/" but in
// tests.
//
// The kernel asks it about files that an EROFS filesystem is mounted from as well:
// who has a page fault in a container reads the arena in the container's domain
// (Linux 6.12 to 7.2; reads by read(2) are overlayfs's, in the domain of who mounted that). It may
// read what has the label that the policy has for files which all containers share
// and none writes. Nor does anybody get at these files by name: their directory is
// root's.
type selinux struct{ root string }

const selinuxXattr = "security.selinux"

// enabled reports whether the kernel has a policy.
func (s selinux) enabled() bool {
	_, err := os.Stat(filepath.Join(s.root, "sys/fs/selinux/enforce"))
	return err == nil
}

// containerFiles returns the context of files that containers share and only
// read, as container engines have it from lxc_contexts(5); empty where SELinux is not used.
func (s selinux) containerFiles() (string, error) {
	if !s.enabled() {
		return "", nil
	}
	policy := "targeted"
	config, err := os.ReadFile(filepath.Join(s.root, "etc/selinux/config"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", err
	}
	if v, ok := setting(config, "SELINUXTYPE"); ok {
		policy = v
	}
	name := filepath.Join(s.root, "etc/selinux", policy, "contexts/lxc_contexts")
	contexts, err := os.ReadFile(name)
	if err != nil {
		return "", err
	}
	for _, key := range []string{"ro_file", "file"} {
		if v, ok := setting(contexts, key); ok {
			return v, nil
		}
	}
	return "", fmt.Errorf("%s names no context for files", name)
}

// setting finds a line KEY=VALUE; either may be quoted or among blanks.
func setting(file []byte, key string) (value string, ok bool) {
	for line := range strings.Lines(string(file)) {
		k, v, found := strings.Cut(line, "=")
		if v = strings.Trim(strings.TrimSpace(v), `"`); found && strings.TrimSpace(k) == key && v != "" {
			return v, true
		}
	}
	return "", false
}

// share lets containers read a file. Where the policy knows no containers, or the
// filesystem no labels, it does nothing.
func (s selinux) share(path string) error {
	label, err := s.containerFiles()
	if err != nil || label == "" {
		return nil
	}
	old := make([]byte, 256)
	if n, err := unix.Getxattr(path, selinuxXattr, old); err == nil && string(bytes.TrimRight(old[:n], "\x00")) == label {
		return nil
	}
	err = unix.Setxattr(path, selinuxXattr, append([]byte(label), 0), 0)
	if err == nil || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
		return nil
	}
	return fmt.Errorf("label %s %s, so that containers may read it under SELinux (the policy has to let the daemon relabel files): %w", path, label, err)
}
