package api

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// unitOf is the transient unit of the daemon of a root.
func unitOf(root string) string {
	sum := sha256.Sum256([]byte(root))
	return fmt.Sprintf("foil-node-%x.service", sum[:6])
}

// unitProperties are those of deploy/systemd, which says why; but a daemon that is told to end does not come
// back, since nobody has enabled it.
var unitProperties = []string{
	"Description=Hydrofoil worker daemon, started by a command",
	"NotifyAccess=main",
	"Restart=on-failure", "RestartSec=200ms", "StartLimitIntervalSec=60", "StartLimitBurst=20",
	"KillMode=process", "SendSIGKILL=no",
	"OOMPolicy=continue", "OOMScoreAdjust=-999",
	"FileDescriptorStoreMax=16384", "Environment=FDSTORE=16384",
	"LimitNOFILE=1048576", "TasksMax=infinity",
	"TimeoutStartSec=10min", "TimeoutStopSec=1min",
}

// unitEnvironment is what the daemon gets of the command's environment.
var unitEnvironment = []string{
	"PATH", "HOME", "DOCKER_CONFIG", "GOGC", "GOMEMLIMIT",
	"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR",
}

// startUnit starts the daemon of a root as a transient unit, by the program systemd-run, and waits until it is ready:
// systemd keeps what its keeper keeps, and starts it again when it is killed. When that fails no unit is left.
func startUnit(ctx context.Context, run, root string, command []string) error {
	unit := unitOf(root)
	args := []string{"--quiet", "--collect", "--unit=" + unit, "--service-type=notify"}
	for _, p := range unitProperties {
		args = append(args, "--property="+p)
	}
	for _, stream := range []string{"StandardOutput", "StandardError"} {
		args = append(args, "--property="+stream+"=append:"+LogPath(root))
	}
	for _, name := range unitEnvironment {
		if _, ok := os.LookupEnv(name); ok {
			args = append(args, "--setenv="+name) // with the value that it has here
		}
	}
	cmd := exec.CommandContext(ctx, run, append(append(args, "--"), command...)...)
	cmd.Dir = "/"
	out, err := cmd.CombinedOutput()
	if err == nil {
		return nil
	}
	if bytes.Contains(out, []byte("already")) {
		return nil // it has ended, and systemd is about to start it again
	}
	// It may be trying again.
	_ = exec.Command(filepath.Join(filepath.Dir(run), "systemctl"), "stop", "--quiet", unit).Run()
	if said := bytes.TrimSpace(out); len(said) > 0 {
		err = errors.New(string(said))
	}
	return fmt.Errorf("start %s: %w", unit, err)
}
