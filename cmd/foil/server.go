package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/guard"
)

func newServerCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "server",
		Short: "Delete from a registry, explain its rules, show its quotas, say what rests where, back it up, mend its catalog, look at its webhooks",
		Long: `For administrators of foil serve. delete, undelete, gc and mode ask the server that runs, over a socket below its root,
import asks one as any client does. The others ask no server: they work on the files that the server reads.`,
	}
	cmd.AddCommand(newServerAccessCommand(), newServerQuotaCommand(), newServerRetentionCommand(),
		newServerDeleteCommand(), newServerUndeleteCommand(), newServerGCCommand(),
		newServerRebuildCommand(), newServerBackupCommand(), newServerRestoreCommand(),
		newServerScrubCommand(), newServerModeCommand(), newServerUsageCommand(), newServerImportCommand(), newServerWebhooksCommand())
	onlySubcommands(cmd)
	return cmd
}

func newServerAccessCommand() *cobra.Command {
	var file string
	var groups []string
	cmd := &cobra.Command{
		Use:   "access",
		Short: "Say who may do what, and by which rule",
		Long: `Reads the file of foil serve --access, strictly, and says what its rules decide.

  can SUBJECT RIGHT REPOSITORY   whether a subject may do it, and which rule says so
  who RIGHT REPOSITORY           which rules give or deny it, in their order

A subject is user:NAME, cert:NAME, token:NAME, ISSUER:NAME or anonymous; a right is pull, push,
delete, teach or admin. Groups that an issuer says are given by --group.

Exit codes: 0, with can: yes; 1 no, or the file is wrong; 2 the command line makes no
sense.`,
		Example: `  foil server access can user:ann push team/app --access access.toml
  foil server access who delete team/app --access access.toml`,
	}
	rules := func() (*access.Rules, error) { return readRules(file, guard.ParseRules) }
	can := &cobra.Command{
		Use:   "can SUBJECT RIGHT REPOSITORY",
		Short: "Say whether a subject may do something",
		Args:  cobra.ExactArgs(3),
		RunE: func(cmd *cobra.Command, args []string) error {
			right, err := access.ParseRight(args[1])
			if err != nil {
				return usagef("%w", err)
			}
			r, err := rules()
			if err != nil {
				return err
			}
			return explain(cmd.OutOrStdout(), r, access.Subject{Name: args[0], Groups: groups}, right, args[2])
		},
	}
	can.Flags().StringSliceVar(&groups, "group", nil, "`ISSUER:GROUP` that the subject's issuer says it is in; may be repeated")
	who := &cobra.Command{
		Use:   "who RIGHT REPOSITORY",
		Short: "Say which rules give or deny a right",
		Args:  cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			right, err := access.ParseRight(args[0])
			if err != nil {
				return usagef("%w", err)
			}
			r, err := rules()
			if err != nil {
				return err
			}
			return printGrants(cmd.OutOrStdout(), r, right, args[1])
		},
	}
	cmd.PersistentFlags().StringVar(&file, "access", "", "`FILE` of the rules, that of foil serve --access")
	cmd.AddCommand(can, who)
	onlySubcommands(cmd)
	return cmd
}

// readRules reads something of the file of access.
func readRules[T any](file string, parse func([]byte) (T, error)) (r T, err error) {
	if file == "" {
		return r, usagef("which rules? --access names the file of foil serve")
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return r, fmt.Errorf("rules of access: %w", err)
	}
	if r, err = parse(b); err != nil {
		return r, fmt.Errorf("rules of access: %s: %w", file, err)
	}
	return r, nil
}

// explain says what is decided, and why. No is an error.
func explain(w io.Writer, r *access.Rules, s access.Subject, right access.Right, repository string) error {
	if s.Name != access.Anonymous && !strings.Contains(s.Name, ":") {
		return usagef("%q is no subject: want anonymous, user:NAME, cert:NAME, token:NAME or ISSUER:NAME", s.Name)
	}
	allowed, rule := r.Decide(s, right, repository)
	answer, why := "no", "no rule names this: what no rule allows is denied"
	if allowed {
		answer = "yes"
	}
	if rule != nil {
		why = fmt.Sprintf("rule %q decides", rule.Name)
	}
	fmt.Fprintf(w, "%s: %s\n", answer, why)
	if in := r.Groups(s); len(in) > 0 {
		slices.Sort(in)
		fmt.Fprintf(w, "%s is in %s\n", s.Name, strings.Join(in, ", "))
	}
	if !allowed {
		return &exitError{code: 1}
	}
	return nil
}

// printGrants lists rules.
func printGrants(w io.Writer, r *access.Rules, right access.Right, repository string) error {
	grants := r.Grants(right, repository)
	if len(grants) == 0 {
		_, err := fmt.Fprintf(w, "nobody: no rule names %s of %s\n", right, repository)
		return err
	}
	var rows []string
	for _, g := range grants {
		effect := "denied"
		if g.Rule.Allow {
			effect = "allowed"
		}
		members := ""
		if len(g.Members) > 0 {
			members = "(" + strings.Join(g.Members, ", ") + ")"
		}
		rows = append(rows, strings.TrimSpace(fmt.Sprintf("%s\t%s\t%s %s", effect, g.Rule.Name, strings.Join(g.To, ", "), members)))
	}
	return table(w, "ANSWER RULE WHO", rows)
}
