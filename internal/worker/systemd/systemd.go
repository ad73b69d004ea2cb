// Package systemd tells the service manager how a service is doing, and has it
// keep descriptors, by its notification protocol (sd_notify(3)): a datagram of lines VARIABLE=VALUE to the
// Unix socket that NOTIFY_SOCKET names. A name that begins with '@' is in the
// abstract namespace.
package systemd

import (
	"fmt"
	"os"
	"strings"
)

// States that a service tells.
const (
	Ready    = "READY=1"
	Stopping = "STOPPING=1"
)

// Notify sends lines to the manager. Without one (NOTIFY_SOCKET is not set) it
// does nothing.
func Notify(lines ...string) error {
	if os.Getenv("NOTIFY_SOCKET") == "" {
		return nil
	}
	if err := send([]byte(strings.Join(lines, "\n"))); err != nil {
		return fmt.Errorf("tell the service manager: %w", err)
	}
	return nil
}

// address is the manager's.
func address() (string, error) {
	path := os.Getenv("NOTIFY_SOCKET")
	if !strings.HasPrefix(path, "/") && !strings.HasPrefix(path, "@") {
		return "", fmt.Errorf("NOTIFY_SOCKET is %q: neither a path nor an abstract name", path)
	}
	return path, nil
}

// Status is a line for people: systemctl status shows it.
func Status(format string, args ...any) string {
	return "STATUS=" + strings.ReplaceAll(fmt.Sprintf(format, args...), "\n", " ")
}
