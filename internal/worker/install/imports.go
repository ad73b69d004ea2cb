package install

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/pelletier/go-toml/v2"
)

// An import is added to a containerd's configuration, and taken out again, as text: comments
// and order are the administrator's.

// madeLine ends a line that addImport has made.
const madeLine = " # by foil install\n"

var (
	// importsList is the beginning of the list. A key of the top level stands before the first table.
	importsList = regexp.MustCompile(`(?m)^[ \t]*imports[ \t]*=[ \t]*\[`)
	firstTable  = regexp.MustCompile(`(?m)^[ \t]*\[`)
)

// errImports is an imports list that is not written as lists usually are.
var errImports = errors.New("its line imports is written in a way that foil install does not know")

// imports reads the list of a configuration.
func imports(config []byte) ([]string, error) {
	var c struct {
		Imports []string `toml:"imports"`
	}
	if err := toml.Unmarshal(config, &c); err != nil {
		return nil, err
	}
	return c.Imports, nil
}

// addImport returns the configuration in dir with an import of path. It is the same if it has that
// already, by a pattern perhaps.
func addImport(config []byte, dir, path string) ([]byte, error) {
	list, err := imports(config)
	if err != nil {
		return nil, err
	}
	for _, p := range list {
		if !filepath.IsAbs(p) {
			p = filepath.Join(dir, p)
		}
		if ok, err := filepath.Match(filepath.Clean(p), path); ok && err == nil {
			return config, nil
		}
	}
	entry := fmt.Sprintf("%q", path)
	var out []byte
	if list == nil {
		out = append([]byte("imports = ["+entry+"]"+madeLine), config...)
	} else {
		at := importsList.FindIndex(topLevel(config))
		if at == nil {
			return nil, errImports
		}
		out = slices.Concat(config[:at[1]], []byte(entry+", "), config[at[1]:])
	}
	if got, err := imports(out); err != nil || !slices.Equal(got, append([]string{path}, list...)) {
		return nil, errImports
	}
	return out, nil
}

// dropImport returns the configuration without the import that addImport has made, and the same if
// that was not addImport.
func dropImport(config []byte, path string) []byte {
	entry := fmt.Sprintf("%q", path)
	if out, ok := bytes.CutPrefix(config, []byte("imports = ["+entry+"]"+madeLine)); ok {
		return out
	}
	if at := importsList.FindIndex(topLevel(config)); at != nil {
		if rest, ok := bytes.CutPrefix(config[at[1]:], []byte(entry+", ")); ok {
			return slices.Concat(config[:at[1]], rest)
		}
	}
	return config
}

// topLevel is what stands before the first table.
func topLevel(config []byte) []byte {
	if at := firstTable.FindIndex(config); at != nil {
		return config[:at[0]]
	}
	return config
}
