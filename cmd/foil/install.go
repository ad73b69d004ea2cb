package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/worker/install"
)

// exitInUse is the exit code of an undo that is not done yet.
const exitInUse = 3

func newInstallCommand() *cobra.Command {
	var f installFlags
	cmd := &cobra.Command{
		Use:   "install [flags]",
		Short: "Set this host up for containerd and Kubernetes, or undo that",
		Long: `install makes a host with systemd and containerd 2.x a worker: it puts this program
at /usr/local/bin/foil, starts the daemon as the unit foil-node.service, and has
containerd use it for all pods, by /etc/containerd/conf.d/foil.toml and one import
in /etc/containerd/config.toml, the rest of which stays as it is. containerd is
restarted when that is news, after it was asked what it makes of it; containers go
on. Files that somebody else has written are left alone, with an error. Called
again, it changes what is of another version, and nothing else.

In a pod of Kubernetes (deploy/kubernetes) --enter 1 does all that on the host, and
--stay keeps the pod.

--undo takes all of it away. Containers that were made with Hydrofoil need it until
they have ended. While there are any, only new ones are made without it, and the
exit code is 3: drain the node, then undo again.

Exit codes: 0; 1 an error, what was done for containerd is taken back; 3 see --undo.`,
		Example: `  sudo foil install
  sudo foil install --settings foil.toml
  sudo foil install --undo`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd) },
	}
	flags := cmd.Flags()
	flags.StringVar(&f.settings, "settings", "", "`FILE` to copy to /etc/foil/foil.toml, the daemon's settings")
	flags.IntVar(&f.enter, "enter", 0, "do it where process `PID` has its mounts: 1, from a privileged container with the host's processes")
	flags.BoolVar(&f.undo, "undo", false, "take away what an install has made")
	flags.BoolVar(&f.check, "check", false, "change nothing, only say whether the daemon answers")
	flags.BoolVar(&f.stay, "stay", false, "when it is done, wait to be told to end")
	cmd.MarkFlagsMutuallyExclusive("undo", "check")
	cmd.MarkFlagsMutuallyExclusive("stay", "check")
	return cmd
}

type installFlags struct {
	settings          string
	enter             int
	undo, check, stay bool
}

func (f *installFlags) run(cmd *cobra.Command) error {
	if err := needRoot(os.Geteuid(), "foil install"); err != nil {
		return err
	}
	if f.enter != 0 {
		return f.again(cmd.Context())
	}
	ctx := cmd.Context()
	o := install.Options{Log: slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))}
	if f.check {
		return install.Check(ctx)
	}
	do, done := f.install, "this host is set up"
	if f.undo {
		do, done = install.Undo, "what install has made is gone from this host"
	}
	if err := do(ctx, o); errors.Is(err, install.ErrInUse) {
		return &exitError{code: exitInUse, err: err}
	} else if err != nil {
		return err
	}
	o.Log.Info(done)
	if f.stay {
		<-ctx.Done()
	}
	return nil
}

func (f *installFlags) install(ctx context.Context, o install.Options) (err error) {
	if f.settings != "" {
		if o.Settings, err = os.ReadFile(f.settings); err != nil {
			return err
		}
	}
	if o.Program, err = os.ReadFile("/proc/self/exe"); err != nil {
		return err
	}
	return install.Install(ctx, o)
}

// again runs foil with the mounts of another process.
func (f *installFlags) again(ctx context.Context) error {
	args := []string{"install"}
	for flag, on := range map[string]bool{"--undo": f.undo, "--check": f.check, "--stay": f.stay} {
		if on {
			args = append(args, flag)
		}
	}
	err := install.Enter(ctx, f.enter, args, f.settings)
	if e, ok := errors.AsType[*exec.ExitError](err); ok && e.ExitCode() > 0 {
		return &exitError{code: e.ExitCode()} // it has said why
	}
	return err
}
