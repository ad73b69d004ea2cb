package runner

import (
	"encoding/csv"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// ParseMount reads what --mount says, in the way that Docker has it: fields KEY=VALUE, separated by
// commas; one that has a comma in it is quoted as in CSV.
//
//	type      bind (default) or tmpfs
//	source    or src: the directory or file of this host; relative: from where the caller is
//	target    or dst, destination: where the container finds it; absolute
//	readonly  or ro
//	tmpfs-size, tmpfs-mode  bytes, with k, m or g behind them; octal
//
// Of a bind mount its source must exist, and what is mounted below it comes along, read-only too if the mount is. A tmpfs is
// nosuid and nodev, and takes half of the memory at most unless its size is given.
func ParseMount(s string) (specs.Mount, error) {
	m, err := parseMount(s)
	if err != nil {
		return m, fmt.Errorf("mount %q: %w", s, err)
	}
	return m, nil
}

func parseMount(s string) (m specs.Mount, err error) {
	fields, err := csv.NewReader(strings.NewReader(s)).Read()
	if err != nil {
		return m, errors.New("write type=bind,source=DIR,target=DIR or type=tmpfs,target=DIR")
	}
	m.Type = "bind"
	readonly := false
	var memory []string // options of a tmpfs
	for _, f := range fields {
		key, value, given := strings.Cut(f, "=")
		switch key {
		case "type":
			m.Type = value
		case "source", "src":
			m.Source = value
		case "target", "dst", "destination":
			m.Destination = value
		case "readonly", "ro":
			readonly = true
			if given {
				readonly, err = strconv.ParseBool(value)
			}
		case "tmpfs-size":
			if err = checkSize(value); err == nil {
				memory = append(memory, "size="+value)
			}
		case "tmpfs-mode":
			if _, err = strconv.ParseUint(value, 8, 12); err == nil {
				memory = append(memory, "mode="+value)
			}
		default:
			return m, fmt.Errorf("unknown field %q: there are type, source, target, readonly, tmpfs-size and tmpfs-mode", key)
		}
		if err != nil {
			return m, fmt.Errorf("%s: %w", f, err)
		}
	}
	if !path.IsAbs(m.Destination) || path.Clean(m.Destination) == "/" {
		return m, errors.New("target must be an absolute path in the container, and not its root")
	}
	m.Destination = path.Clean(m.Destination)
	switch m.Type {
	case "bind":
		if m.Source == "" || len(memory) > 0 {
			return m, errors.New("a bind mount has a source, and nothing of a tmpfs")
		}
		if m.Source, err = filepath.Abs(m.Source); err != nil {
			return m, err
		}
		if _, err := os.Stat(m.Source); err != nil {
			return m, fmt.Errorf("source: %w", err)
		}
		m.Options = []string{"rbind", "rprivate"}
		if readonly {
			m.Options = append(m.Options, "ro", "rro")
		}
	case "tmpfs":
		if m.Source != "" {
			return m, errors.New("a tmpfs has no source")
		}
		m.Source, m.Options = "tmpfs", append([]string{"nosuid", "nodev"}, memory...)
		if readonly {
			m.Options = append(m.Options, "ro")
		}
	default:
		return m, fmt.Errorf("unknown type %q: there are bind and tmpfs", m.Type)
	}
	return m, nil
}

// checkSize returns an error unless the kernel would take s as the size of a tmpfs.
func checkSize(s string) error {
	digits := strings.TrimRight(strings.ToLower(s), "kmg")
	if n, err := strconv.ParseUint(digits, 10, 40); err != nil || n == 0 || len(s)-len(digits) > 1 {
		return errors.New("write a number of bytes, with k, m or g behind it")
	}
	return nil
}
