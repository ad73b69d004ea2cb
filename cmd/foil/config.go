package main

import (
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// defaultConfig is read when it is there and no --config names another file.
const defaultConfig = "/etc/foil/foil.toml"

// sectionKey is the annotation of a command that has a section in the
// configuration file.
const sectionKey = "foil.config.section"

// configurable gives a command a section of the configuration file: a table of
// the command's name, whose keys are its flags. A flag on the command line
// wins over the file. It is called when all flags of the command are defined;
// those named in except stay out of the file.
func configurable(cmd *cobra.Command, except ...string) {
	section := cmd.Name()
	if cmd.Annotations == nil {
		cmd.Annotations = make(map[string]string)
	}
	cmd.Annotations[sectionKey] = section
	flags := cmd.Flags()
	for _, name := range append(except, "help") {
		if f := flags.Lookup(name); f != nil {
			f.Annotations = map[string][]string{sectionKey: {"none"}}
		}
	}
	var file string
	addConfigFlag(cmd, &file)
	inner := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		tables, err := readConfig(cmd.Root(), file, flags.Changed("config"))
		if err != nil {
			return err
		}
		for name, value := range tables[section] {
			if f := flags.Lookup(name); !f.Changed {
				if err := f.Value.Set(value); err != nil {
					return fmt.Errorf("configuration %s: [%s] %s: %w", file, section, name, err)
				}
			}
		}
		return inner(cmd, args)
	}
}

func addConfigFlag(cmd *cobra.Command, file *string) {
	cmd.Flags().StringVar(file, "config", defaultConfig, "configuration `FILE` in TOML; see foil config")
	cmd.Flags().Lookup("config").Annotations = map[string][]string{sectionKey: {"none"}}
}

// settings calls fn for the flags of a command that the file can set.
func settings(cmd *cobra.Command, fn func(*pflag.Flag)) {
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Annotations[sectionKey] == nil && f.Name != "help" {
			fn(f)
		}
	})
}

// sections are the commands that can be configured, by the names of their
// tables.
func sections(root *cobra.Command) map[string]*cobra.Command {
	all := make(map[string]*cobra.Command)
	for _, c := range root.Commands() {
		if name, ok := c.Annotations[sectionKey]; ok {
			all[name] = c
		}
	}
	return all
}

// readConfig reads the configuration file, strictly: every table is a section,
// every key a flag, and every value of the flag's type. It returns the values
// as the flags take them. A file that is not there is an error if it was asked
// for.
func readConfig(root *cobra.Command, file string, required bool) (map[string]map[string]string, error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) && !required {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	fail := func(format string, args ...any) (map[string]map[string]string, error) {
		return nil, fmt.Errorf("configuration %s: %w", file, fmt.Errorf(format, args...))
	}
	var tables map[string]map[string]any
	if err := toml.Unmarshal(b, &tables); err != nil {
		if decodeErr := new(toml.DecodeError); errors.As(err, &decodeErr) {
			line, column := decodeErr.Position()
			return fail("line %d, column %d: %w", line, column, err)
		}
		return fail("%w", err)
	}
	known := sections(root)
	values := make(map[string]map[string]string)
	for table, entries := range tables {
		cmd, ok := known[table]
		if !ok {
			return fail("there is no section [%s]: foil config prints those there are", table)
		}
		values[table] = make(map[string]string)
		for key, v := range entries {
			var flag *pflag.Flag
			settings(cmd, func(f *pflag.Flag) {
				if f.Name == key {
					flag = f
				}
			})
			if flag == nil {
				return fail("[%s] has no setting %s: foil config prints those there are", table, key)
			}
			s, err := flagValue(flag, v)
			if err != nil {
				return fail("[%s] %s: %w", table, key, err)
			}
			values[table][key] = s
		}
	}
	return values, nil
}

// flagValue turns a value of the file into what the flag takes.
func flagValue(f *pflag.Flag, v any) (string, error) {
	wrong := func(want string) (string, error) { return "", fmt.Errorf("want %s, not %v", want, v) }
	switch f.Value.Type() {
	case "bool":
		if b, ok := v.(bool); ok {
			return strconv.FormatBool(b), nil
		}
		return wrong("true or false")
	case "int", "int32", "int64", "uint", "uint32", "uint64":
		if i, ok := v.(int64); ok {
			return strconv.FormatInt(i, 10), nil
		}
		return wrong("a whole number")
	case "float64":
		switch v := v.(type) {
		case float64:
			return strconv.FormatFloat(v, 'g', -1, 64), nil
		case int64:
			return strconv.FormatInt(v, 10), nil
		}
		return wrong("a number")
	case "duration":
		if s, ok := v.(string); ok {
			if _, err := time.ParseDuration(s); err == nil {
				return s, nil
			}
		}
		return wrong(`a time like "1m30s"`)
	case "stringSlice":
		if s, ok := v.(string); ok {
			return s, nil
		}
		list, ok := v.([]any)
		items := make([]string, len(list))
		for i, item := range list {
			s, isString := item.(string)
			items[i], ok = s, ok && isString
		}
		if !ok {
			return wrong("a list of strings in quotes")
		}
		return joinList(items)
	default:
		if s, ok := v.(string); ok {
			return s, nil
		}
		return wrong("a string in quotes")
	}
}

// tomlValue is the opposite of flagValue.
func tomlValue(f *pflag.Flag, s string) any {
	switch f.Value.Type() {
	case "bool":
		return s == "true"
	case "int", "int32", "int64", "uint", "uint32", "uint64":
		if i, err := strconv.ParseInt(s, 10, 64); err == nil {
			return i
		}
	case "float64":
		if x, err := strconv.ParseFloat(s, 64); err == nil {
			return x
		}
	case "stringSlice":
		if s == f.DefValue {
			s = strings.Trim(s, "[]") // as pflag writes it
		}
		if list, err := csv.NewReader(strings.NewReader(s)).Read(); err == nil {
			return list
		}
		return []string{}
	}
	return s
}

// joinList writes a list as the flag that has it takes it.
func joinList(items []string) (string, error) {
	var b strings.Builder
	w := csv.NewWriter(&b)
	if len(items) == 0 {
		return "", nil
	}
	if err := w.Write(items); err != nil {
		return "", err
	}
	w.Flush()
	return strings.TrimSuffix(b.String(), "\n"), w.Error()
}

func newConfigCommand() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Print the configuration, as a file to start from",
		Long: `Prints the settings that the configuration file and the defaults make
together, in TOML, each with what it is for. The output is itself a
configuration file.

The file has one section for each command that can be configured. Settings
have the names of the command's flags, and a flag on the command line wins.
Unless --config names another file, ` + defaultConfig + ` is read if it is there.
A setting that foil does not know is an error.

Exit codes: 0; 1 the file cannot be read, or is wrong.`,
		Example: `  foil config > ` + defaultConfig + `
  foil config --config site.toml`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			values, err := readConfig(cmd.Root(), file, cmd.Flags().Changed("config"))
			if err != nil {
				return err
			}
			var b bytes.Buffer
			known := sections(cmd.Root())
			var names []string
			for name := range known {
				names = append(names, name)
			}
			slices.Sort(names)
			for i, name := range names {
				if i > 0 {
					b.WriteByte('\n')
				}
				fmt.Fprintf(&b, "[%s]\n", name)
				var failed error
				settings(known[name], func(f *pflag.Flag) {
					s := f.DefValue
					if v, ok := values[name][f.Name]; ok {
						s = v
					}
					line, err := toml.Marshal(map[string]any{f.Name: tomlValue(f, s)})
					if err != nil {
						failed = errors.Join(failed, err)
					}
					_, usage := pflag.UnquoteUsage(f)
					fmt.Fprintf(&b, "# %s\n%s", strings.ReplaceAll(usage, "\n", "\n# "), line)
				})
				if failed != nil {
					return fmt.Errorf("print configuration: %w", failed)
				}
			}
			_, err = cmd.OutOrStdout().Write(b.Bytes())
			return err
		},
	}
	cmd.Flags().StringVar(&file, "config", defaultConfig, "configuration `FILE` to print")
	return cmd
}
