// Package deploy has what hosts are set up with, as foil install writes it.
package deploy

import _ "embed"

// Unit is the systemd unit of the daemon.
//
//go:embed systemd/foil-node.service
var Unit string

// Containerd2 is what containerd 2.x's configuration is to have.
//
//go:embed containerd/containerd-2.toml
var Containerd2 string
