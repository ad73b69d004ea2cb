package main

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/server/rootdir"
	"hydrofoil.dev/foil/internal/server/webhooks"
)

func newServerWebhooksCommand() *cobra.Command {
	var file, root string
	var asJSON bool
	read := func() (*webhooks.Config, error) {
		if file == "" {
			return nil, usagef("which webhooks? --webhooks names the file of foil serve")
		}
		return webhooks.Read(file)
	}
	cmd := &cobra.Command{
		Use:   "webhooks",
		Short: "List webhooks, and how it stands with each",
		Long: `Lists the webhooks of foil serve --webhooks: what waits, what was delivered and
dropped, and what went wrong last. The server may run.

  idle      nothing waits
  waiting   events wait for their turn, or for the server to be started
  failing   the last request failed: events wait for the next try

docs/webhooks.md says what is in the file, and what receivers get.

Exit codes: 0; 1 the file is wrong, or the queue cannot be read; 2 the command line makes no
sense.`,
		Example: `  foil server webhooks --webhooks /etc/foil/webhooks.toml --root /var/lib/foil-registry
  foil server webhooks --webhooks /etc/foil/webhooks.toml --json | jq -r 'select(.state == "failing") | .last_error'
  foil server webhooks test deploy --webhooks /etc/foil/webhooks.toml`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := read()
			if err != nil {
				return err
			}
			all, err := webhooks.States(cmd.Context(), c, rootdir.Webhooks(root))
			if err != nil {
				return err
			}
			return printWebhooks(cmd.OutOrStdout(), all, asJSON)
		},
	}
	test := &cobra.Command{
		Use:   "test NAME|URL",
		Short: "Send an event to a webhook, now",
		Long: `Sends one event of type dev.hydrofoil.test.v1 to a webhook of the file, with its header and
signature, or to any other URL. It goes past the queue, and is not tried again.

Exit codes: 0 the receiver took it; 1 it did not, or the file is wrong; 2 the command line makes no sense.`,
		Example: `  foil server webhooks test deploy --webhooks /etc/foil/webhooks.toml
  foil server webhooks test https://receiver.example/hook --webhooks /etc/foil/webhooks.toml`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := read()
			if err != nil {
				return err
			}
			took, err := webhooks.Test(cmd.Context(), c, args[0])
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "delivered in %v\n", took.Round(time.Millisecond))
			return err
		},
	}
	cmd.PersistentFlags().StringVar(&file, "webhooks", "", "`FILE` of the webhooks, that of foil serve --webhooks")
	cmd.Flags().StringVar(&root, "root", "/var/lib/foil-registry", "`DIR` of foil serve --root")
	jsonFlag(cmd, &asJSON)
	cmd.AddCommand(test)
	return cmd
}

func printWebhooks(w io.Writer, all []webhooks.State, asJSON bool) error {
	var rows []string
	for _, s := range all {
		if asJSON {
			if err := printJSON(w, s); err != nil {
				return err
			}
			continue
		}
		last := s.LastError
		if last != "" {
			last = localTime(s.ErrorAt) + ": " + last
		}
		rows = append(rows, fmt.Sprintf("%s\t%s\t%s\t%s\t%d\t%d\t%d\t%s", s.Name, s.URL, strings.Join(s.Events, ","), s.State, s.Waiting, s.Delivered, s.Dropped, last))
	}
	if asJSON {
		return nil
	}
	return table(w, "WEBHOOK URL EVENTS STATE WAITING DELIVERED DROPPED ERROR", rows)
}
