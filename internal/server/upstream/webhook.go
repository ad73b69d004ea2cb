package upstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/registry"
)

// WebhookPath is where the upstream tells of pushes: envelopes of events, as
// the distribution program and others send them.
const WebhookPath = "/hydrofoil/v1/notifications"

// Pushed is one manifest that was pushed to the upstream.
type Pushed struct {
	Repository string // its name here
	Tag        string // empty: pushed by digest
	Digest     digest.Digest
}

// maxEnvelope bounds the body of a notification.
const maxEnvelope = 4 << 20

// envelope is what a notification holds, as far as it is read.
type envelope struct {
	Events []struct {
		Action string `json:"action"`
		Target struct {
			MediaType  string        `json:"mediaType"`
			Digest     digest.Digest `json:"digest"`
			Repository string        `json:"repository"`
			Tag        string        `json:"tag"`
		} `json:"target"`
	} `json:"events"`
}

// Webhook answers notifications: it calls pushed for each manifest that was
// pushed, which returns false if it cannot take more now: then the upstream is
// asked to tell it again. Nothing is believed but that something may be worth
// fetching, which whoever can send a notification could have by a pull. may is asked for each
// of them first; its error, which refuses the whole envelope, is told by refuse.
func (a *Accelerator) Webhook(pushed func(Pushed) bool, may func(context.Context, Pushed) error, refuse func(http.ResponseWriter, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		b, err := io.ReadAll(http.MaxBytesReader(w, req.Body, maxEnvelope))
		var all []Pushed
		if err == nil {
			all, err = a.parseEnvelope(b)
		}
		if err != nil {
			http.Error(w, fmt.Sprintf("want an envelope of events, in JSON: %v", err), http.StatusBadRequest)
			return
		}
		for _, p := range all {
			if err := may(req.Context(), p); err != nil {
				refuse(w, err)
				return
			}
		}
		for _, p := range all {
			if !pushed(p) {
				http.Error(w, "too many images are waiting to be ingested: send it again later", http.StatusServiceUnavailable)
				return
			}
		}
		w.WriteHeader(http.StatusAccepted)
	})
}

// Follow looks up a tag that names d now, as a notification said. The
// distribution program sends those of a push before it has stored the tag, so the
// upstream is asked again a few times while it names another manifest.
func (a *Accelerator) Follow(ctx context.Context, repo, tag string, d digest.Digest) error {
	for n := 1; ; n++ {
		v, err := a.share(ctx, &a.tags, repo+":"+tag, true, func(ctx context.Context) (any, error) {
			return a.check(ctx, repo, tag)
		})
		e, ok := errors.AsType[*Error](err)
		if err == nil && v == d || err != nil && !(ok && e.Kind == Missing) {
			return err
		}
		if n == 6 || !a.client.wait(ctx, n, nil) {
			return err // or the tag has been moved again
		}
	}
}

// parseEnvelope returns the pushes of manifests below the upstream's prefix, and
// passes over everything else.
func (a *Accelerator) parseEnvelope(b []byte) ([]Pushed, error) {
	var e envelope
	if err := json.Unmarshal(b, &e); err != nil {
		return nil, err
	}
	if e.Events == nil {
		return nil, errors.New("it has no events")
	}
	var all []Pushed
	for _, event := range e.Events {
		t := event.Target
		if event.Action != "push" || !isManifest(t.MediaType) {
			continue
		}
		repo := t.Repository
		if a.client.prefix != "" {
			var ok bool
			if repo, ok = strings.CutPrefix(repo, a.client.prefix+"/"); !ok {
				continue
			}
		}
		if !registry.ValidName(repo) || t.Digest.Validate() != nil || t.Tag != "" && !registry.ValidTag(t.Tag) {
			return nil, fmt.Errorf("%.300q@%.100q, tag %.200q, is no manifest of a repository", t.Repository, t.Digest, t.Tag)
		}
		all = append(all, Pushed{Repository: repo, Tag: t.Tag, Digest: t.Digest})
	}
	return all, nil
}

// isManifest reports whether a media type is of an image or an index.
func isManifest(mediaType string) bool {
	return strings.HasPrefix(mediaType, "application/vnd.oci.image.manifest.") ||
		strings.HasPrefix(mediaType, "application/vnd.oci.image.index.") ||
		strings.HasPrefix(mediaType, "application/vnd.docker.distribution.manifest.")
}
