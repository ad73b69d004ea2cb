// Package systemd tells the service manager how a service is doing, by its
// notification protocol (sd_notify(3)): a datagram of lines VARIABLE=VALUE to the
// Unix socket that NOTIFY_SOCKET names. A name that begins with '@' is in the
// abstract namespace.
package systemd

import (
	"errors"
	"fmt"
	"net"
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
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}
	if !strings.HasPrefix(path, "/") && !strings.HasPrefix(path, "@") {
		return fmt.Errorf("tell the service manager: NOTIFY_SOCKET is %q: neither a path nor an abstract name", path)
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("tell the service manager: %w", err)
	}
	_, err = c.Write([]byte(strings.Join(lines, "\n")))
	if err := errors.Join(err, c.Close()); err != nil {
		return fmt.Errorf("tell the service manager: %w", err)
	}
	return nil
}

// Status is a line for people: systemctl status shows it.
func Status(format string, args ...any) string {
	return "STATUS=" + strings.ReplaceAll(fmt.Sprintf(format, args...), "\n", " ")
}
