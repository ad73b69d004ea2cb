package admin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/server/convert"
)

// socket is its name below the root.
const socket = "admin.sock"

// short calls fn with a path of the root that fits into an address, whatever the root is called.
func short(root string, fn func(path string) error) error {
	dir, err := os.Open(root)
	if err != nil {
		return err
	}
	defer dir.Close()
	return fn(filepath.Join(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()), socket))
}

// Serve answers on the root's socket until end is called. The process must have the root for itself.
func Serve(root string, handler http.Handler) (end func() error, err error) {
	path := filepath.Join(root, socket)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var l net.Listener
	if err := short(root, func(path string) (err error) {
		l, err = net.Listen("unix", path)
		return err
	}); err != nil {
		return nil, err
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false) // it has another name by then
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(l) // that it was closed
	}()
	return func() error {
		err := server.Close()
		<-done
		if removed := os.Remove(path); !errors.Is(removed, fs.ErrNotExist) {
			err = errors.Join(err, removed)
		}
		return err
	}, nil
}

// Client asks the server that runs with a root.
type Client struct {
	root string
	http http.Client
}

// NewClient returns a client of the server of a root.
func NewClient(root string) *Client {
	c := &Client{root: root}
	c.http.Transport = &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (conn net.Conn, err error) {
			err = short(root, func(path string) (err error) {
				conn, err = new(net.Dialer).DialContext(ctx, "unix", path)
				return err
			})
			return conn, err
		},
	}
	return c
}

// Delete deletes, Undelete brings back.
func (c *Client) Delete(ctx context.Context, r Reference) (out Items, err error) {
	err = c.ask(ctx, "POST", "delete", r, &out)
	return out, err
}

// Undelete brings back.
func (c *Client) Undelete(ctx context.Context, r Reference) (out Items, err error) {
	err = c.ask(ctx, "POST", "undelete", r, &out)
	return out, err
}

// Deleted lists what can be brought back; of an empty repository: of all.
func (c *Client) Deleted(ctx context.Context, repository string) (out Items, err error) {
	err = c.ask(ctx, "GET", "deleted?repository="+url.QueryEscape(repository), nil, &out)
	return out, err
}

// Status says what there is to collect.
func (c *Client) Status(ctx context.Context) (out Status, err error) {
	err = c.ask(ctx, "GET", "gc", nil, &out)
	return out, err
}

// Collect collects now.
func (c *Client) Collect(ctx context.Context, r GCRequest, out any) error {
	return c.ask(ctx, "POST", "gc", r, out)
}

// Mode says in how many stores blobs rest intact, as the last pass has found it; now makes one first.
func (c *Client) Mode(ctx context.Context, now bool) (out convert.Status, err error) {
	method := "GET"
	if now {
		method = "POST"
	}
	err = c.ask(ctx, method, "mode", nil, &out)
	return out, err
}

func (c *Client) ask(ctx context.Context, method, path string, body, out any) error {
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://server"+Prefix+path, bytes.NewReader(b))
	if err != nil {
		return err
	}
	res, err := c.http.Do(req)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("no server runs with the root %s: start foil serve, or name another --root", c.root)
	}
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%w: run this as the user that foil serve runs as", err)
	}
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		var told struct{ Error string }
		if err := json.NewDecoder(res.Body).Decode(&told); err != nil || told.Error == "" {
			return fmt.Errorf("the server answers %s", res.Status)
		}
		return errors.New(told.Error)
	}
	return json.NewDecoder(res.Body).Decode(out)
}
