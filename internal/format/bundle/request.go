package bundle

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/segment"
)

// Paths and media types of the bundle protocol, on the server's HTTP port.
const (
	// PullPath takes a POST of a Request and answers with a bundle stream.
	PullPath = "/hydrofoil/v1/bundle"
	// PromotePath takes a POST of a Promotion and answers 204, or 404 when the
	// stream it names has ended.
	PromotePath = "/hydrofoil/v1/promote"

	// WarmPath takes a POST of Warm and answers with as many bytes, which mean
	// nothing.
	WarmPath = "/hydrofoil/v1/warm"

	MediaTypeRequest = "application/vnd.hydrofoil.bundle.request.v1+json"
	MediaTypeBundle  = "application/vnd.hydrofoil.bundle.v1"

	// Version is the highest version of the stream that this code speaks.
	Version = 1
)

// MaxWarm bounds Warm.Bytes.
const MaxWarm = 32 << 20

// Warm asks for bytes that let TCP learn the path before a pull needs it.
type Warm struct {
	Bytes int64 `json:"bytes"` // 0 to MaxWarm
}

// Request asks for an image. It is JSON on the wire. A server
// ignores fields that it does not know: a field that must not be ignored comes
// with a new version of the stream.
type Request struct {
	// Versions of the bundle stream that the worker reads; the server picks
	// one and says so in the stream's Hello section.
	Versions []int `json:"versions"`
	// Image is the one that is wanted. On the wire it is the only element of the list "images".
	Image ImageRequest `json:"-"`
	// Have lists the rootfs the worker holds, wholly or in part. The server
	// sends no segment that one of them has.
	Have []Have `json:"have,omitempty"`
	// Ahead is the Hello section's stream ID of another stream of this worker's:
	// what was not promoted of that waits while the startup sets of this one are sent. One
	// that has ended, or is not known, is none.
	Ahead string `json:"ahead,omitempty"`
	// Hold, at most MaxHold, has the server send of the plan only what is promoted,
	// after a startup set of the service itself (see Held), until so much time has
	// passed or Promotion.Release comes: what a start lacks all the same then has the
	// line for itself. Nanoseconds.
	Hold time.Duration `json:"hold,omitempty"`
	// Choose says that the worker will tell which frames of the plan it does not want, since another
	// stream of its own brings what is in them (Promotion.Chosen). Until then, and for MaxChoice at
	// most, the server sends of the plan only what is promoted. Older servers do not wait.
	Choose bool `json:"choose,omitempty"`
	// EarlyPlan says that the worker takes the plan, and frames that it has promoted, between the pages
	// of the last startup set: a read that lacks what is in no set does not wait for the rest of it then.
	// Older workers do not, and older servers send the plan after the pages.
	EarlyPlan bool `json:"early_plan,omitempty"`
	// Damaged, at most MaxDamaged, are segments and page runs of the image that arrived with other
	// bytes than their digests name; one of a frame that did not decode. They are no more
	// than a hint: the server looks at its own copies of the frames that hold them, and makes anew
	// what it finds wrong itself. Older workers name none, older servers do not look.
	Damaged []segment.ID `json:"damaged,omitempty"`
}

// MaxHold bounds Request.Hold: a server does not keep a stream's plan for longer that
// nothing is sent of.
const MaxHold = 30 * time.Second

// MaxChoice is how long a server waits for the choice of Request.Choose.
const MaxChoice = 10 * time.Second

// plain is a Request without its methods.
type plain Request

// MarshalJSON makes a list of the image.
func (r Request) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		plain
		Images []ImageRequest `json:"images"`
	}{plain(r), []ImageRequest{r.Image}})
}

// UnmarshalJSON refuses a list that is not of one image.
func (r *Request) UnmarshalJSON(b []byte) error {
	var v struct {
		plain
		Images []ImageRequest `json:"images"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return err
	}
	if n := len(v.Images); n != 1 {
		return fmt.Errorf("%d images, want one: ask for each in a request of its own", n)
	}
	*r = Request(v.plain)
	r.Image = v.Images[0]
	return nil
}

// ImageRequest is one image wanted.
type ImageRequest struct {
	// Repository and Reference name the manifest or index as in
	// /v2/<repository>/manifests/<reference>; a reference is a tag or a digest.
	Repository string `json:"repository"`
	Reference  string `json:"reference"`
	// Platform selects from an index, as oci.Choose does; nil, as older workers say, means linux
	// on the server's own architecture.
	Platform *ocispec.Platform `json:"platform,omitempty"`
	// Header, when true, ends the stream after the plan of no frames: only
	// manifest, config and TOC are wanted, and the startup set if Startup says so:
	// that is how a service joins the pull of an image that runs.
	Header bool `json:"header,omitempty"`
	// Startup, when true, asks for the startup set of the service that Service
	// names, right after the headers.
	Startup bool `json:"startup,omitempty"`
	// Entrypoint and Args are what the container will run in the place of the
	// image's entrypoint and command. Nil ones are the image's own; but an
	// Entrypoint without Args takes none.
	Entrypoint []string `json:"entrypoint,omitempty"`
	Args       []string `json:"args,omitempty"`
}

// Service returns what runs in a container of an image with the given config:
// what trace.Trace.Args holds.
func (r *ImageRequest) Service(c ocispec.ImageConfig) []string {
	entrypoint, args := c.Entrypoint, c.Cmd
	if r.Entrypoint != nil {
		entrypoint, args = r.Entrypoint, nil
	}
	if r.Args != nil {
		args = r.Args
	}
	return slices.Concat(entrypoint, args)
}

// Have is a rootfs on the worker.
type Have struct {
	ChainID digest.Digest `json:"chain_id"`
	// TOC is the digest of the encoded TOC that the worker holds for it. A
	// server whose TOC of this chain ID has another digest ignores the entry.
	// When the same chain ID is wanted, the server need not send it again.
	TOC digest.Digest `json:"toc"`
	// Present says which of its TOC's segments are here: bit i (bit i%8 of byte
	// i/8) for TOC.Segments[i]. Nil means all of them. A broken stream is
	// resumed by asking again with what has arrived.
	Present []byte `json:"present,omitempty"`
	// Pages are page runs (a list as in package trace) that are here of segments
	// which are not: what has arrived of startup sets.
	Pages []byte `json:"pages,omitempty"`
}

// Promotion asks that segments queued in a running stream be sent next.
type Promotion struct {
	// Stream is the Hello section's stream ID.
	Stream string `json:"stream"`
	// Frames are indices into the stream's plan, most wanted first. The server sends them before all
	// others, in this order, and no others along with them. Frames that it has sent it ignores.
	Frames []uint32 `json:"frames"`
	// Number grows from one promotion of a stream to the next: what a newer one names goes before what
	// an older one names, whichever arrives first. 0, as older workers say, is the newest. Older
	// servers take what arrives last for the newest.
	Number uint64 `json:"number,omitempty"`
	// Skip, at most MaxSkip, are frames of the plan that need not be sent. One that a promotion
	// names, whichever of the two arrives first, is sent all the same. Frames that are not in the plan, or
	// were sent, are ignored. Older servers skip nothing.
	Skip []uint32 `json:"skip,omitempty"`
	// Chosen ends the wait of Request.Choose.
	Chosen bool `json:"chosen,omitempty"`
	// Release ends what Request.Hold does.
	Release bool `json:"release,omitempty"`
	// Rest, at most MaxRest, has the server send only what is promoted for so long, from when it hears of it: others
	// want the worker's processors. It takes the place of an earlier one that has not passed. Nanoseconds. Older
	// servers do not rest.
	Rest time.Duration `json:"rest,omitempty"`
}

// MaxRest bounds Promotion.Rest: a worker that ends, or cannot say more, does not have a server wait.
const MaxRest = time.Second

// MaxSkip bounds Promotion.Skip: a message of so many frames is less than a server takes.
const MaxSkip = 100_000
