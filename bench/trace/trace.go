// Package trace reads and makes traces of what clients ask registries for.
//
// The format is that of the public traces of the IBM Cloud registry (Anwar et al., FAST '18): JSON objects, one after the other or in an
// array, of which these fields are read:
//
//	timestamp                  RFC 3339
//	http.request.method        GET or PUT
//	http.request.uri           v2/USER/REPOSITORY/blobs/LAYER or .../manifests/NAME; names are opaque
//	http.request.remoteaddr    the client, opaque
//	http.response.written      bytes
//	http.request.duration      seconds
package trace

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

// Record is one request as a trace has it.
type Record struct {
	Time     time.Time `json:"timestamp"`
	Method   string    `json:"http.request.method"`
	URI      string    `json:"http.request.uri"`
	Client   string    `json:"http.request.remoteaddr"`
	Written  int64     `json:"http.response.written"`
	Duration float64   `json:"http.request.duration"`
}

// Request is what a record asks for.
type Request struct {
	At       time.Duration // after the first one
	Put      bool
	Manifest bool
	Image    string // the repository, with the manifest's name if it is one
	Layer    string // empty: a manifest
	Client   string
	Bytes    int64
}

// maxRecords bounds what is read.
const maxRecords = 10_000_000

// Read reads at most n requests for layers and manifests (n <= 0: all), in the order of the trace; others are passed over.
func Read(r io.Reader, n int) (list []Request, err error) {
	in := bufio.NewReader(r)
	first, err := in.Peek(1)
	if err == io.EOF {
		return nil, errors.New("trace: it is empty")
	}
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	d := json.NewDecoder(in)
	if first[0] == '[' {
		if _, err := d.Token(); err != nil {
			return nil, fmt.Errorf("trace: %w", err)
		}
	}
	var begin time.Time
	for d.More() && (n <= 0 || len(list) < n) && len(list) < maxRecords {
		var rec Record
		if err := d.Decode(&rec); err != nil {
			return nil, fmt.Errorf("trace: record %d: %w", len(list)+1, err)
		}
		q, ok := rec.request()
		if !ok {
			continue
		}
		if begin.IsZero() {
			begin = rec.Time
		}
		q.At = rec.Time.Sub(begin)
		list = append(list, q)
	}
	return list, nil
}

// request is what a record asks for; not ok: something else.
func (r *Record) request() (q Request, ok bool) {
	parts := strings.Split(strings.Trim(r.URI, "/"), "/")
	if len(parts) < 4 || parts[0] != "v2" || r.Method != "GET" && r.Method != "PUT" {
		return q, false
	}
	kind, name := parts[len(parts)-2], parts[len(parts)-1]
	q = Request{Put: r.Method == "PUT", Image: strings.Join(parts[1:len(parts)-2], "/"), Client: r.Client, Bytes: r.Written}
	switch {
	case kind == "manifests":
		q.Manifest = true
		q.Image += ":" + name
	case kind == "blobs":
		q.Layer = name
	case q.Put && kind == "uploads":
		// A layer that is pushed has the name of its upload; traces say no other.
		q.Layer = name
		q.Image = strings.TrimSuffix(q.Image, "/blobs")
	default:
		return q, false
	}
	return q, true
}

// Write writes requests as a trace that begins at some time.
func Write(w io.Writer, list []Request, begin time.Time) error {
	out := bufio.NewWriter(w)
	e := json.NewEncoder(out)
	for i := range list {
		q := &list[i]
		rec := Record{Time: begin.Add(q.At).UTC(), Method: "GET", Client: q.Client, Written: q.Bytes}
		if q.Put {
			rec.Method = "PUT"
		}
		if q.Manifest {
			repo, name, _ := strings.Cut(q.Image, ":")
			rec.URI = "v2/" + repo + "/manifests/" + name
		} else {
			rec.URI = "v2/" + q.Image + "/blobs/" + q.Layer
		}
		if err := e.Encode(rec); err != nil {
			return fmt.Errorf("trace: %w", err)
		}
	}
	if err := out.Flush(); err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	return nil
}
