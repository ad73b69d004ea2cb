package runner

import (
	"io"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// Network says which network a container sees.
type Network string

const (
	// HostNetwork is the network namespace of the caller, whichever that is.
	// It is what the empty Network means.
	HostNetwork Network = "host"
	// NoNetwork is a new network namespace with a loopback interface only.
	NoNetwork Network = "none"
)

// SpecOptions is what the user of one container asks for on top of its image's
// config. The zero value of every field but Dir and Rootfs means "as the image
// says".
type SpecOptions struct {
	// ID names the container: its cgroup, and its host name when Hostname is
	// empty and the network is not the host's.
	ID string
	// Dir is the OCI bundle directory: resolv.conf, hosts and hostname are
	// written there.
	Dir string
	// Rootfs is the absolute path of the mounted, writable root directory.
	Rootfs string

	// Entrypoint replaces the image's entrypoint, and drops its Cmd, unless nil.
	Entrypoint []string
	// Args replaces the image's Cmd unless nil.
	Args []string
	// Env has entries KEY=VALUE, over those of the image; a bare KEY takes the
	// caller's value, and is left out when the caller has none.
	Env []string
	// Net defaults to HostNetwork.
	Net Network
	// Hostname defaults to the caller's for HostNetwork, else to the ID.
	Hostname string
	// TTY gives the container a terminal of its own.
	TTY bool
	// User replaces the image's user: name or UID, optionally ":" and group
	// name or GID.
	User string
	// Cwd replaces the image's working directory.
	Cwd string
	// Mounts are added after the default ones.
	Mounts []specs.Mount
}

// IO is where the streams of a container's first process lead. An *os.File
// is handed over as it is; anything else is copied by a goroutine that ends with
// the container (the one that reads from Stdin ends with its next Read). Nil
// is /dev/null.
type IO struct {
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
	// TTY says that the container has a terminal of its own, as its
	// SpecOptions said. Stderr is unused then; when Stdin is a terminal it is
	// in raw mode until the container ends, and its window size is followed.
	TTY bool
}

// State is what runc knows of a container.
type State struct {
	ID      string    `json:"id"`
	PID     int       `json:"pid"`    // of its first process, in the caller's namespace; 0 when stopped
	Status  string    `json:"status"` // created, running, paused or stopped
	Bundle  string    `json:"bundle"`
	Created time.Time `json:"created"`
}
