package images

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
)

// What a pocket's suite is called, after the code name of the distribution.
var pocketSuffix = map[string]string{"release": "", "updates": "-updates", "security": "-security", "backports": "-backports"}

// sources asks the host's apt where it gets its packages, and gives, as lines of
// sources.list, those of a snapshot. A Debian host builds any suite of Debian: its
// archives hold them all. On another distribution the host's own suite takes the
// place of every declared one.
func sources(ctx context.Context, snapshot Snapshot) (suite string, lines []string, err error) {
	host, isDebian, err := distribution()
	if err != nil {
		return "", nil, err
	}
	suite = snapshot.Suite
	if !isDebian {
		suite = host
	}
	out, err := output(exec.CommandContext(ctx, "apt-get", "indextargets",
		"--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"))
	if err != nil {
		return "", nil, fmt.Errorf("images: ask apt for its sources: %w", err)
	}
	lines, err = sourceLines(string(out), host, suite, snapshot.Pockets)
	return suite, lines, err
}

// sourceLines turns lines of URI, suite and component that the host has into
// those for the pockets of suite. Backports are where the release is.
func sourceLines(targets, host, suite string, pockets []string) (lines []string, err error) {
	for _, pocket := range pockets {
		like := pocketSuffix[pocket]
		if pocket == "backports" {
			like = ""
		}
		found := false
		for line := range strings.Lines(targets) {
			fields := strings.Fields(line)
			if len(fields) != 3 || fields[1] != host+like || fields[2] != "main" && fields[2] != "universe" {
				continue
			}
			found = true
			source := "deb " + fields[0] + " " + suite + pocketSuffix[pocket] + " " + fields[2]
			if !slices.Contains(lines, source) {
				lines = append(lines, source)
			}
		}
		if !found {
			return nil, fmt.Errorf("images: apt has no source for %s%s; add one to /etc/apt/sources.list.d", host, like)
		}
	}
	return lines, nil
}

// distribution of the host, as in os-release(5).
func distribution() (codename string, isDebian bool, err error) {
	text, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return "", false, fmt.Errorf("images: which distribution is this? %w", err)
	}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		value = strings.Trim(value, `"`)
		switch name {
		case "VERSION_CODENAME":
			codename = value
		case "ID":
			isDebian = value == "debian"
		}
	}
	if codename == "" {
		return "", false, errors.New("images: /etc/os-release has no VERSION_CODENAME: images are built on Debian and Ubuntu only")
	}
	return codename, isDebian, nil
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
func bootstrap(ctx context.Context, snapshot Snapshot, slim bool, dir string) error {
	suite, lines, err := sources(ctx, snapshot)
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
	if slim {
		for _, pattern := range excluded {
			args = append(args, "--dpkgopt=path-exclude="+pattern)
		}
		args = append(args, "--dpkgopt=path-include=/usr/share/doc/*/copyright")
	}
	args = append(args, suite, dir)
	args = append(args, lines...)
	cmd := exec.CommandContext(ctx, "mmdebstrap", args...)
	cmd.Env = append(buildEnv(), "SOURCE_DATE_EPOCH="+strconv.FormatInt(snapshot.Created.Unix(), 10))
	if err := run(cmd); err != nil {
		if errors.Is(err, exec.ErrNotFound) {
			return fmt.Errorf("images: mmdebstrap is not installed (on Debian and Ubuntu: apt-get install mmdebstrap): %w", err)
		}
		return fmt.Errorf("images: bootstrap %s (%s): %w", suite, strings.Join(snapshot.Pockets, ", "), err)
	}
	return nil
}
