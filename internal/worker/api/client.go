package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"syscall"

	"hydrofoil.dev/foil/internal/format/bundle"
)

// DefaultRoot is where a worker keeps everything unless told otherwise.
const DefaultRoot = "/var/lib/foil"

// maxSocketPath is the kernel's limit on the path of a Unix socket (sun_path
// has 108 bytes, the last is NUL).
const maxSocketPath = 107

// SocketPath is where the daemon of the worker at root listens.
func SocketPath(root string) string { return filepath.Join(root, "run", "foil.sock") }

// Client talks to one daemon. It is safe for concurrent use.
type Client struct {
	root   string // "" when only the socket is known
	socket string
	http   *http.Client
}

// Dial returns a client of the daemon whose root, or whose socket (a path that
// ends in ".sock"), is at path. It connects when first used.
func Dial(path string) *Client {
	c := &Client{root: path, socket: SocketPath(path)}
	if strings.HasSuffix(path, ".sock") {
		c.root, c.socket = "", path
	}
	c.http = &http.Client{Transport: &http.Transport{
		DialContext:        func(ctx context.Context, _, _ string) (net.Conn, error) { return c.dial(ctx) },
		DisableCompression: true,
	}}
	return c
}

func (c *Client) dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "unix", c.socket)
}

// listens returns the error that a request would if nobody listens on the socket.
// It costs no request: a start waits for it.
func (c *Client) listens(ctx context.Context) error {
	conn, err := c.dial(ctx)
	if err != nil {
		return c.dialError(ctx, "connect", err)
	}
	return conn.Close()
}

// Close closes idle connections. Requests that run are not disturbed.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// NoDaemonError says that nothing answers on the socket.
type NoDaemonError struct {
	Root   string // "" when only the socket is known
	Socket string
	Err    error
}

func (e *NoDaemonError) Error() string {
	root := e.Root
	if root == "" {
		root = "DIR"
	}
	return fmt.Sprintf("no daemon at %s; start one with \"foil node --root %s\"", e.Socket, root)
}

func (e *NoDaemonError) Unwrap() error { return e.Err }

// Pull asks for an image and yields the pull's events as they come, the last
// being the one that req.Until names. An error ends the sequence; it is an
// *Error if the daemon reported it, and comes with the event that carried it,
// if one did. Leaving the loop early does not stop the pull.
func (c *Client) Pull(ctx context.Context, req PullRequest) iter.Seq2[Event, error] {
	until := req.Until
	if until == "" {
		until = Complete
	}
	return func(yield func(Event, error) bool) {
		for ev, err := range lines[Event](ctx, c, "/v1/pulls", req) {
			if err == nil && ev.Err != "" {
				err = &Error{Code: codeOr(ev.Code), Message: ev.Err}
			}
			done := ev.Event == Complete && ev.Proof == nil || ev.Event == Proven && req.Container == ""
			last := err != nil || ev.Event == until && until != Complete || done
			if !yield(ev, err) || last {
				return
			}
		}
		yield(Event{}, c.lost("pull "+req.Ref))
	}
}

// PullReport returns the running pull of an image, or its last one.
func (c *Client) PullReport(ctx context.Context, ref string) (*PullReport, error) {
	v := new(PullReport)
	if err := c.call(ctx, "GET", "/v1/pulls?ref="+url.QueryEscape(ref), nil, v); err != nil {
		return nil, err
	}
	return v, nil
}

// Verify asks for the verification of an image and yields its events, the last
// with Done set. An error ends the sequence.
func (c *Client) Verify(ctx context.Context, ref string) iter.Seq2[VerifyEvent, error] {
	return c.verification(ctx, "verify", ref)
}

func (c *Client) verification(ctx context.Context, what, ref string) iter.Seq2[VerifyEvent, error] {
	return func(yield func(VerifyEvent, error) bool) {
		for ev, err := range lines[VerifyEvent](ctx, c, "/v1/"+what+"?ref="+url.QueryEscape(ref), nil) {
			if err == nil && ev.Err != "" {
				err = &Error{Code: codeOr(ev.Code), Message: ev.Err}
			}
			if !yield(ev, err) || err != nil || ev.Done {
				return
			}
		}
		yield(VerifyEvent{}, c.lost(what+" "+ref))
	}
}

// Prove has an image proven now, and yields events as Verify does.
func (c *Client) Prove(ctx context.Context, ref string) iter.Seq2[VerifyEvent, error] {
	return c.verification(ctx, "prove", ref)
}

// Images lists the images on the worker.
func (c *Client) Images(ctx context.Context) ([]Image, error) {
	var v []Image
	err := c.call(ctx, "GET", "/v1/images", nil, &v)
	return v, err
}

// RemoveImage removes an image. CodeConflict: a container uses it.
func (c *Client) RemoveImage(ctx context.Context, ref string) error {
	return c.call(ctx, "DELETE", "/v1/images?ref="+url.QueryEscape(ref), nil, nil)
}

// CreateContainer prepares a container's filesystem.
func (c *Client) CreateContainer(ctx context.Context, req ContainerRequest) (*Container, error) {
	v := new(Container)
	if err := c.call(ctx, "POST", "/v1/containers", req, v); err != nil {
		return nil, err
	}
	return v, nil
}

// Containers lists the prepared containers, running or not.
func (c *Client) Containers(ctx context.Context) ([]Container, error) {
	var v []Container
	err := c.call(ctx, "GET", "/v1/containers", nil, &v)
	return v, err
}

// RemoveContainer removes a container that does not run.
func (c *Client) RemoveContainer(ctx context.Context, id string) error {
	return c.call(ctx, "DELETE", "/v1/containers/"+url.PathEscape(id), nil, nil)
}

// ContainerStarted tells the daemon of a container's start.
func (c *Client) ContainerStarted(ctx context.Context, id string, s Start) error {
	return c.call(ctx, "POST", "/v1/containers/"+url.PathEscape(id)+"/start", s, nil)
}

// TraceStatus says how much a traced container has read.
func (c *Client) TraceStatus(ctx context.Context, id string) (*TraceStatus, error) {
	v := new(TraceStatus)
	if err := c.call(ctx, "GET", "/v1/containers/"+url.PathEscape(id)+"/trace", nil, v); err != nil {
		return nil, err
	}
	return v, nil
}

// Trace returns what a container has read that was made to be traced.
func (c *Client) Trace(ctx context.Context, id string, req TraceRequest) (*TraceResult, error) {
	v := new(TraceResult)
	if err := c.call(ctx, "POST", "/v1/containers/"+url.PathEscape(id)+"/trace", req, v); err != nil {
		return nil, err
	}
	return v, nil
}

// Commit makes an image of what a container has changed.
func (c *Client) Commit(ctx context.Context, id string, req CommitRequest) (*CommitReport, error) {
	v := new(CommitReport)
	if err := c.call(ctx, "POST", "/v1/containers/"+url.PathEscape(id)+"/commit", req, v); err != nil {
		return nil, err
	}
	return v, nil
}

// Changes yields what a container has changed of its image. An error ends the sequence.
func (c *Client) Changes(ctx context.Context, id string) iter.Seq2[Change, error] {
	return func(yield func(Change, error) bool) {
		for ch, err := range lines[Change](ctx, c, "/v1/containers/"+url.PathEscape(id)+"/changes", nil) {
			if err == nil && ch.Err != "" {
				err = &Error{Code: codeOr(ch.Code), Message: ch.Err}
			}
			if ch.Done || !yield(ch, err) || err != nil {
				return
			}
		}
		yield(Change{}, c.lost("changes of container "+id))
	}
}

// Tags asks a registry for the tags of a repository.
func (c *Client) Tags(ctx context.Context, req TagsRequest) (*Tags, error) {
	v := new(Tags)
	if err := c.call(ctx, "POST", "/v1/tags", req, v); err != nil {
		return nil, err
	}
	return v, nil
}

// TOC returns the encoded table of contents of an image.
func (c *Client) TOC(ctx context.Context, req AboutImage) ([]byte, error) {
	body, err := c.do(ctx, "POST", "/v1/toc", req)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	b, err := io.ReadAll(body)
	if err != nil {
		return nil, fmt.Errorf("read the table of contents of %s: %w", req.Ref, err)
	}
	return b, nil
}

// GC frees what it can on the worker's disk, or says what it would.
func (c *Client) GC(ctx context.Context, req GCRequest) (*GCReport, error) {
	v := new(GCReport)
	if err := c.call(ctx, "POST", "/v1/gc", req, v); err != nil {
		return nil, err
	}
	return v, nil
}

// Startup returns what an image's server has of startup sets.
func (c *Client) Startup(ctx context.Context, req AboutImage) (*bundle.StartupReport, error) {
	v := new(bundle.StartupReport)
	if err := c.call(ctx, "POST", "/v1/startup", req, v); err != nil {
		return nil, err
	}
	return v, nil
}

// StartupService returns the startup set of one service.
func (c *Client) StartupService(ctx context.Context, req AboutImage) (*bundle.ServiceReport, error) {
	v := new(bundle.ServiceReport)
	if err := c.call(ctx, "POST", "/v1/startup/service", req, v); err != nil {
		return nil, err
	}
	return v, nil
}

// ForgetStartup makes an image's server forget a service, or all of them, and
// what was learned of it.
func (c *Client) ForgetStartup(ctx context.Context, req AboutImage) error {
	return c.call(ctx, "POST", "/v1/startup/forget", req, nil)
}

// Status says what the daemon is doing.
func (c *Client) Status(ctx context.Context) (*Status, error) {
	v := new(Status)
	if err := c.call(ctx, "GET", "/v1/status", nil, v); err != nil {
		return nil, err
	}
	return v, nil
}

// call makes one request and decodes its answer into out, if out is not nil.
func (c *Client) call(ctx context.Context, method, path string, in, out any) error {
	body, err := c.do(ctx, method, path, in)
	if err != nil {
		return err
	}
	defer body.Close()
	if out == nil {
		return nil
	}
	if err := json.NewDecoder(body).Decode(out); err != nil {
		return fmt.Errorf("read the daemon's answer to %s %s: %w", method, path, err)
	}
	return nil
}

// do makes one request and returns the body of a good answer.
func (c *Client) do(ctx context.Context, method, path string, in any) (io.ReadCloser, error) {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return nil, fmt.Errorf("%s %s: %w", method, path, err)
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://foil"+path, body)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", method, path, err)
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.dialError(ctx, method+" "+path, err)
	}
	if resp.StatusCode < 300 {
		return resp.Body, nil
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return nil, fmt.Errorf("read the daemon's answer to %s %s: %w", method, path, err)
	}
	e := new(Error)
	if err := json.Unmarshal(b, e); err != nil || e.Message == "" {
		// Not ours: a mismatched daemon, or something else on that socket.
		return nil, &Error{CodeInternal, fmt.Sprintf("%s %s: the daemon at %s answered %s: %s",
			method, path, c.socket, resp.Status, bytes.TrimSpace(b))}
	}
	e.Code = codeOr(e.Code)
	if e.Code == CodeInvalid && strings.Contains(e.Message, "unknown field") {
		e.Message += ": the daemon is of an older version than this command: restart it with this one"
	}
	return nil, e
}

// dialError says what to do about a request that got no answer.
func (c *Client) dialError(ctx context.Context, op string, err error) error {
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case len(c.socket) > maxSocketPath:
		return fmt.Errorf("the path of the daemon's socket, %s, is too long (%d bytes, at most %d): choose a shorter --root",
			c.socket, len(c.socket), maxSocketPath)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return &NoDaemonError{Root: c.root, Socket: c.socket, Err: err}
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("connect to the daemon at %s: permission denied: its socket is for root alone; run the command as root (sudo)", c.socket)
	}
	// The URL in a *url.Error is made up; the socket is what can be looked at.
	var uerr *url.Error
	if errors.As(err, &uerr) {
		err = uerr.Err
	}
	return fmt.Errorf("%s: daemon at %s: %w", op, c.socket, err)
}

// lost is the error of a stream that ended before its last event.
func (c *Client) lost(op string) error {
	return &Error{CodeUnavailable, fmt.Sprintf(
		"%s: the daemon at %s stopped before it was done; its log says why, and the same command goes on where it stopped",
		op, c.socket)}
}

// lines makes one request and yields the lines of its answer.
func lines[T any](ctx context.Context, c *Client, path string, in any) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var zero T
		body, err := c.do(ctx, "POST", path, in)
		if err != nil {
			yield(zero, err)
			return
		}
		defer body.Close()
		for d := json.NewDecoder(body); ; {
			var v T
			switch err := d.Decode(&v); {
			case err == nil:
				if !yield(v, nil) {
					return
				}
			case ctx.Err() != nil:
				yield(zero, context.Cause(ctx))
				return
			case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
				return // the caller knows whether the last event was the last
			default:
				yield(zero, fmt.Errorf("read the daemon's events: %w", err))
				return
			}
		}
	}
}

func codeOr(code string) string {
	if code == "" {
		return CodeInternal
	}
	return code
}
