// Package credentials holds what a worker shows to registries that demand it:
// names and secrets from Docker's configuration, from the command line, and from
// a kubelet. They are never printed, logged or written to disk.
package credentials

import (
	"errors"
	"fmt"
	"net/url"
	"strings"

	"github.com/distribution/reference"
)

// Credential is what one registry is shown. The zero value is none.
type Credential struct {
	// Username and Secret are a name and a password; without a name Secret is an
	// identity token, which a token server takes in their place.
	Username string `json:"username,omitempty"`
	Secret   string `json:"secret,omitempty"`
	// Token is what the registry itself takes, as it is.
	Token string `json:"token,omitempty"`
	// Host is the HOST[:PORT] that it is for; empty: every host that is
	// configured to answer for the registry of the image.
	Host string `json:"host,omitempty"`
}

// IsZero reports whether c is none.
func (c Credential) IsZero() bool { return c.Username == "" && c.Secret == "" && c.Token == "" }

// Format keeps a credential out of whatever is printed or logged.
func (c Credential) Format(f fmt.State, _ rune) { fmt.Fprint(f, "(hidden)") }

// For returns c if it is for a host, else none.
func (c Credential) For(host string) Credential {
	if c.Host != "" && c.Host != host {
		return Credential{}
	}
	return c
}

// Parse reads USER:PASSWORD.
func Parse(s string) (Credential, error) {
	user, password, ok := strings.Cut(s, ":")
	if !ok || user == "" || password == "" {
		return Credential{}, errors.New("credentials: write USER:PASSWORD")
	}
	return Credential{Username: user, Secret: password}, nil
}

// HostOf returns the host of a server's address, which may be a URL. One
// registry's address for logins is not the host of its API; Docker's tools know
// it by heart.
func HostOf(address string) (string, error) {
	if !strings.Contains(address, "://") {
		address = "https://" + address
	}
	u, err := url.Parse(address)
	if err != nil {
		return "", errors.New("credentials: the server's address is no URL") // which may hold a secret
	}
	// The registry of names without a host.
	named, err := reference.ParseNormalizedNamed("name")
	if err != nil {
		return "", err
	}
	if hub := reference.Domain(named); u.Host == hub || u.Host == "index."+hub {
		return "registry-1." + hub, nil
	}
	return u.Host, nil
}
