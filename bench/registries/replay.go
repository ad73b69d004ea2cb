package registries

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	digest "github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/bench/site"
	"hydrofoil.dev/foil/bench/trace"
)

// Options say what is replayed.
type Options struct {
	Foil, DockerRegistry, Distribution string // programs
	Servers                            []string
	Requests                           []trace.Request
	Name                               string  // of the trace
	Bytes                              int64   // of all distinct layers: they have the proportions of the trace
	Speed                              float64 // how much faster than in the trace time goes, but for that from a manifest to its layers
	Restored                           int64   // of foil serve --restored-max, bytes
	Hot                                float64 // pulls that earn an intact copy, in selective
	Cache                              string  // directory on a disk
	Seed                               uint64
	Pool                               []string // directories with files to make layers of
	Out                                io.Writer
	JSON                               string
	Log                                func(string)
}

// Replayed is what a server did with a trace.
type Replayed struct {
	Server  string           `json:"server"`
	Layers  int              `json:"layers"`       // that were pushed, distinct
	Pushed  int64            `json:"pushed_bytes"` // of those
	Stored  int64            `json:"stored_bytes"` // below its root, after it settled
	Kinds   map[string]int64 `json:"kinds"`
	Push    time.Duration    `json:"push_ns"`   // of all layers and manifests, one after the other
	Settle  time.Duration    `json:"settle_ns"` // from the last push until modes hold
	Gets    int              `json:"gets"`
	Mean    time.Duration    `json:"mean_ns"` // from the request to the last byte of a layer
	P50     time.Duration    `json:"p50_ns"`
	P99     time.Duration    `json:"p99_ns"`
	First   time.Duration    `json:"first_byte_p50_ns"`
	First99 time.Duration    `json:"first_byte_p99_ns"`
	CPU     time.Duration    `json:"cpu_ns"` // of the server, for all requests
	Moved   int64            `json:"moved_bytes"`
	Failed  int              `json:"failed"` // answers that were no layer, or other bytes
}

// Replay replays a trace against each server.
func Replay(ctx context.Context, o Options) (all []Replayed, err error) {
	dir, err := site.Scratch(o.Cache, "registry-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, site.RemoveTree(dir)) }()
	p, err := newPool(o.Pool...)
	if err != nil {
		return nil, err
	}
	layers, err := o.layers(p)
	if err != nil {
		return nil, err
	}
	for i, name := range o.Servers {
		one, err := o.replay(ctx, name, filepath.Join(dir, fmt.Sprint("server", i)), layers)
		if err != nil {
			return all, fmt.Errorf("%s: %w", name, err)
		}
		all = append(all, one)
	}
	if o.JSON != "" {
		b, err := json.MarshalIndent(all, "", "\t")
		if err == nil {
			err = os.WriteFile(o.JSON, append(b, '\n'), 0o644)
		}
		if err != nil {
			return all, fmt.Errorf("bench: %w", err)
		}
	}
	return all, write(o.Out, all)
}

func (o *Options) log(format string, args ...any) {
	if o.Log != nil {
		o.Log(fmt.Sprintf(format, args...))
	}
}

// layers makes a layer for each that the trace names.
func (o *Options) layers(p *pool) (map[string]layer, error) {
	sizes, total := map[string]int64{}, int64(0)
	var names []string
	for _, q := range o.Requests {
		if _, ok := sizes[q.Layer]; !ok && !q.Manifest {
			sizes[q.Layer] = q.Bytes
			total += q.Bytes
			names = append(names, q.Layer)
		}
	}
	r := rand.New(rand.NewPCG(o.Seed, 0x1a7e5))
	layers := map[string]layer{}
	for _, name := range names {
		level := 6
		if r.IntN(5) == 0 {
			level = 1
		}
		l, err := p.layer(r, max(2000, int64(float64(sizes[name])/float64(max(1, total))*float64(o.Bytes))), level)
		if err != nil {
			return nil, err
		}
		layers[name] = l
	}
	o.log("%d layers are made", len(layers))
	return layers, nil
}

// client is the nth of the trace's. Its connections are its own, and come from an address of its own of 127.0.0.0/8: by that a
// server tells clients apart.
func client(n int) *http.Client {
	from := &net.TCPAddr{IP: net.IPv4(127, 1, byte(n>>8), byte(n))}
	return &http.Client{Transport: &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 4, DialContext: (&net.Dialer{LocalAddr: from}).DialContext}}
}

func (o *Options) replay(ctx context.Context, name, root string, layers map[string]layer) (r Replayed, err error) {
	if err := os.Mkdir(root, 0o700); err != nil {
		return r, fmt.Errorf("bench: %w", err)
	}
	s, err := start(ctx, o, name, root, "127.0.0.1:5917")
	if err != nil {
		return r, err
	}
	defer func() {
		err = errors.Join(err, s.stop())
		http.DefaultClient.CloseIdleConnections()
	}()
	r = Replayed{Server: name, Layers: len(layers)}
	began := time.Now()
	configs, err := o.push(ctx, s, layers, &r)
	if err != nil {
		return r, err
	}
	r.Push = time.Since(began)
	if r.Settle, err = s.settle(ctx, len(configs)); err != nil {
		return r, err
	}
	o.log("%s: pushed in %v, settled in %v", name, r.Push.Round(time.Millisecond), r.Settle.Round(time.Millisecond))
	if r.Stored, r.Kinds, err = s.stored(); err != nil {
		return r, err
	}
	before, err := s.cpu()
	if err != nil {
		return r, err
	}
	if err := o.play(ctx, s, layers, &r); err != nil {
		return r, err
	}
	after, err := s.cpu()
	r.CPU = after - before
	o.log("%s: %d layers in a mean of %v", name, r.Gets, r.Mean.Round(10*time.Microsecond))
	return r, err
}

// push pushes all images of the trace, and returns their configs.
func (o *Options) push(ctx context.Context, s *server, layers map[string]layer, r *Replayed) (configs map[digest.Digest]bool, err error) {
	images := map[string][]string{}
	var order []string
	for _, q := range o.Requests {
		if q.Manifest {
			continue
		}
		if _, ok := images[q.Image]; !ok {
			order = append(order, q.Image)
		}
		if !slices.Contains(images[q.Image], q.Layer) {
			images[q.Image] = append(images[q.Image], q.Layer)
		}
	}
	c := client(1)
	defer c.CloseIdleConnections()
	done := map[digest.Digest]bool{}
	configs = map[digest.Digest]bool{}
	for _, im := range order {
		type descriptor struct {
			MediaType string        `json:"mediaType"`
			Digest    digest.Digest `json:"digest"`
			Size      int64         `json:"size"`
		}
		m := struct {
			SchemaVersion int          `json:"schemaVersion"`
			MediaType     string       `json:"mediaType"`
			Config        descriptor   `json:"config"`
			Layers        []descriptor `json:"layers"`
		}{SchemaVersion: 2, MediaType: "application/vnd.oci.image.manifest.v1+json",
			Config: descriptor{"application/vnd.oci.image.config.v1+json", "", 0}}
		var diffIDs []digest.Digest
		for _, name := range images[im] {
			l := layers[name]
			diffIDs = append(diffIDs, l.diffID)
			m.Layers = append(m.Layers, descriptor{"application/vnd.oci.image.layer.v1.tar+gzip", l.digest, int64(len(l.blob))})
			if err := upload(ctx, c, s.addr, im, l.digest, l.blob); err != nil {
				return nil, err
			}
			if !done[l.digest] {
				done[l.digest] = true
				r.Pushed += int64(len(l.blob))
			}
		}
		own, err := json.Marshal(map[string]any{"architecture": "amd64", "os": "linux", "rootfs": map[string]any{"type": "layers", "diff_ids": diffIDs}})
		if err != nil {
			return nil, fmt.Errorf("bench: %w", err)
		}
		d := digest.FromBytes(own)
		configs[d] = true
		m.Config.Digest, m.Config.Size = d, int64(len(own))
		if err := upload(ctx, c, s.addr, im, d, own); err != nil {
			return nil, err
		}
		b, err := json.Marshal(m)
		if err != nil {
			return nil, fmt.Errorf("bench: %w", err)
		}
		if err := put(ctx, c, "PUT", "http://"+s.addr+"/v2/"+im+"/manifests/1", m.MediaType, b); err != nil {
			return nil, err
		}
	}
	return configs, nil
}

// upload does what clients do: a blob that is there is not sent.
func upload(ctx context.Context, c *http.Client, addr, repo string, d digest.Digest, b []byte) error {
	base := "http://" + addr + "/v2/" + repo + "/blobs/"
	if put(ctx, c, "HEAD", base+d.String(), "", nil) == nil {
		return nil
	}
	req, err := http.NewRequestWithContext(ctx, "POST", base+"uploads/", nil)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	res, err := c.Do(req)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	_, _ = io.Copy(io.Discard, res.Body)
	res.Body.Close()
	location := res.Header.Get("Location")
	if strings.HasPrefix(location, "/") {
		location = "http://" + addr + location
	}
	separator := "?"
	if strings.Contains(location, "?") {
		separator = "&"
	}
	return put(ctx, c, "PUT", location+separator+"digest="+d.String(), "application/octet-stream", b)
}

func put(ctx context.Context, c *http.Client, method, url, mediaType string, b []byte) error {
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(b))
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if mediaType != "" {
		req.Header.Set("Content-Type", mediaType)
	}
	res, err := c.Do(req)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(io.LimitReader(res.Body, 1000))
	if err == nil && res.StatusCode >= 300 {
		err = fmt.Errorf("%s %s: %s: %s", method, url, res.Status, text)
	}
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	return nil
}

// one is how one layer came.
type one struct {
	took, first time.Duration
	bytes       int64
	failed      bool
}

// longest is how much of the time from a manifest to a layer is waited: in some traces a client comes back a day later.
const longest = 30 * time.Second

// schedule says when what is asked. Time goes faster, but not that from a client's manifest to the layers of the same
// repository: restoring does not go faster either.
func schedule(requests []trace.Request, speed float64) []trace.Request {
	type shown struct{ was, is time.Duration }
	last := map[[2]string]shown{}
	list := make([]trace.Request, 0, len(requests))
	for _, q := range requests {
		if q.Put {
			continue
		}
		was := q.At
		q.At = time.Duration(float64(was) / speed)
		repo, _, _ := strings.Cut(q.Image, ":")
		who := [2]string{q.Client, repo}
		if q.Manifest {
			last[who] = shown{was, q.At}
		} else if m, ok := last[who]; ok {
			q.At = m.is + min(was-m.was, longest)
		}
		list = append(list, q)
	}
	slices.SortStableFunc(list, func(a, b trace.Request) int { return cmp.Compare(a.At, b.At) })
	return list
}

// play asks for what the trace asks for, as it is scheduled. Requests of one client wait for none of its others.
func (o *Options) play(ctx context.Context, s *server, layers map[string]layer, r *Replayed) error {
	clients := map[string]*http.Client{}
	defer func() {
		for _, c := range clients {
			c.CloseIdleConnections()
		}
	}()
	var mu sync.Mutex
	var got []one
	var work sync.WaitGroup
	slots := make(chan struct{}, 300)
	began := time.Now()
	for _, q := range schedule(o.Requests, o.Speed) {
		wait := time.NewTimer(time.Until(began.Add(q.At)))
		select {
		case <-wait.C:
		case <-ctx.Done():
			work.Wait()
			return ctx.Err()
		}
		c := clients[q.Client]
		if c == nil {
			c = client(len(clients) + 2)
			clients[q.Client] = c
		}
		slots <- struct{}{}
		work.Go(func() {
			defer func() { <-slots }()
			if q.Manifest {
				repo, _, _ := strings.Cut(q.Image, ":")
				_ = o.get(ctx, c, s, repo+"/manifests/1", nil) // an image nobody pulls a layer of was not pushed
				return
			}
			l := layers[q.Layer]
			v := o.get(ctx, c, s, q.Image+"/blobs/"+l.digest.String(), &l)
			mu.Lock()
			defer mu.Unlock()
			got = append(got, v)
		})
	}
	work.Wait()
	var firsts, tooks []time.Duration
	for _, v := range got {
		if v.failed {
			r.Failed++
			continue
		}
		firsts, tooks = append(firsts, v.first), append(tooks, v.took)
		r.Mean += v.took
		r.Moved += v.bytes
	}
	if r.Gets = len(tooks); r.Gets == 0 {
		return errors.New("bench: no layer came")
	}
	slices.Sort(firsts)
	slices.Sort(tooks)
	at := func(list []time.Duration, share float64) time.Duration {
		return list[min(len(list)-1, int(share*float64(len(list))))]
	}
	r.Mean /= time.Duration(r.Gets)
	r.P50, r.P99, r.First, r.First99 = at(tooks, 0.5), at(tooks, 0.99), at(firsts, 0.5), at(firsts, 0.99)
	return ctx.Err()
}

// get gets something, and compares a layer's digest.
func (o *Options) get(ctx context.Context, c *http.Client, s *server, path string, want *layer) (v one) {
	began := time.Now()
	v.failed = true
	req, err := http.NewRequestWithContext(ctx, "GET", "http://"+s.addr+"/v2/"+path, nil)
	if err != nil {
		return v
	}
	req.Header.Set("Accept", "application/vnd.oci.image.manifest.v1+json")
	res, err := c.Do(req)
	if err != nil {
		return v
	}
	defer res.Body.Close()
	b := make([]byte, 64<<10)
	hash := digest.Canonical.Digester()
	for {
		n, err := res.Body.Read(b)
		if n > 0 && v.first == 0 {
			v.first = time.Since(began)
		}
		v.bytes += int64(n)
		hash.Hash().Write(b[:n])
		if err == io.EOF {
			break
		}
		if err != nil {
			return v
		}
	}
	v.took = time.Since(began)
	v.failed = res.StatusCode != http.StatusOK || want != nil && hash.Digest() != want.digest
	return v
}

func write(w io.Writer, all []Replayed) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "SERVER\tPUSHED MB\tSTORED MB\tOF PUSHED\tPUSH\tSETTLE\tGETS\tMEAN\tP50\tP99\tFIRST P50\tFIRST P99\tCPU\tMOVED MB\tFAILED")
	for _, r := range all {
		ms := func(d time.Duration) string { return fmt.Sprintf("%.1f ms", float64(d)/1e6) }
		fmt.Fprintf(tw, "%s\t%.1f\t%.1f\t%.3f\t%.1f s\t%.1f s\t%d\t%s\t%s\t%s\t%s\t%s\t%.1f s\t%.1f\t%d\n", r.Server, float64(r.Pushed)/1e6, float64(r.Stored)/1e6,
			float64(r.Stored)/float64(r.Pushed), r.Push.Seconds(), r.Settle.Seconds(), r.Gets, ms(r.Mean), ms(r.P50), ms(r.P99), ms(r.First), ms(r.First99),
			r.CPU.Seconds(), float64(r.Moved)/1e6, r.Failed)
	}
	return tw.Flush()
}
