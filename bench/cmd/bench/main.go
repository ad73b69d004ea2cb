// Bench measures Hydrofoil on this machine: over emulated links, with images
// built from Debian packages.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	root := &cobra.Command{
		Use:           "bench",
		Short:         "Measure Hydrofoil over emulated links",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(linkCommand(), imagesCommand(), demoCommand(), runCommand(), reportCommand(), compareCommand(), serverCommand(), runningCommand(), operationCommand(), startupCommand())
	err := root.ExecuteContext(ctx)
	stop()
	var exit *exec.ExitError
	switch {
	case err == nil:
	case errors.As(err, &exit) && exit.ExitCode() > 0 && err.Error() == exit.Error():
		os.Exit(exit.ExitCode()) // nothing but that a command failed, which has said why
	default:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}
