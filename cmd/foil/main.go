// Command foil is Hydrofoil: a registry (foil serve), a worker daemon (foil
// node) and the commands that pull and run images.
//
// Each subcommand is in a file of its own and holds flags, one call and
// output. Exit codes: 0 for success, 1 for an error, 2 for a command line that
// makes no sense; foil run passes on the code of its container.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	cobra.EnableCommandSorting = false // help lists commands as newRootCommand does
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
  a command line   talks to the daemon of this machine`,
		Example: `  # On the machine that keeps the images:
  foil serve --root /var/lib/foil-registry --listen :5000
  skopeo copy docker-archive:redis.tar docker://registry.example:5000/redis:7

  # On a machine that runs them (as root):
  foil run registry.example:5000/redis:7`,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	const thisMachine = "This machine:"
	for _, group := range []struct {
		title    string
		commands []*cobra.Command
	}{
		{"Images and containers:", []*cobra.Command{
			newRunCommand(),
			newPullCommand(),
			newImagesCommand(),
			newPsCommand(),
			newStatusCommand(),
			newVerifyCommand(),
			newTraceCommand(),
			newStartupCommand(),
			newRmCommand(),
			newGCCommand(),
		}},
		{"Servers:", []*cobra.Command{
			newServeCommand(),
			newNodeCommand(),
			newKeeperCommand(),
		}},
		{thisMachine, []*cobra.Command{
			newDoctorCommand(),
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
	return root
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
