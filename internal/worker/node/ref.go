package node

import (
	"fmt"
	"strings"

	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/hosts"
)

// ref is a parsed image reference: which server, which repository, which tag
// or digest.
type ref struct {
	name       string // the normal form of package api
	host       string // HOST[:PORT]
	repository string
	reference  string // the digest when the reference has one, else the tag
}

func parseRef(s string) (ref, error) {
	name, err := api.NormalRef(s)
	if err != nil {
		return ref{}, err
	}
	named, err := reference.ParseNamed(name)
	if err != nil {
		return ref{}, errorf(api.CodeInvalid, "image name %q: %v", s, err)
	}
	r := ref{name: name, host: reference.Domain(named), repository: reference.Path(named)}
	if t, ok := named.(reference.Tagged); ok {
		r.reference = t.Tag()
	}
	if d, ok := named.(reference.Digested); ok {
		r.reference = d.Digest().String()
	}
	return r, nil
}

func (r ref) String() string { return r.name }

// want is what to look hosts up for.
func (n *Node) want(r ref, req api.PullRequest) hosts.Want {
	w := hosts.Want{
		Registry:   r.host,
		Repository: r.repository,
		Resolve:    digest.Digest(r.reference).Validate() != nil,
		PlainHTTP:  req.PlainHTTP,
		Credential: req.Credential,
	}
	if w.Credential.IsZero() && n.opts.Credentials != nil {
		w.Credential = n.opts.Credentials(r.host + "/" + r.repository)
	}
	return w
}

// parsePlatform reads OS/ARCH[/VARIANT]; empty is nil: the server chooses.
func parsePlatform(s string) (*ocispec.Platform, error) {
	if s == "" {
		return nil, nil
	}
	parts := strings.Split(s, "/")
	if len(parts) < 2 || len(parts) > 3 || parts[0] == "" || parts[1] == "" {
		return nil, errorf(api.CodeInvalid, "platform %q: write OS/ARCH[/VARIANT], for example linux/amd64", s)
	}
	p := &ocispec.Platform{OS: parts[0], Architecture: parts[1]}
	if len(parts) == 3 {
		p.Variant = parts[2]
	}
	if p.OS != "linux" {
		return nil, errorf(api.CodeUnsupported, "platform %q: only linux images run here", s)
	}
	return p, nil
}

func errorf(code, format string, args ...any) *api.Error {
	return &api.Error{Code: code, Message: fmt.Errorf(format, args...).Error()}
}
