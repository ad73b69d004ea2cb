package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/progress"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat"
	"hydrofoil.dev/foil/internal/server/guard"
	"hydrofoil.dev/foil/internal/server/holdings"
	"hydrofoil.dev/foil/internal/server/rootdir"
)

// holdingsFlags name the files of a server.
type holdingsFlags struct {
	root, access string
	json         bool
}

func (f *holdingsFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.root, "root", "/var/lib/foil-registry", "`DIR` of foil serve --root")
	cmd.Flags().StringVar(&f.access, "access", "", "`FILE` of the rules, that of foil serve --access")
	cmd.Flags().BoolVar(&f.json, "json", false, "print one JSON array")
}

// open reads the rules, and opens the catalog to read it.
func (f *holdingsFlags) open(ctx context.Context) (*holdings.Rules, *sqlcat.Catalog, error) {
	rules, err := readRules(f.access, guard.ParseHoldings)
	if err != nil {
		return nil, nil, err
	}
	c, err := rootdir.ViewCatalog(ctx, f.root)
	return rules, c, err
}

func newServerQuotaCommand() *cobra.Command {
	var f holdingsFlags
	cmd := &cobra.Command{
		Use:   "quota [REPOSITORY]",
		Short: "Show quotas, and how much of them is used",
		Long: `Shows the quotas of the file of foil serve --access, and how much of each is used; with a
repository, those that it is under. A server may run meanwhile.

BYTES are logical: those of the manifests of a repository, and of the blobs that these
name, each once in a repository, whatever others hold. LOOSE are bytes of blobs that no
manifest names: pushes under way, and what deletions have left; they may be as many again.
What a repository adds to what others have already is in foil server usage. docs/access.md says how quotas are written.

Exit codes: 0; 1 an error, also that there is no such repository; 2 the command line makes
no sense.`,
		Example: `  foil server quota --access /etc/foil/access.toml
  foil server quota team/app --access /etc/foil/access.toml --json`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			rules, c, err := f.open(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			repo := ""
			if len(args) == 1 {
				repo = args[0]
			}
			all, err := c.Usages(cmd.Context(), "", -1)
			if err != nil {
				return err
			}
			if repo != "" && !slices.ContainsFunc(all, func(u catalog.RepositoryUsage) bool { return u.Repository == repo }) {
				return fmt.Errorf("there is no repository %s", repo)
			}
			used := rules.Use(all, repo)
			if f.json {
				return printJSON(cmd.OutOrStdout(), append([]holdings.Used{}, used...))
			}
			return printUsed(cmd.OutOrStdout(), used)
		},
	}
	f.add(cmd)
	return cmd
}

func printUsed(w io.Writer, used []holdings.Used) error {
	if len(used) == 0 {
		_, err := fmt.Fprintln(w, "there are no quotas: [[quota]] in the file of access makes some")
		return err
	}
	var rows []string
	for _, u := range used {
		name, bytes, manifests := u.Quota, "-", "-"
		if name == "" {
			name = "-"
		}
		if u.MaxBytes > 0 {
			bytes = progress.Bytes(u.MaxBytes)
		}
		if u.MaxManifests > 0 {
			manifests = fmt.Sprint(u.MaxManifests)
		}
		rows = append(rows, fmt.Sprintf("%s\t%s\t%s\t%s\t%s\t%d\t%s", name, u.Of, progress.Bytes(u.Bytes), bytes, progress.Bytes(u.Loose), u.Manifests, manifests))
	}
	return table(w, "QUOTA REPOSITORIES BYTES OF LOOSE MANIFESTS OF", rows)
}

// untagged is a tag that goes.
type untagged struct {
	Repository string    `json:"repository"`
	Tag        string    `json:"tag"`
	Manifest   string    `json:"manifest"`
	Pushed     time.Time `json:"pushed"`
	Rule       string    `json:"rule"`
}

func newServerRetentionCommand() *cobra.Command {
	var f holdingsFlags
	var dry bool
	cmd := &cobra.Command{
		Use:   "retention --dry-run",
		Short: "Say which tags rules of retention would remove",
		Long: `Says which tags would go if the rules of the file of foil serve --access were applied now,
and by which rule. A server may run meanwhile. It applies them itself, each
retention-every (1h); only tags go, and immutable ones stay. docs/access.md says how
rules are written.

Exit codes: 0; 1 an error; 2 the command line makes no sense.`,
		Example: `  foil server retention --dry-run --access /etc/foil/access.toml
  foil server retention --dry-run --access new.toml --json | jq -r '.[] | .repository + ":" + .tag'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !dry {
				return usagef("the server applies its rules itself, each retention-every: --dry-run says what would go")
			}
			rules, c, err := f.open(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			all, rows := []untagged{}, []string(nil)
			err = holdings.Each(cmd.Context(), c, rules, time.Now(), func(repo string, gone []holdings.Gone) error {
				for _, g := range gone {
					all = append(all, untagged{repo, g.Tag, g.Target.String(), g.Pushed.UTC(), g.Rule})
					rows = append(rows, fmt.Sprintf("%s\t%s\t%s\t%s\t%s", repo, g.Tag, shortDigest(g.Target.String()), localTime(g.Pushed), g.Rule))
				}
				return nil
			})
			switch {
			case err != nil:
				return err
			case f.json:
				return printJSON(cmd.OutOrStdout(), all)
			case len(rows) == 0:
				_, err := fmt.Fprintln(cmd.OutOrStdout(), "no tag would go")
				return err
			}
			return table(cmd.OutOrStdout(), "REPOSITORY TAG MANIFEST PUSHED RULE", rows)
		},
	}
	f.add(cmd)
	cmd.Flags().BoolVar(&dry, "dry-run", false, "change nothing")
	return cmd
}
