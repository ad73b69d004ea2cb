// Command foil is Hydrofoil: a registry (foil serve), a worker daemon (foil
// node) and the commands that pull and run images.
//
// Each subcommand is in a file of its own and holds flags, one call and
// output. Exit codes: 0 for success, 1 for an error, 2 for a command line that
// makes no sense, 130 when it was interrupted; foil run passes on the code of its
// container.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	cobra.EnableCommandSorting = false // help lists commands as addCommands does
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// The first signal asks the command to end; the second one ends it.
	context.AfterFunc(ctx, stop)
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// newRootCommand assembles foil from its subcommands.
func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "foil",
		Short: "Run container images before they have arrived",
		Long: `foil delivers container images so that a container runs before its image
has arrived, and an update moves only what changed.

It is one program with three faces:

  a registry       any client pushes to it, unmodified images, as they are
  a worker daemon  fetches what a container reads first, and then the rest
  a command line   talks to the daemon of this machine

Exit codes: 0; 1 an error; 2 the command line makes no sense; 130 interrupted
while it waited for something. Help says where a command has others: foil run
passes on the code of its container.`,
		Example: `  # On the machine that keeps the images:
  foil serve --root /var/lib/foil-registry --listen :5000 --tls-cert cert.pem --tls-key key.pem --access access.toml
  skopeo copy docker-archive:redis.tar docker://registry.example:5000/redis:7

  # On a machine that runs them (as root):
  foil run registry.example:5000/redis:7`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Version:       version(),
	}
	root.SetVersionTemplate(versionLine() + "\n")
	addCommands(root)
	for name, others := range otherNames {
		if c, _, err := root.Find([]string{name}); err == nil {
			c.SuggestFor = others
		}
	}
	completeNoFiles(root)
	completeFlags(root)
	return root
}

// addCommands gives foil its subcommands, in the order in which help lists them.
func addCommands(root *cobra.Command) {
	const thisMachine = "This machine:"
	for _, group := range []struct {
		title    string
		commands []*cobra.Command
	}{
		{"Images and containers:", []*cobra.Command{
			newRunCommand(),
			newEachCommand(),
			newPullCommand(),
			newImagesCommand(),
			newPsCommand(),
			newDiffCommand(),
			newCommitCommand(),
			newStatusCommand(),
			newVerifyCommand(),
			newTraceCommand(),
			newStartupCommand(),
			newRmCommand(),
			newGCCommand(),
		}},
		{"Servers:", []*cobra.Command{
			newServeCommand(),
			newServerCommand(),
			newNodeCommand(),
			newKeeperCommand(),
		}},
		{thisMachine, []*cobra.Command{
			newDoctorCommand(),
			newInstallCommand(),
			newCredentialProviderCommand(),
			newConfigCommand(),
			newVersionCommand(),
		}},
	} {
		root.AddGroup(&cobra.Group{ID: group.title, Title: group.title})
		for _, c := range group.commands {
			c.GroupID = group.title
			root.AddCommand(c)
		}
	}
	root.SetHelpCommandGroupID(thisMachine)
	root.SetCompletionCommandGroupID(thisMachine)
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		switch c.Name() {
		case "help":
			helpOf(c)
		case "completion":
			onlySubcommands(c)
		}
	}
}

// otherNames is what other programs of this kind call a command.
var otherNames = map[string][]string{
	"images": {"ls", "list", "image"}, "ps": {"containers", "container", "ls", "list"},
	"rm": {"rmi", "remove", "delete", "stop", "kill"}, "run": {"start", "exec", "create"}, "pull": {"fetch", "get"},
	"gc": {"prune", "clean", "cleanup", "df"}, "status": {"info", "stats", "top"}, "verify": {"check", "fsck"},
	"serve": {"registry"}, "node": {"daemon", "worker", "agent", "snapshotter"}, "doctor": {"diagnose"},
}

// completeFlags has the shell offer the values of flags that have a few.
func completeFlags(root *cobra.Command) {
	level, events := []string{"debug", "info", "warn", "error"}, []string{"ready", "complete"}
	for flag, values := range map[string][]string{
		"run until": events, "pull until": {"mounted", "complete"}, "run pull": {"missing", "always", "never"},
		"run net": {"host", "none"}, "each net": {"host", "none"}, "trace net": {"host", "none"}, "run probe": probes, "trace probe": probes,
		"node gate": {"auto", "fanotify", "fuse", "loop"}, "node startup": {"on", "off"}, "node report": {"on", "off"},
		"node log-format": {"text", "json"}, "node log-level": level, "serve log-level": level,
		"serve upstream-credentials": {credsOwn, credsClient},
		"serve congestion":           {"bbr", "cubic", "system"},
	} {
		name, flag, _ := strings.Cut(flag, " ")
		if c, _, err := root.Find([]string{name}); err == nil {
			// An error would say that there is no such flag: a test would.
			_ = c.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
		}
	}
}

// probes are how the values of --probe begin.
var probes = []string{"exit", "stdout:", "tcp:", "http:", "exec:"}

// helpOf has foil help fail for what there is not.
func helpOf(c *cobra.Command) {
	inner := c.Run
	c.Run, c.RunE = nil, func(cmd *cobra.Command, args []string) error {
		topic, rest, err := cmd.Root().Find(args)
		if err != nil {
			return &usageError{err}
		}
		if len(rest) > 0 {
			return usagef("%w", unknownCommand(topic, rest[0]))
		}
		inner(cmd, args)
		return nil
	}
}

// onlySubcommands has a command that does nothing itself show its help, also for the
// argument help, and fail for what is none of its subcommands.
func onlySubcommands(c *cobra.Command) {
	c.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 || args[0] == "help" {
			return nil
		}
		return unknownCommand(cmd, args[0])
	}
	c.Run, c.RunE = nil, func(cmd *cobra.Command, args []string) error {
		if len(args) > 1 {
			if sub, rest, err := cmd.Find(args[1:]); err == nil && len(rest) == 0 {
				cmd = sub
			}
		}
		return cmd.Help()
	}
}

// unknownCommand says what there is instead.
func unknownCommand(cmd *cobra.Command, name string) error {
	hint := ""
	if cmd.SuggestionsMinimumDistance <= 0 {
		cmd.SuggestionsMinimumDistance = 2
	}
	if like := cmd.SuggestionsFor(name); len(like) > 0 {
		hint = "\n\nDid you mean this?\n\t" + strings.Join(like, "\n\t") + "\n"
	}
	return fmt.Errorf("unknown command %q for %q%s", name, cmd.CommandPath(), hint)
}

// completeNoFiles keeps the shell from offering files where no command takes one.
func completeNoFiles(c *cobra.Command) {
	if c.ValidArgsFunction == nil && len(c.ValidArgs) == 0 && !c.HasSubCommands() {
		c.ValidArgsFunction = cobra.NoFileCompletions
	}
	for _, sub := range c.Commands() {
		completeNoFiles(sub)
	}
}

// run executes one command line and returns the exit code.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := newRootCommand()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)

	// Whatever fails before a command's own code runs is the command line's
	// fault: an unknown command or flag, a missing argument.
	started := false
	onRun(root, func() { started = true })
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return 0
	}
	var exit *exitError
	if errors.As(err, &exit) {
		if exit.err != nil {
			fmt.Fprintf(stderr, "foil: %v\n", exit.err)
		}
		return exit.code
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		fmt.Fprintln(stderr, "foil: interrupted")
		return 130
	}
	fmt.Fprintf(stderr, "foil: %v\n", err)
	var usage *usageError
	if !started || errors.As(err, &usage) {
		fmt.Fprintf(stderr, "Run '%s --help' for what it takes.\n", cmd.CommandPath())
		return 2
	}
	return 1
}

// onRun makes every command below c call fn before its own RunE.
func onRun(c *cobra.Command, fn func()) {
	if inner := c.RunE; inner != nil {
		c.RunE = func(cmd *cobra.Command, args []string) error {
			fn()
			return inner(cmd, args)
		}
	}
	for _, sub := range c.Commands() {
		onRun(sub, fn)
	}
}

// usageError is a mistake in the command line that only the command itself can
// see; it ends foil with code 2.
type usageError struct{ err error }

func usagef(format string, args ...any) error {
	return &usageError{fmt.Errorf(format, args...)}
}

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

// exitError ends foil with a code of the command's choice. Without an error
// nothing is printed: the code is another program's, which has spoken for
// itself.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit with code %d", e.code)
	}
	return e.err.Error()
}
func (e *exitError) Unwrap() error { return e.err }
