package images

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// What a pocket's suite is called, after the code name of the distribution.
var pocketSuffix = map[string]string{"release": "", "updates": "-updates", "security": "-security"}

// sources asks the host's apt where it gets its packages, and gives, as lines of
// sources.list, those of the pockets.
func sources(ctx context.Context, pockets []string) (suite string, lines []string, err error) {
	suite, err = codename()
	if err != nil {
		return "", nil, err
	}
	out, err := output(exec.CommandContext(ctx, "apt-get", "indextargets",
		"--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"))
	if err != nil {
		return "", nil, fmt.Errorf("images: ask apt for its sources: %w", err)
	}
	for _, pocket := range pockets {
		found := false
		for line := range strings.Lines(string(out)) {
			fields := strings.Fields(line)
			if len(fields) != 3 || fields[1] != suite+pocketSuffix[pocket] {
				continue
			}
			found = true
			if source := "deb " + strings.Join(fields, " "); !slices.Contains(lines, source) {
				lines = append(lines, source)
			}
		}
		if !found {
			return "", nil, fmt.Errorf("images: apt has no source for %s%s; add one to /etc/apt/sources.list.d", suite, pocketSuffix[pocket])
		}
	}
	return suite, lines, nil
}

// codename of the host's distribution, as in os-release(5).
func codename() (string, error) {
	text, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return "", fmt.Errorf("images: which distribution is this? %w", err)
	}
	for line := range strings.Lines(string(text)) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "VERSION_CODENAME="); ok {
			return strings.Trim(name, `"`), nil
		}
	}
	return "", errors.New("images: /etc/os-release has no VERSION_CODENAME: images are built on Debian and Ubuntu only")
}

// aptSettings are the host's ways to reach its sources, as options KEY=VALUE.
func aptSettings(ctx context.Context) ([]string, error) {
	out, err := output(exec.CommandContext(ctx, "apt-config", "dump", "Acquire"))
	if err != nil {
		return nil, fmt.Errorf("images: ask apt for its settings: %w", err)
	}
	var settings []string
	for line := range strings.Lines(string(out)) {
		name, value, ok := strings.Cut(strings.TrimSuffix(strings.TrimSpace(line), ";"), " ")
		if ok && strings.Contains(strings.ToLower(name), "proxy") && value != `""` {
			settings = append(settings, name+" "+value)
		}
	}
	return settings, nil
}

// Documents and translations, which slim images leave out too.
var excluded = []string{"/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*"}

// bootstrap makes the file tree of a base at dir. It keeps apt's lists, for the
// packages that come on top.
func bootstrap(ctx context.Context, base Base, dir string) error {
	suite, lines, err := sources(ctx, base.Pockets)
	if err != nil {
		return err
	}
	settings, err := aptSettings(ctx)
	if err != nil {
		return err
	}
	args := []string{"--mode=root", "--variant=minbase", "--format=directory", "--skip=cleanup/apt/lists",
		`--aptopt=Acquire::Languages "none"`}
	for _, setting := range settings {
		args = append(args, "--aptopt="+setting)
	}
	for _, pattern := range excluded {
		args = append(args, "--dpkgopt=path-exclude="+pattern)
	}
	args = append(args, "--dpkgopt=path-include=/usr/share/doc/*/copyright", suite, dir)
	args = append(args, lines...)
	cmd := exec.CommandContext(ctx, "mmdebstrap", args...)
	cmd.Env = buildEnv(base.Created)
	if err := run(cmd); err != nil {
		return fmt.Errorf("images: bootstrap base %s: %w", base.Name, err)
	}
	return nil
}

// install installs an image's packages and files on the tree lower; what that
// changes is in upper afterwards, an overlayfs upper directory. work is scratch
// space on the same file system.
//
// All happens in mount and PID namespaces of its own, so that however it ends,
// no mount and no process is left.
func install(ctx context.Context, image Image, lower, upper, work string) error {
	settings, err := aptSettings(ctx)
	if err != nil {
		return err
	}
	merged, scratch := filepath.Join(work, "merged"), filepath.Join(work, "overlay")
	for _, dir := range []string{upper, merged, scratch} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("images: %w", err)
		}
	}
	// The host's apt fetches, by the host's network, and the chroot's dpkg
	// installs. Settings of the host itself stay out: Dir::Etc is the tree's.
	var conf bytes.Buffer
	fmt.Fprintf(&conf, "Dir %q;\nDir::Bin::Methods \"/usr/lib/apt/methods\";\n", merged)
	fmt.Fprintf(&conf, "Dir::State::Status %q;\n", filepath.Join(merged, "var/lib/dpkg/status"))
	fmt.Fprintf(&conf, "DPkg::Chroot-Directory %q;\nAPT::Sandbox::User \"root\";\nAPT::Install-Recommends \"false\";\nAcquire::Languages \"none\";\n", merged)
	for _, setting := range settings {
		fmt.Fprintf(&conf, "%s;\n", setting)
	}
	confPath := filepath.Join(work, "apt.conf")
	if err := os.WriteFile(confPath, conf.Bytes(), 0o644); err != nil {
		return fmt.Errorf("images: %w", err)
	}
	staged := filepath.Join(work, "files")
	for path, text := range image.Files {
		target := filepath.Join(staged, path)
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			return fmt.Errorf("images: %w", err)
		}
		if err := os.WriteFile(target, []byte(text), 0o644); err != nil {
			return fmt.Errorf("images: %w", err)
		}
	}
	// Services are not started while an image is built.
	const script = `
set -e
mount -t overlay -o "lowerdir=$LOWER,upperdir=$UPPER,workdir=$SCRATCH,redirect_dir=off,metacopy=off,index=off" overlay "$MERGED"
mount -t proc proc "$MERGED/proc"
mount -t tmpfs tmpfs "$MERGED/run"
for node in null zero random urandom; do
	[ -e "$MERGED/dev/$node" ] || touch "$MERGED/dev/$node"
	mount --bind "/dev/$node" "$MERGED/dev/$node"
done
printf '#!/bin/sh\nexit 101\n' >"$MERGED/usr/sbin/policy-rc.d"
chmod 755 "$MERGED/usr/sbin/policy-rc.d"
[ $# -eq 0 ] || apt-get -q -y install "$@"
apt-get clean
rm "$MERGED/usr/sbin/policy-rc.d"
if [ -d "$FILES" ]; then
	cd "$FILES"
	find . -type f | while read -r file; do
		mkdir -p "$MERGED/${file%/*}"
		cp "$file" "$MERGED/$file"
	done
fi
`
	cmd := exec.CommandContext(ctx, "unshare", append([]string{"--mount", "--pid", "--fork", "--kill-child",
		"sh", "-c", script, "install"}, image.Packages...)...)
	cmd.Env = append(buildEnv(image.Created), "APT_CONFIG="+confPath, "DEBIAN_FRONTEND=noninteractive",
		"LOWER="+lower, "UPPER="+upper, "SCRATCH="+scratch, "FILES="+staged, "MERGED="+merged)
	if err := run(cmd); err != nil {
		return fmt.Errorf("images: install %s in %s:%s: %w", strings.Join(image.Packages, " "), image.Name, image.Tag, err)
	}
	return nil
}

// buildEnv is the environment of what builds: nothing of the caller's shows.
func buildEnv(created time.Time) []string {
	return []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=/root", "LC_ALL=C", "TZ=UTC",
		"SOURCE_DATE_EPOCH=" + strconv.FormatInt(created.Unix(), 10),
	}
}

// run is cmd.Run whose error has the last of what the command said.
func run(cmd *exec.Cmd) error {
	_, err := output(cmd)
	return err
}

// output is cmd.Output whose error has the last of what the command said.
func output(cmd *exec.Cmd) ([]byte, error) {
	var stdout, all bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &all
	// A command that was told to stop cleans up; then it is made to stop.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 20 * time.Second
	if err := cmd.Run(); err != nil {
		said := strings.TrimSpace(all.String())
		if said == "" {
			said = strings.TrimSpace(stdout.String())
		}
		return nil, fmt.Errorf("%s: %w\n%s", filepath.Base(cmd.Path), err, lastLines(said, 15))
	}
	return stdout.Bytes(), nil
}

func lastLines(text string, n int) string {
	lines := strings.Split(text, "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
