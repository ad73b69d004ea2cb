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
	"path/filepath"
	"strings"
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
	root.AddCommand(linkCommand(), imagesCommand(), demoCommand(), runCommand(), reportCommand(), compareCommand(), serverCommand(), runningCommand(),
		operationCommand(), neighbourCommand(), startupCommand(), contactCommand(), manyCommand(), podsCommand(), proofsCommand(), accessCommand(), attacksCommand(), attackersCommand())
	err := root.ExecuteContext(ctx)
	stop()
	var exit *exec.ExitError
	switch {
	case err == nil:
	case errors.As(err, &exit) && exit.ExitCode() > 0 && err.Error() == exit.Error():
		os.Exit(exit.ExitCode()) // nothing but that a command failed, which has said why
	default:
		fmt.Fprintln(os.Stderr, "bench:", strings.TrimPrefix(err.Error(), "bench: "))
		os.Exit(1)
	}
}

// here is where a file of the source tree is: of that which this program was built
// into the directory bin of, or, as with go run, that which holds this directory.
func here(path string) string {
	if self, err := os.Executable(); err == nil && filepath.Base(filepath.Dir(self)) == "bin" {
		if root := filepath.Dir(filepath.Dir(self)); exists(filepath.Join(root, "bench", "go.mod")) {
			return filepath.Join(root, path)
		}
	}
	return filepath.Join("..", path)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
