package webhooks

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/login"
)

// Config is the file.
type Config struct {
	// Source is what events say they are from: a URI. Empty means //HOSTNAME.
	Source string `toml:"source"`
	// PullEvery is for how long more pulls of an image by a subject are no event; 0 means 10 minutes.
	PullEvery login.Duration `toml:"pull-every"`
	Webhooks  []*Webhook     `toml:"webhook"`
}

// Webhook is one receiver.
type Webhook struct {
	Name         string   `toml:"name"`
	URL          string   `toml:"url"`
	Events       []string `toml:"events"`
	Repositories []string `toml:"repositories"`
	// HeaderFile has one line, "Authorization: ...", that requests have as a header.
	HeaderFile string `toml:"header-file"`
	// SecretFile has what requests are signed with (sign).
	SecretFile string `toml:"secret-file"`
	CA         string `toml:"ca"` // file with certificates that are trusted besides the system's
	// Timeout bounds a request; 0 means 10 s.
	Timeout login.Duration `toml:"timeout"`
	// GiveUp is how old an event may become; 0 means a day.
	GiveUp login.Duration `toml:"give-up"`

	patterns []access.Pattern
}

// maxWebhooks bounds the receivers.
const maxWebhooks = 64

// Read reads a configuration.
func Read(file string) (*Config, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("webhooks: %w", err)
	}
	c, err := parse(b)
	if err != nil {
		return nil, fmt.Errorf("webhooks: %s: %w", file, err)
	}
	return c, nil
}

// parse reads a configuration, strictly.
func parse(b []byte) (*Config, error) {
	c := new(Config)
	d := toml.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(c); err != nil {
		if unknown, ok := errors.AsType[*toml.StrictMissingError](err); ok && len(unknown.Errors) > 0 {
			line, _ := unknown.Errors[0].Position()
			return nil, fmt.Errorf("line %d: there is no setting %s: docs/webhooks.md has those there are", line, strings.Join(unknown.Errors[0].Key(), "."))
		}
		return nil, err
	}
	if _, err := url.Parse(c.Source); err != nil {
		return nil, errors.New("source is no URI")
	}
	if c.PullEvery == 0 {
		c.PullEvery = login.Duration(10 * time.Minute)
	}
	if len(c.Webhooks) > maxWebhooks {
		return nil, fmt.Errorf("%d webhooks, at most %d", len(c.Webhooks), maxWebhooks)
	}
	names := map[string]bool{}
	for n, h := range c.Webhooks {
		err := h.check()
		if err == nil && names[h.Name] {
			err = errors.New("the name is taken")
		}
		if err != nil {
			return nil, fmt.Errorf("webhook %d %q: %w", n+1, h.Name, err)
		}
		names[h.Name] = true
	}
	return c, nil
}

func (h *Webhook) check() error {
	if h.Name == "" || strings.ContainsAny(h.Name, " \t\n/") {
		return errors.New("it wants a name, without spaces and slashes")
	}
	u, err := url.Parse(h.URL)
	if err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http" {
		return errors.New("its url is to be https://HOST/PATH, or http://")
	}
	if u.User != nil {
		return errors.New("its url has credentials, which others can see: use header-file")
	}
	if h.HeaderFile != "" && u.Scheme == "http" && !loopback(u.Hostname()) {
		return errors.New("header-file wants an https:// url: everybody on the way would see the header. secret-file does not")
	}
	if len(h.Events) == 0 {
		return errors.New(`it wants events = ["push", "pull", "delete"], or some of them`)
	}
	for _, e := range h.Events {
		if e != Push && e != Pull && e != Delete {
			return fmt.Errorf("%q is no event: there are push, pull and delete", e)
		}
	}
	if len(h.Repositories) == 0 {
		return errors.New(`it wants repositories, such as ["team/**"]; ["**"] are all`)
	}
	for _, s := range h.Repositories {
		p, err := access.ParsePattern(s)
		if err != nil {
			return err
		}
		h.patterns = append(h.patterns, p)
	}
	if h.Timeout == 0 {
		h.Timeout = login.Duration(10 * time.Second)
	}
	if h.GiveUp == 0 {
		h.GiveUp = login.Duration(24 * time.Hour)
	}
	// What is wrong with them is told at once, and not by the first event.
	if _, _, err := h.header(); err != nil {
		return err
	}
	_, err = h.secret()
	return err
}

func loopback(host string) bool {
	a, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && a.Unmap().IsLoopback()
}

func (h *Webhook) wants(kind, repository string) bool {
	return slices.Contains(h.Events, kind) && slices.ContainsFunc(h.patterns, func(p access.Pattern) bool { return p.Match(repository) })
}

// Where is the URL without what may be a secret in it.
func (h *Webhook) Where() string { return where(h.URL) }

func where(s string) string {
	u, err := url.Parse(s)
	if err != nil {
		return "?"
	}
	if u.User, u.Fragment = nil, ""; u.RawQuery != "" {
		u.RawQuery = "..."
	}
	return u.String()
}

// header is the one of HeaderFile, as it is now; empty: there is none.
func (h *Webhook) header() (name, value string, err error) {
	if h.HeaderFile == "" {
		return "", "", nil
	}
	b, err := os.ReadFile(h.HeaderFile)
	if err != nil {
		return "", "", fmt.Errorf("header-file: %w", err)
	}
	name, value, ok := strings.Cut(strings.TrimSpace(string(b)), ":")
	value = strings.TrimSpace(value)
	if !ok || name == "" || value == "" || strings.ContainsAny(name, " \t\r\n") || strings.ContainsAny(value, "\r\n") {
		return "", "", fmt.Errorf("header-file: %s: want one line, as Authorization: Bearer ...", h.HeaderFile)
	}
	return name, value, nil
}

// secret is that of SecretFile, as it is now; nil: there is none. whsec_ and base64, as the Standard Webhooks have it,
// or else the line itself.
func (h *Webhook) secret() ([]byte, error) {
	if h.SecretFile == "" {
		return nil, nil
	}
	b, err := os.ReadFile(h.SecretFile)
	if err != nil {
		return nil, fmt.Errorf("secret-file: %w", err)
	}
	s := strings.TrimSpace(string(b))
	key := []byte(s)
	if encoded, ok := strings.CutPrefix(s, "whsec_"); ok {
		if key, err = base64.StdEncoding.DecodeString(encoded); err != nil {
			return nil, fmt.Errorf("secret-file: %s: what follows whsec_ is no base64", h.SecretFile)
		}
	}
	if len(key) < 16 {
		return nil, fmt.Errorf("secret-file: %s: want at least 16 bytes: openssl rand -hex 32 makes some", h.SecretFile)
	}
	return key, nil
}

func (c *Config) find(name string) *Webhook {
	for _, h := range c.Webhooks {
		if h.Name == name {
			return h
		}
	}
	return nil
}

func (c *Config) names() (all []string) {
	for _, h := range c.Webhooks {
		all = append(all, h.Name)
	}
	return all
}

func (c *Config) wants(kind, repository string) bool {
	return slices.ContainsFunc(c.Webhooks, func(h *Webhook) bool { return h.wants(kind, repository) })
}
