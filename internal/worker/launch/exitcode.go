package launch

import (
	"errors"
	"strings"
)

// What a command line says when there is no exit code of a container to pass
// on, as Docker and the shells have it.
const (
	ExitFailed      = 125 // foil, the daemon or runc failed
	ExitNoExec      = 126 // the command is there and cannot be executed
	ExitNoCommand   = 127 // there is no such command
	ExitInterrupted = 130 // 128 + SIGINT
)

// ExitCode is the code for an error of Run.
func ExitCode(err error) int {
	if errors.Is(err, ErrInterrupted) {
		return ExitInterrupted
	}
	if _, ok := errors.AsType[*NotStartedError](err); !ok {
		return ExitFailed
	}
	// runc gives the cause of a failed start as text alone.
	_, why, isExec := strings.Cut(err.Error(), "unable to start container process: exec: ")
	switch {
	case !isExec:
		return ExitFailed
	case strings.Contains(why, "executable file not found"), strings.Contains(why, "no such file or directory"):
		return ExitNoCommand
	default:
		return ExitNoExec
	}
}
