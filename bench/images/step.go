package images

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// step is one layer that is being made.
type step struct {
	layer   Layer
	lowers  []string // trees of the layers below, from the bottom
	upper   string   // is made: what the step changes, an overlayfs upper directory
	work    string   // scratch space on the same file system
	fetched string   // downloads, kept
	created time.Time
}

// stepScript makes one layer. It runs as root in mount and PID namespaces of its
// own, so that however it ends, no mount and no process is left.
//
// The host's apt fetches, by the host's network, and the chroot's dpkg installs.
// Services are not started while an image is built. Python modules are compiled
// after their times are the ones that the layer will give them: a compiled module
// names the time of its source, and would be of no use with another.
const stepScript = `
set -e
mount -t overlay -o "lowerdir=$LOWER,upperdir=$UPPER,workdir=$SCRATCH,redirect_dir=off,metacopy=off,index=off" overlay "$MERGED"
mount -t proc proc "$MERGED/proc"
mount -t tmpfs tmpfs "$MERGED/run"
for node in null zero full random urandom; do
	[ -e "$MERGED/dev/$node" ] || touch "$MERGED/dev/$node"
	mount --bind "/dev/$node" "$MERGED/dev/$node"
done
[ -e "$MERGED/dev/fd" ] || ln -s /proc/self/fd "$MERGED/dev/fd"
mkdir -p "$MERGED/dev/shm"
mount -t tmpfs tmpfs "$MERGED/dev/shm"
mkdir -p "$MERGED/run/build/npm" "$MERGED/run/build/cache" "$MERGED/run/lock"
mount --bind "$FETCHED" "$MERGED/run/build/cache"
for name in $NPM_ARCHIVES; do
	cp "$FETCHED/npm-pack/$name" "$MERGED/run/build/npm/${name%%@@*}.tgz"
done
if [ $# -gt 0 ]; then
	printf '#!/bin/sh\nexit 101\n' >"$MERGED/usr/sbin/policy-rc.d"
	chmod 755 "$MERGED/usr/sbin/policy-rc.d"
	apt-get -q -y install "$@"
	apt-get clean
	rm "$MERGED/usr/sbin/policy-rc.d"
fi
[ ! -d "$FILES" ] || cp -r --preserve=mode "$FILES/." "$MERGED/"

[ -n "$RUN$PYTHON_PACKAGES" ] || exit 0
for name in resolv.conf hosts; do
	[ -e "$MERGED/etc/$name" ] || touch "$MERGED/etc/$name"
	mount --bind "/etc/$name" "$MERGED/etc/$name"
done
[ -z "$CERTIFICATES" ] || cp -L "$CERTIFICATES" "$MERGED/run/build/ca.crt"
[ -z "$HOST_PIP_CONF" ] || cp -L "$HOST_PIP_CONF" "$MERGED/run/build/pip.conf"
[ -z "$HOST_NPMRC" ] || cp -L "$HOST_NPMRC" "$MERGED/run/build/npmrc"
inside() {
	env -u APT_CONFIG -u LOWER -u UPPER -u SCRATCH -u MERGED -u FILES -u FETCHED chroot "$MERGED" sh -ec "$1"
}
export NPM=/run/build/npm
[ -z "$RUN" ] || inside "$RUN"
[ -z "$PYTHON_PACKAGES" ] || inside '
	python3 -m pip download -q -d /run/build/cache/wheels $PYTHON_PACKAGES
	python3 -m pip install -q --no-compile --no-index --find-links /run/build/cache/wheels $PYTHON_PACKAGES
	find /usr/local -newermt "@$CREATED" -exec touch -h -d "@$CREATED" {} +
	for dir in /usr/local/lib/python3*; do
		python3 -m compileall -q -j 1 "$dir" || echo "some modules do not compile, as with pip"
	done'
`

// make makes the layer's tree.
func (s step) make(ctx context.Context) error {
	merged, scratch, staged := filepath.Join(s.work, "merged"), filepath.Join(s.work, "overlay"), filepath.Join(s.work, "files")
	for _, dir := range []string{s.work, s.upper, scratch, staged} {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("images: %w", err)
		}
	}
	for _, dir := range []string{s.upper, merged, scratch, s.fetched} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("images: %w", err)
		}
	}
	defer os.RemoveAll(s.work)
	settings, err := aptSettings(ctx)
	if err != nil {
		return err
	}
	var conf bytes.Buffer
	// Settings of the host itself stay out: Dir::Etc is the tree's.
	fmt.Fprintf(&conf, "Dir %q;\nDir::Bin::Methods \"/usr/lib/apt/methods\";\n", merged)
	fmt.Fprintf(&conf, "Dir::State::Status %q;\n", filepath.Join(merged, "var/lib/dpkg/status"))
	fmt.Fprintf(&conf, "DPkg::Chroot-Directory %q;\nAPT::Sandbox::User \"root\";\nAPT::Install-Recommends \"false\";\nAcquire::Languages \"none\";\n", merged)
	for _, setting := range settings {
		fmt.Fprintf(&conf, "%s;\n", setting)
	}
	confPath := filepath.Join(s.work, "apt.conf")
	if err := os.WriteFile(confPath, conf.Bytes(), 0o644); err != nil {
		return fmt.Errorf("images: %w", err)
	}
	if err := stage(staged, s.layer.Files); err != nil {
		return err
	}
	var archives []string
	for _, spec := range s.layer.Npm {
		name, err := npmPack(ctx, filepath.Join(s.fetched, "npm-pack"), spec)
		if err != nil {
			return err
		}
		archives = append(archives, name)
	}
	lowers := ""
	for _, lower := range s.lowers { // overlayfs wants the top first
		lowers = lower + strings.TrimSuffix(":"+lowers, ":")
	}

	cmd := exec.CommandContext(ctx, "unshare", append([]string{"--mount", "--pid", "--fork", "--kill-child",
		"sh", "-c", stepScript, "step"}, s.layer.Packages...)...)
	cmd.Env = append(buildEnv(), "APT_CONFIG="+confPath, "DEBIAN_FRONTEND=noninteractive",
		"LOWER="+lowers, "UPPER="+s.upper, "SCRATCH="+scratch, "MERGED="+merged,
		"FILES="+staged, "FETCHED="+s.fetched, "NPM_ARCHIVES="+strings.Join(archives, " "),
		"RUN="+s.layer.Run, "PYTHON_PACKAGES="+strings.Join(s.layer.Pip, " "),
		"CREATED="+strconv.FormatInt(s.created.Unix(), 10))
	cmd.Env = append(cmd.Env, clientEnv(os.Environ())...)
	return run(cmd)
}

// stage writes the files of a layer to a directory.
func stage(dir string, files map[string]string) error {
	for path, text := range files {
		target := filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			return fmt.Errorf("images: %w", err)
		}
		mode := os.FileMode(0o644)
		if strings.HasPrefix(text, "#!") {
			mode = 0o755
		}
		if err := os.WriteFile(target, []byte(text), mode); err != nil {
			return fmt.Errorf("images: %w", err)
		}
	}
	return nil
}

// npmPack downloads the archive of an npm package, NAME@VERSION, into dir unless
// it is there, and gives its file name: that of the package, "@@" and the version.
func npmPack(ctx context.Context, dir, spec string) (string, error) {
	at := strings.LastIndex(spec, "@")
	name := strings.ReplaceAll(strings.TrimPrefix(spec[:at], "@"), "/", "-") + "@@" + spec[at+1:]
	if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
		return name, nil
	}
	partial := filepath.Join(dir, "partial")
	defer os.RemoveAll(partial)
	if err := errors.Join(os.RemoveAll(partial), os.MkdirAll(partial, 0o755)); err != nil {
		return "", fmt.Errorf("images: %w", err)
	}
	cmd := exec.CommandContext(ctx, "npm", "pack", "--silent", "--pack-destination", partial, spec)
	cmd.Dir = partial
	if err := run(cmd); err != nil {
		return "", fmt.Errorf("images: fetch npm package %s: %w", spec, err)
	}
	found, err := filepath.Glob(filepath.Join(partial, "*.tgz"))
	if err != nil {
		return "", fmt.Errorf("images: %w", err)
	}
	if len(found) != 1 {
		return "", fmt.Errorf("images: fetch npm package %s: npm left %d archives, not one", spec, len(found))
	}
	if err := os.Rename(found[0], filepath.Join(dir, name)); err != nil {
		return "", fmt.Errorf("images: %w", err)
	}
	return name, nil
}

// buildEnv is the environment of what builds: nothing of the caller's shows.
func buildEnv() []string {
	return []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=/root", "LC_ALL=C", "TZ=UTC",
	}
}

// clientEnv is how pip and npm, in a chroot, reach what the host's reach: its
// proxies, indexes and certificates, with the downloads kept.
func clientEnv(environ []string) []string {
	env := []string{
		"PIP_CACHE_DIR=/run/build/cache/pip", "PIP_ROOT_USER_ACTION=ignore", "PIP_BREAK_SYSTEM_PACKAGES=1",
		"PIP_NO_INPUT=1", "PIP_DISABLE_PIP_VERSION_CHECK=1", "PIP_PROGRESS_BAR=off", "PYTHONDONTWRITEBYTECODE=1",
		"npm_config_cache=/run/build/cache/npm", "npm_config_update_notifier=false", "npm_config_fund=false", "npm_config_audit=false",
		"NEXT_TELEMETRY_DISABLED=1",
	}
	certificates := "/etc/ssl/certs/ca-certificates.crt"
	for _, entry := range environ {
		name, value, _ := strings.Cut(entry, "=")
		switch lower := strings.ToLower(name); lower {
		case "pip_index_url", "pip_extra_index_url", "pip_trusted_host", "pip_proxy", "pip_default_timeout",
			"npm_config_registry", "npm_config_proxy", "npm_config_https_proxy",
			"http_proxy", "https_proxy", "no_proxy", "all_proxy":
			env = append(env, entry)
		case "pip_cert", "ssl_cert_file":
			certificates = value
		}
	}
	if _, err := os.Stat(certificates); err == nil {
		env = append(env, "CERTIFICATES="+certificates)
		for _, name := range []string{"PIP_CERT", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "npm_config_cafile"} {
			env = append(env, name+"=/run/build/ca.crt")
		}
	}
	home, err := os.UserHomeDir()
	if err != nil {
		home = "/root"
	}
	for _, path := range []string{home + "/.config/pip/pip.conf", home + "/.pip/pip.conf", "/etc/pip.conf"} {
		if _, err := os.Stat(path); err == nil {
			env = append(env, "HOST_PIP_CONF="+path, "PIP_CONFIG_FILE=/run/build/pip.conf")
			break
		}
	}
	if path := home + "/.npmrc"; exists(path) {
		env = append(env, "HOST_NPMRC="+path, "npm_config_userconfig=/run/build/npmrc")
	}
	return env
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
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
	// It has a process group of its own: an interrupt at the terminal is for this
	// process alone, and what it tells is told to all that the command started.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = 20 * time.Second
	if err := cmd.Run(); err != nil {
		said := strings.TrimSpace(stdout.String() + "\n" + all.String())
		return nil, fmt.Errorf("%s: %w\n%s", filepath.Base(cmd.Path), err, lastLines(said, 15))
	}
	return stdout.Bytes(), nil
}

// lastLines are the last n lines of what a terminal would show of text.
func lastLines(text string, n int) string {
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		lines[i] = line[strings.LastIndex(line, "\r")+1:]
	}
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
