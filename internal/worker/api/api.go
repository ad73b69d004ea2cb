// Package api is how the command line and the node daemon talk: HTTP and JSON
// over the daemon's Unix socket (<root>/run/foil.sock, mode 0600).
//
//	POST   /v1/pulls               PullRequest      -> Events, one JSON object a line
//	GET    /v1/pulls?ref=REF       -> PullReport
//	GET    /v1/images              -> []Image
//	DELETE /v1/images?ref=REF      -> 204
//	POST   /v1/containers          ContainerRequest -> Container
//	GET    /v1/containers          -> []Container
//	DELETE /v1/containers/ID       -> 204 (the container must not be running)
//	POST   /v1/containers/ID/start Start         -> 204
//	POST   /v1/containers/ID/commit CommitRequest -> CommitReport
//	POST   /v1/containers/ID/changes -> Changes, one JSON object a line, the last with Done set
//	GET    /v1/containers/ID/trace -> TraceStatus (of one that was made to be traced)
//	POST   /v1/containers/ID/trace TraceRequest -> TraceResult
//	POST   /v1/tags                TagsRequest -> Tags
//	POST   /v1/toc                 AboutImage -> the encoded TOC (package toc)
//	POST   /v1/startup             AboutImage -> bundle.StartupReport
//	POST   /v1/startup/service     AboutImage -> bundle.ServiceReport
//	POST   /v1/startup/forget      AboutImage -> 204
//	POST   /v1/verify?ref=REF      -> VerifyEvents, one JSON object a line
//	POST   /v1/prove?ref=REF       -> the same, of a proof
//	POST   /v1/gc                  GCRequest        -> GCReport
//	GET    /v1/status              -> Status
//
// An error is an HTTP status with an Error as its body; in a stream it is the
// last line, with Err set.
package api

import (
	"encoding/json"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/worker/credentials"
)

// PullRequest asks for an image. Closing the connection does not stop the pull.
type PullRequest struct {
	// Ref is HOST[:PORT]/REPOSITORY[:TAG][@DIGEST].
	Ref string `json:"ref"`
	// Platform is OS/ARCH[/VARIANT]; empty means the host's.
	Platform string `json:"platform,omitempty"`
	// PlainHTTP speaks HTTP without TLS. Loopback addresses always do.
	PlainHTTP bool `json:"plain_http,omitempty"`
	// Credential is shown to the image's registry if it demands one; none means
	// what the daemon has in its Docker configuration. It is not kept: a daemon
	// that is started again goes on without.
	Credential credentials.Credential `json:"credential,omitzero"`
	// NoStartup does without the startup set of the image.
	NoStartup bool `json:"no_startup,omitempty"`
	// Entrypoint and Args are what will run in the place of the image's
	// entrypoint and command, so that the startup set is that of this service: as
	// in bundle.ImageRequest.
	Entrypoint []string `json:"entrypoint,omitempty"`
	Args       []string `json:"args,omitempty"`
	// Probed says that Service.ContainerStarted will be told when the container is
	// ready.
	Probed bool `json:"probed,omitempty"`
	// Container has a container made with the image, of this ID: its directory at
	// once (Reserved), its filesystem when the image is mounted (Mounted). It is
	// the caller's from then on; before, it goes when the stream ends.
	Container string `json:"container,omitempty"`
	// Until ends the event stream (not the pull) after the named event:
	// "mounted" or "complete" (default).
	Until EventKind `json:"until,omitempty"`
	// Interval between progress events; 0 sends none.
	Interval time.Duration `json:"interval,omitempty"`
}

// EventKind names what happened.
type EventKind string

const (
	Resolved EventKind = "resolved" // manifest and config are known
	Mounted  EventKind = "mounted"  // the rootfs is mounted; containers can start
	Progress EventKind = "progress"
	Complete EventKind = "complete" // every byte is here, verified and durable
	Failed   EventKind = "failed"
	// An image that starts only when it is proven is complete before.
	Proving EventKind = "proving" // how far Event.Proof is
	Proven  EventKind = "proven"  // its layers were hashed here, and make its files

	// Reserved says that the directory of PullRequest.Container is there, empty, for
	// what a runtime needs before the filesystem. It is no part of the pull's story.
	Reserved EventKind = "reserved"

	// The last three come from `foil run`, not from the daemon.
	Started EventKind = "started" // the container's process runs
	Ready   EventKind = "ready"   // its probe says so
	Exited  EventKind = "exited"
)

// Event is one line of a pull's or a run's story.
type Event struct {
	Event EventKind `json:"event"`
	Ref   string    `json:"ref"`
	// Elapsed is the time since the command or request began, in seconds.
	Elapsed float64   `json:"elapsed"`
	Time    time.Time `json:"time"`
	Digest  string    `json:"digest,omitempty"` // of the image's manifest
	// BytesMoved is what came over the network for this pull so far.
	BytesMoved int64 `json:"bytes_moved"`
	// BytesTotal is what the whole pull moves, at most; 0 while unknown.
	BytesTotal int64 `json:"bytes_total,omitempty"`
	// ContentHere and ContentTotal are bytes of file contents, decompressed.
	ContentHere  int64 `json:"content_here"`
	ContentTotal int64 `json:"content_total,omitempty"`
	// Waits counts reads that had to wait for absent blocks; Waited is their
	// summed time in seconds.
	Waits  int64   `json:"waits"`
	Waited float64 `json:"waited"`
	// WaitMax is the longest wait so far, in seconds, one that is not over included, and WaitBound what it
	// should have been at most: what was in flight when it began, a round trip, its own bytes and those
	// of the reads before it, on the link as it was measured; 0: not known. WaitsOver counts reads that
	// waited for more than twice that.
	WaitMax   float64 `json:"wait_max,omitempty"`
	WaitBound float64 `json:"wait_bound,omitempty"`
	WaitsOver int64   `json:"waits_over,omitempty"`
	// StartupOrigin is what the startup set was made from, empty if none came;
	// StartupMoved are the bytes that it took on the network so far, StartupRaw
	// those of its pages that have been written, of StartupTotal.
	StartupOrigin string `json:"startup_origin,omitempty"`
	StartupMoved  int64  `json:"startup_moved,omitempty"`
	StartupRaw    int64  `json:"startup_raw,omitempty"`
	StartupTotal  int64  `json:"startup_total,omitempty"`
	// ArenaBytes is what was written to the image's arena by this daemon so far.
	ArenaBytes int64 `json:"arena_bytes,omitempty"`
	// Touched are the bytes of the pages of its arena that were read so far: exact
	// while the read-ahead of the mount is off, which it is until ready if there is a
	// startup set; with it, read-ahead counts.
	Touched int64 `json:"touched,omitempty"`
	// Proof is that of Proving and Proven. With Complete it says that these are still to come.
	Proof *ProofProgress `json:"proof,omitempty"`
	// Trouble is why nothing comes now: how the last stream ended, while the daemon
	// tries again. Err is what has failed for good.
	Trouble  string `json:"trouble,omitempty"`
	Err      string `json:"error,omitempty"`
	Code     string `json:"code,omitempty"` // of an Error
	ExitCode *int   `json:"exit_code,omitempty"`
	// Container is that of PullRequest.Container: with Reserved without its Config,
	// with Mounted as CreateContainer returns it.
	Container *Container `json:"container,omitempty"`
}

// ProofProgress is how far the proof of an image is.
type ProofProgress struct {
	State string `json:"state"` // as in Image.Proof
	// Hashed are bytes of contents, of Total.
	Hashed int64 `json:"hashed"`
	Total  int64 `json:"total"`
	// Layer of Layers is being hashed, the lowest is 1; 0: none is.
	Layer  int `json:"layer,omitempty"`
	Layers int `json:"layers,omitempty"`
}

// Image is one image on the worker.
type Image struct {
	Ref          string    `json:"ref"`
	Digest       string    `json:"digest"`
	ChainID      string    `json:"chain_id"`
	Rootfs       string    `json:"rootfs,omitempty"` // names its directory: <root>/rootfs/ROOTFS
	State        string    `json:"state"`            // pulling, complete, broken
	Proof        string    `json:"proof,omitempty"`  // served (a server said what its files are), proving N%, proven (its layers were hashed here), unproven: WHY, failed: WHY
	Policy       string    `json:"policy,omitempty"` // what has to be known before a container starts: served, proven
	PolicyWhy    string    `json:"policy_why,omitempty"`
	Why          string    `json:"why,omitempty"`
	Files        int       `json:"files"`
	ContentTotal int64     `json:"content_total"`
	ContentHere  int64     `json:"content_here"`
	Created      time.Time `json:"created"` // on this worker
	// Made says that it was made here (foil commit), and may be nowhere else: nothing evicts it.
	Made bool `json:"made,omitempty"`
}

// ContainerRequest prepares a container's filesystem. The image must be
// mounted (pulled until Mounted, at least).
type ContainerRequest struct {
	ID  string `json:"id"`
	Ref string `json:"ref"`
	// Trace gives the container a mount of the image of its own, with a cold
	// page cache, and records which pages are read from it. The image must be complete.
	Trace bool `json:"trace,omitempty"`
	// Before, with Trace, is an encoded trace of the same image, of a start with a cold
	// page cache. Its pages are read in before the container starts, and the
	// container's trace is this one, with what is read besides in its places.
	Before []byte `json:"before,omitempty"`
}

// Start is what foil run knows of a container that it started.
type Start struct {
	Args    []string  `json:"args"` // of its first process
	Started time.Time `json:"started"`
	// Probe says that there is one; Ready is when it said so, zero before.
	Probe bool      `json:"probe,omitempty"`
	Ready time.Time `json:"ready,omitzero"`
}

// CommitRequest makes an image of what a container has changed.
type CommitRequest struct {
	Ref string `json:"ref"` // the image's name, of the registry of the container's image
	// Changes are instructions of a Dockerfile that say something of the config: see package commit.
	Changes []string `json:"changes,omitempty"`
	Message string   `json:"message,omitempty"`
	Author  string   `json:"author,omitempty"`
	// Created is when it is said to be made; files with later times get this one, so that who does the same again
	// gets the same image. Zero: now, and files keep their times.
	Created time.Time `json:"created,omitzero"`
	// Pause stops the container's processes while its files are read, if it runs.
	Pause bool `json:"pause,omitempty"`
}

// CommitReport says what was made.
type CommitReport struct {
	Ref    string `json:"ref"`
	Digest string `json:"digest"`  // of the manifest
	DiffID string `json:"diff_id"` // of the new layer
	// Entries and FileBytes are what is in the layer, LayerBytes what it takes as a tar stream.
	Entries    int   `json:"entries"`
	FileBytes  int64 `json:"file_bytes"`
	LayerBytes int64 `json:"layer_bytes"`
	// Paused is how long the container stood still, and Took how long all took, in seconds.
	Paused float64 `json:"paused,omitempty"`
	Took   float64 `json:"took"`
}

// Change is one path that a container has changed.
type Change struct {
	Kind string `json:"kind"` // added, modified or deleted
	Path string `json:"path"` // absolute
	// Type is file, directory, symlink, device or fifo; empty of one that is gone. Bytes are those of a file.
	Type  string `json:"type,omitempty"`
	Bytes int64  `json:"bytes,omitempty"`
	// Opaque, of a directory: nothing in it is the image's any more.
	Opaque bool   `json:"opaque,omitempty"`
	Done   bool   `json:"done,omitempty"` // the last line, which is no change
	Err    string `json:"error,omitempty"`
	Code   string `json:"code,omitempty"` // of an Error
}

// TypeOf names the type of a file by its st_mode, as Change.Type does.
func TypeOf(mode uint32) string {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return "file"
	case unix.S_IFDIR:
		return "directory"
	case unix.S_IFLNK:
		return "symlink"
	case unix.S_IFIFO:
		return "fifo"
	}
	return "device"
}

// AboutImage asks an image's server something about it. The image need not be
// here. PlainHTTP and Credential are those of a PullRequest.
type AboutImage struct {
	Ref        string                 `json:"ref"`
	Platform   string                 `json:"platform,omitempty"`
	PlainHTTP  bool                   `json:"plain_http,omitempty"`
	Credential credentials.Credential `json:"credential,omitzero"`
	// Service is the ID of one; empty, to forget: all of them.
	Service string `json:"service,omitempty"`
	// TOC is the digest of the TOC that is wanted; empty: the one that is here.
	TOC string `json:"toc,omitempty"`
}

// TagsRequest asks a registry for the tags of a repository. PlainHTTP and Credential are those of a
// PullRequest.
type TagsRequest struct {
	Repository string `json:"repository"` // HOST[:PORT]/REPOSITORY
	// Pattern is what tags have to match, as path.Match has it; empty: any. Tags that registries and signers make
	// of digests (sha256-...) are left out unless the pattern begins like them.
	Pattern string `json:"pattern,omitempty"`
	// Since leaves out images that were created before, as the config says of the image for Platform. One that does
	// not say stays. Zero: none is left out.
	Since      time.Time              `json:"since,omitzero"`
	Platform   string                 `json:"platform,omitempty"`
	PlainHTTP  bool                   `json:"plain_http,omitempty"`
	Credential credentials.Credential `json:"credential,omitzero"`
}

// Tags are those of a repository that were asked for, in the order of their versions: 1.9 before 1.10.
type Tags struct {
	Tags  []string `json:"tags"`
	Older int      `json:"older,omitempty"` // left out because of Since
}

// TraceStatus is how much of the image a traced container has read.
type TraceStatus struct {
	Pages int64     `json:"pages"` // of 4 KiB, each once
	Last  time.Time `json:"last"`  // when it read one for the first time; zero: never
}

// TraceRequest asks for the trace of a container that is ready.
type TraceRequest struct {
	// Args are the service's: what its first process was started with.
	Args []string `json:"args"`
	// Started and Ready are when the process was started and ready; what was read after that
	// is left out.
	Started time.Time `json:"started"`
	Ready   time.Time `json:"ready"`
	// Until is the end of the trace, if it is later than Ready.
	Until time.Time `json:"until,omitzero"`
	// Send sends the trace to the image's server, with the credential as for a
	// PullRequest.
	Send       bool                   `json:"send,omitempty"`
	Credential credentials.Credential `json:"credential,omitzero"`
}

// TraceResult is the trace of one run.
type TraceResult struct {
	Trace []byte `json:"trace"` // encoded, see package trace
	// Cut says that the run read more than a trace can hold: what it read last is
	// left out. Left is how many pages these are at least.
	Cut  bool  `json:"cut,omitempty"`
	Left int64 `json:"left,omitempty"`
	Sent bool  `json:"sent"`
	// SendError says why it was not sent although that was asked for.
	SendError string `json:"send_error,omitempty"`
}

// Container is a prepared container.
type Container struct {
	ID      string    `json:"id"`
	Ref     string    `json:"ref"`
	Digest  string    `json:"digest"`
	Created time.Time `json:"created"`
	// Dir is the OCI bundle directory; Rootfs (Dir/rootfs) is mounted in it.
	// The runner keeps config.json and its own state there.
	Dir    string          `json:"dir"`
	Rootfs string          `json:"rootfs,omitempty"`
	Config json.RawMessage `json:"config"` // the OCI image config
}

// VerifyEvent is progress, a bad block, or the result of a verification.
type VerifyEvent struct {
	Checked int64  `json:"checked"` // bytes of contents compared so far
	Absent  int64  `json:"absent"`  // bytes that have not arrived
	Total   int64  `json:"total"`
	Bad     string `json:"bad,omitempty"`   // a path whose bytes are wrong
	Proof   string `json:"proof,omitempty"` // as in Image: of a proof, and in the result
	// Layer of Layers is being hashed by a proof, as in ProofProgress.
	Layer  int    `json:"layer,omitempty"`
	Layers int    `json:"layers,omitempty"`
	Done   bool   `json:"done,omitempty"`
	Err    string `json:"error,omitempty"`
	Code   string `json:"code,omitempty"` // of an Error
}

// ProofStatus is an image whose proof is on the way, came to nothing, or failed.
type ProofStatus struct {
	Ref   string `json:"ref"`
	Proof string `json:"proof"` // as in Image
}

// GCRequest asks what could go from the worker's disk, and for it to go.
type GCRequest struct {
	// DryRun changes nothing.
	DryRun bool `json:"dry_run,omitempty"`
	// Limit is how much images may take, instead of what the daemon was started
	// with: bytes ("20GB") or a part of the filesystem ("80%").
	Limit string `json:"limit,omitempty"`
}

// GCReport says what went, or would go, and what stays, all in bytes.
type GCReport struct {
	DryRun bool     `json:"dry_run"`
	Freed  int64    `json:"freed"` // or would be
	Used   int64    `json:"used"`  // by images, now
	Limit  *int64   `json:"limit,omitempty"`
	Free   int64    `json:"free"` // on the filesystem, now
	Size   int64    `json:"size"` // of the filesystem
	Items  []GCItem `json:"items"`
}

// GCItem is one thing on the worker's disk.
type GCItem struct {
	// Kind is image; rootfs: one that no image names; contents: what is left of
	// removed images because others use it; leftover.
	Kind string `json:"kind"`
	Name string `json:"name"`
	Goes bool   `json:"goes"`
	// Bytes are what its going frees, or what it takes.
	Bytes int64  `json:"bytes"`
	Why   string `json:"why"`
}

// Status is what the daemon is doing.
type Status struct {
	Version string       `json:"version"`
	PID     int          `json:"pid"`
	Started time.Time    `json:"started"`
	Gate    string       `json:"gate"`   // fanotify
	Keeper  int          `json:"keeper"` // process ID, 0: none
	Pulls   []PullStatus `json:"pulls"`
	// Servers are those to which a connection is kept.
	Servers []ServerStatus `json:"servers,omitempty"`
	// Proofs are those on the way, and those that came to nothing, or failed.
	Proofs []ProofStatus `json:"proofs,omitempty"`
	// Warnings are what an operator should know, e.g. mounts that could not be
	// taken over after a crash.
	Warnings []string `json:"warnings,omitempty"`
}

// ServerStatus is a server to which a connection is kept.
type ServerStatus struct {
	URL string `json:"url"`
	// Warm says that the connection is there and was warmed up, with WarmUp
	// bytes, of which the fastest came at Rate bytes a second.
	Warm   bool    `json:"warm"`
	WarmUp int64   `json:"warm_up_bytes"`
	Rate   float64 `json:"rate"`
}

// PullStatus is one running or finished pull.
type PullStatus struct {
	Event
	Rate float64 `json:"rate"` // bytes a second over the last seconds
}

// PullReport is a running or finished pull in full.
type PullReport struct {
	PullStatus
	Began time.Time `json:"began"`
	// Reads are those that had to wait for absent blocks, the first 256, in the order in
	// which they began to; Waits counts them all. The daemon keeps those of the last 32
	// pulls, until it ends.
	Reads []Read `json:"reads"`
}

// Read is one read, or page fault, that had to wait.
type Read struct {
	Began time.Time `json:"began"`
	Took  float64   `json:"took"` // seconds; so far, if it waits still
	// Bound is what Took should be at most, in seconds, as Event.WaitBound says; 0: not known.
	Bound float64 `json:"bound,omitempty"`
	// Waiting: it waits still.
	Waiting bool `json:"waiting,omitempty"`
	// Path is a file that has what was read, the first of those with the same content;
	// empty if that is not known any more.
	Path string `json:"path,omitempty"`
	// Page is the first of the Pages of 4 KiB that were read, in the file.
	Page  int64 `json:"page"`
	Pages int64 `json:"pages"`
	// Planned says that the startup set had come, or that there is none: what the read
	// waited for is not in it, or had arrived damaged. Otherwise it may be.
	Planned bool `json:"planned"`
	// Moved are the bytes that had come over the network when it began, and Ahead those
	// that were planned up to the end of what it needed, at most, if it was Planned.
	Moved int64 `json:"moved"`
	Ahead int64 `json:"ahead,omitempty"`
	// Promoted: what it needed was asked for out of turn.
	Promoted bool   `json:"promoted,omitempty"`
	Err      string `json:"error,omitempty"` // with which it failed
}

// Error is the body of a failed request.
type Error struct {
	// Code is for programs: not_found, invalid, unauthorized, conflict,
	// unavailable, corrupt, no_space, unsupported, internal.
	Code    string `json:"code"`
	Message string `json:"message"` // for people, with what to do next
}

func (e *Error) Error() string { return e.Message }

// Errorf returns an Error with a code. Its format is that of fmt.Errorf.
func Errorf(code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Errorf(format, args...).Error()}
}
