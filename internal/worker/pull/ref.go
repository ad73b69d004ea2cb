package pull

import (
	"strings"

	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/oci"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/hosts"
)

// Ref is a parsed image reference: which server, which repository, which tag
// or digest.
type Ref struct {
	Name       string // the normal form of package api
	Host       string // HOST[:PORT]
	Repository string
	Reference  string // the digest when the reference has one, else the tag
}

// ParseRef parses a reference. Its error is api.CodeInvalid.
func ParseRef(s string) (Ref, error) {
	name, err := api.NormalRef(s)
	if err != nil {
		return Ref{}, err
	}
	named, err := reference.ParseNamed(name)
	if err != nil {
		return Ref{}, api.Errorf(api.CodeInvalid, "image name %q: %v", s, err)
	}
	r := Ref{Name: name, Host: reference.Domain(named), Repository: reference.Path(named)}
	if t, ok := named.(reference.Tagged); ok {
		r.Reference = t.Tag()
	}
	if d, ok := named.(reference.Digested); ok {
		r.Reference = d.Digest().String()
	}
	return r, nil
}

func (r Ref) String() string { return r.Name }

// Want is what to look hosts up for.
func (s *Puller) Want(r Ref, req api.PullRequest) hosts.Want {
	w := hosts.Want{
		Registry:   r.Host,
		Repository: r.Repository,
		Resolve:    digest.Digest(r.Reference).Validate() != nil,
		PlainHTTP:  req.PlainHTTP,
		Credential: req.Credential,
	}
	if w.Credential.IsZero() && s.opts.Credentials != nil {
		w.Credential = s.opts.Credentials(r.Host + "/" + r.Repository)
	}
	return w
}

// parsePlatform reads OS/ARCH[/VARIANT]; empty is that of this machine.
func parsePlatform(s string) (*ocispec.Platform, error) {
	if s == "" {
		own := oci.Own()
		return &own, nil
	}
	parts := strings.Split(s, "/")
	if len(parts) < 2 || len(parts) > 3 || parts[0] == "" || parts[1] == "" {
		return nil, api.Errorf(api.CodeInvalid, "platform %q: write OS/ARCH[/VARIANT], for example linux/amd64", s)
	}
	p := &ocispec.Platform{OS: parts[0], Architecture: parts[1]}
	if len(parts) == 3 {
		p.Variant = parts[2]
	}
	if p.OS != "linux" {
		return nil, api.Errorf(api.CodeUnsupported, "platform %q: only linux images run here", s)
	}
	return p, nil
}
