// Package serving measures the server's side: how fast one bundle is sent to many
// workers that ask for it at once (Starlight, NSDI'22, figure 7), against nginx
// sending the same bytes from a file; and how long planning takes against the
// size of an image.
//
// foil serve is asked over HTTP/2, as workers ask, and over HTTP/1.1, as nginx is.
// Both servers are given one core, and the clients, which throw away what they
// get, the others. They are measured in turns, in each round one after the
// other, over the loopback of a network namespace: nothing is emulated. What a
// busy machine disturbs least is the processor time that a server spends on a
// gigabyte; the rate is what it sends as fast as its core goes.
package serving

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/images"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
	"hydrofoil.dev/foil/bench/stats"
	"hydrofoil.dev/foil/internal/format/bundle"
)

// Options say what is measured.
type Options struct {
	Foil    string
	Images  []string // names of declared images, without tags; the first is served
	Workers []int    // how many at once
	Period  time.Duration
	Rounds  int
	Cache   string // directory on a disk
	Out     io.Writer
	JSON    string // file for the result; "" for none
	Log     func(line string)
}

// Result is what was measured.
type Result struct {
	Image   string   `json:"image"`
	Bytes   int64    `json:"bytes"` // of one bundle
	Serving []Served `json:"serving"`
	Plans   []Plan   `json:"plans"`
}

// Served is one server with some workers, the medians of the rounds.
type Served struct {
	Server  string        `json:"server"`
	Workers int           `json:"workers"`
	Rate    float64       `json:"rate"`            // bytes a second, all workers together
	CPU     float64       `json:"cpu_seconds_gb"`  // processor seconds for each gigabyte
	First   time.Duration `json:"first_byte_ns"`   // median time to the first byte of a body
	Failed  int64         `json:"failed_requests"` // in all rounds
}

// Plan is the time to plan a bundle: from the request until the plan has been
// read, the whole TOC before it included.
type Plan struct {
	Image    string        `json:"image"`
	Kind     string        `json:"kind"` // fresh, or update
	Segments uint32        `json:"segments"`
	Frames   int           `json:"frames"`
	First    time.Duration `json:"first_ns"`  // with nothing in the server's memory
	Median   time.Duration `json:"median_ns"` // of the ones after it
	Bytes    int64         `json:"bytes"`     // of the stream until then
}

// The cores: the server's one, and the clients'.
const serverCore = "0"

// Run measures. It must run inside site.Confine.
func Run(ctx context.Context, o Options) (err error) {
	if err := site.Furnish(); err != nil {
		return err
	}
	for _, path := range []*string{&o.Cache, &o.Foil} {
		if *path, err = filepath.Abs(*path); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	}
	if runtime.NumCPU() < 2 {
		return errors.New("bench: one core for the server and one for the clients are needed")
	}
	built, err := build(ctx, o)
	if err != nil {
		return err
	}
	dir, err := site.Scratch(o.Cache, "server-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, site.RemoveTree(dir)) }()
	l, err := link.New(context.WithoutCancel(ctx), link.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	b := &bench{Options: o, site: &site.Site{Dir: dir, Link: l}, root: filepath.Join(dir, "serve")}
	if err := b.start(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.foil.Stop(syscall.SIGTERM)) }()
	for _, im := range built {
		if err := engines.Push(ctx, b.site, im); err != nil {
			return err
		}
		// The rootfs is made at the latest when it is asked for: not to be measured.
		if _, err := b.fetch(ctx, request(im), io.Discard); err != nil {
			return fmt.Errorf("bench: prepare %s: %w", im.Name, err)
		}
		b.log("%s is pushed and ingested", im.Name)
	}
	result := Result{Image: built[0].Name}
	if result.Plans, err = b.plans(ctx, built); err != nil {
		return err
	}
	if result.Serving, result.Bytes, err = b.serving(ctx, built[0]); err != nil {
		return err
	}
	if o.JSON != "" {
		text, err := json.MarshalIndent(result, "", "\t")
		if err != nil {
			return fmt.Errorf("bench: %w", err)
		}
		if err := os.WriteFile(o.JSON, append(text, '\n'), 0o644); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	}
	return result.Write(o.Out)
}

// build makes the images, in all their versions.
func build(ctx context.Context, o Options) (all []engines.Image, err error) {
	catalogue, err := images.Declared()
	if err != nil {
		return nil, err
	}
	builder := images.Builder{Cache: filepath.Join(o.Cache, "images"), Log: o.Log}
	for _, name := range o.Images {
		n := len(all)
		for _, image := range catalogue.Images {
			if image.Name != name {
				continue
			}
			ref := image.Name + ":" + image.Tag
			built, err := builder.Build(ctx, catalogue, ref)
			if err != nil {
				return nil, err
			}
			all = append(all, engines.Image{Name: ref, Ref: engines.RegistryAddr + "/" + ref, Built: built})
		}
		if len(all) == n {
			return nil, fmt.Errorf("bench: no image is called %q; `bench images` lists those that are declared", name)
		}
	}
	return all, nil
}

type bench struct {
	Options
	site *site.Site
	root string
	foil *site.Process
}

func (b *bench) log(format string, args ...any) {
	if b.Log != nil {
		b.Log(fmt.Sprintf(format, args...))
	}
}

// start starts foil serve on its core; GOMAXPROCS follows from that.
func (b *bench) start(ctx context.Context) (err error) {
	b.foil, err = engines.Serve(ctx, b.site, b.Foil, b.root, "taskset", "-c", serverCore)
	return err
}

// client is for one worker: a connection of its own, in the cloud itself.
func (b *bench) client() *http.Client {
	return &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return b.site.Link.DialContext(ctx, link.Cloud, network, address)
		},
		DisableCompression: true,
	}}
}

// h2 makes a client speak HTTP/2 without TLS, as workers do.
func h2(client *http.Client) {
	t := client.Transport.(*http.Transport)
	if t.Protocols == nil {
		t.Protocols = new(http.Protocols)
		t.Protocols.SetUnencryptedHTTP2(true)
		t.HTTP2 = &http.HTTP2Config{MaxReceiveBufferPerStream: 16 << 20, MaxReadFrameSize: 256 << 10}
	}
}

func request(im engines.Image, have ...bundle.Have) *bundle.Request {
	_, rest, _ := strings.Cut(im.Ref, "/")
	repository, tag, _ := strings.Cut(rest, ":")
	return &bundle.Request{
		Versions: []int{bundle.Version}, Have: have,
		Image: bundle.ImageRequest{Repository: repository, Reference: tag},
	}
}

func post(ctx context.Context, client *http.Client, q *bundle.Request) (*http.Response, error) {
	body, err := json.Marshal(q)
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+engines.RegistryAddr+bundle.PullPath, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	r.Header.Set("Content-Type", bundle.MediaTypeRequest)
	return answered(client.Do(r))
}

func answered(response *http.Response, err error) (*http.Response, error) {
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(response.Body, 1000))
		response.Body.Close()
		return nil, fmt.Errorf("bench: the server answered %s: %s", response.Status, text)
	}
	return response, nil
}

// fetch gets one bundle whole.
func (b *bench) fetch(ctx context.Context, q *bundle.Request, to io.Writer) (int64, error) {
	client := b.client()
	defer client.CloseIdleConnections()
	response, err := post(ctx, client, q)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	n, err := io.Copy(to, response.Body)
	if err != nil {
		return n, fmt.Errorf("bench: read a bundle: %w", err)
	}
	return n, nil
}

// plans measures planning, for each image fresh and for second versions as an
// update. For the first time the server is started anew.
func (b *bench) plans(ctx context.Context, built []engines.Image) (plans []Plan, err error) {
	var earlier *bundle.Image
	for i, im := range built {
		name, _, _ := strings.Cut(im.Name, ":")
		if i == 0 || !strings.HasPrefix(built[i-1].Name, name+":") {
			earlier = nil
		}
		p := Plan{Image: im.Name, Kind: "fresh"}
		q := request(im)
		if earlier != nil {
			p.Kind = "update"
			q = request(im, bundle.Have{ChainID: earlier.ChainID, TOC: earlier.TOCDigest})
		}
		if err := b.foil.Stop(syscall.SIGTERM); err != nil {
			return nil, err
		}
		if err := b.start(ctx); err != nil {
			return nil, err
		}
		var times []float64
		for try := range 11 {
			took, header, err := b.plan(ctx, q, &p)
			if err != nil {
				return nil, fmt.Errorf("bench: plan %s: %w", im.Name, err)
			}
			if try == 0 {
				p.First, earlier = took, header
				continue
			}
			times = append(times, took.Seconds())
		}
		p.Median = time.Duration(stats.Median(times) * float64(time.Second))
		b.log("planning %s, %s: %d segments, %v, then %v", p.Image, p.Kind, p.Segments, p.First.Round(time.Microsecond), p.Median.Round(time.Microsecond))
		plans = append(plans, p)
	}
	return plans, nil
}

func (b *bench) plan(ctx context.Context, q *bundle.Request, p *Plan) (took time.Duration, header *bundle.Image, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream
	client := b.client()
	defer client.CloseIdleConnections()
	began := time.Now()
	response, err := post(ctx, client, q)
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close()
	r := bundle.NewReader(response.Body, bundle.ReaderOptions{Request: q})
	for {
		section, err := r.Next()
		if err != nil {
			return 0, nil, err
		}
		switch s := section.(type) {
		case *bundle.Image:
			header, p.Segments = s, s.Segments
		case *bundle.Plan:
			p.Frames, p.Bytes = len(s.Frames), r.Bytes()
			return time.Since(began), header, nil
		}
	}
}

// serving measures both servers, for each number of workers, in turns.
func (b *bench) serving(ctx context.Context, im engines.Image) (all []Served, size int64, err error) {
	static := filepath.Join(b.site.Dir, "static")
	if err := os.Mkdir(static, 0o755); err != nil {
		return nil, 0, fmt.Errorf("bench: %w", err)
	}
	file, err := os.Create(filepath.Join(static, "bundle"))
	if err != nil {
		return nil, 0, fmt.Errorf("bench: %w", err)
	}
	size, err = b.fetch(ctx, request(im), file)
	if err := errors.Join(err, file.Close()); err != nil {
		return nil, 0, err
	}
	nginx, err := b.nginx(ctx, static)
	if err != nil {
		return nil, 0, err
	}
	defer func() { err = errors.Join(err, nginx.Stop(syscall.SIGTERM)) }()
	restore, err := keepOff()
	if err != nil {
		return nil, 0, err
	}
	defer restore()
	servers := []struct {
		name string
		pid  int
		get  func(ctx context.Context, client *http.Client) (*http.Response, error)
	}{
		{"foil serve", b.foil.PID(), func(ctx context.Context, client *http.Client) (*http.Response, error) {
			return post(ctx, client, request(im))
		}},
		{"foil serve, HTTP/2", b.foil.PID(), func(ctx context.Context, client *http.Client) (*http.Response, error) {
			h2(client)
			return post(ctx, client, request(im))
		}},
		{"nginx", nginx.PID(), func(ctx context.Context, client *http.Client) (*http.Response, error) {
			r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+nginxAddr+"/bundle", nil)
			if err != nil {
				return nil, fmt.Errorf("bench: %w", err)
			}
			return answered(client.Do(r))
		}},
	}
	for _, workers := range b.Workers {
		rates, cpus, firsts := make([][]float64, len(servers)), make([][]float64, len(servers)), make([][]float64, len(servers))
		failed := make([]int64, len(servers))
		for round := range b.Rounds {
			for i := range servers {
				i = (i + round) % len(servers)
				s := servers[i]
				moved, took, cpu, first, bad := b.load(ctx, workers, s.pid, s.get)
				if ctx.Err() != nil {
					return nil, 0, context.Cause(ctx)
				}
				if moved == 0 {
					return nil, 0, fmt.Errorf("bench: %s sent nothing to %d workers", s.name, workers)
				}
				rates[i] = append(rates[i], float64(moved)/took.Seconds())
				cpus[i] = append(cpus[i], cpu.Seconds()/(float64(moved)/1e9))
				firsts[i] = append(firsts[i], first)
				failed[i] += bad
			}
		}
		for i, s := range servers {
			b.log("%d workers: %s %.0f MB/s", workers, s.name, stats.Median(rates[i])/1e6)
			all = append(all, Served{s.name, workers, stats.Median(rates[i]), stats.Median(cpus[i]),
				time.Duration(stats.Median(firsts[i]) * float64(time.Second)), failed[i]})
		}
	}
	return all, size, nil
}

// load has workers ask again and again for a period.
func (b *bench) load(ctx context.Context, workers, pid int, get func(ctx context.Context, client *http.Client) (*http.Response, error)) (moved int64, took, cpu time.Duration, first float64, failed int64) {
	ctx, cancel := context.WithTimeout(ctx, b.Period)
	defer cancel()
	var sum, bad atomic.Int64
	var mu sync.Mutex
	var firsts []float64
	var running sync.WaitGroup
	before := engines.ProcessorTime(pid)
	began := time.Now()
	for range workers {
		running.Go(func() {
			client := b.client()
			defer client.CloseIdleConnections()
			buffer := make([]byte, 1<<20)
			for ctx.Err() == nil {
				asked := time.Now()
				response, err := get(ctx, client)
				if err != nil {
					if ctx.Err() == nil {
						bad.Add(1)
						time.Sleep(10 * time.Millisecond)
					}
					continue
				}
				for n := 0; err == nil; {
					n, err = response.Body.Read(buffer)
					if n > 0 && !asked.IsZero() {
						mu.Lock()
						firsts = append(firsts, time.Since(asked).Seconds())
						mu.Unlock()
						asked = time.Time{}
					}
					sum.Add(int64(n))
				}
				response.Body.Close()
				if !errors.Is(err, io.EOF) && ctx.Err() == nil {
					bad.Add(1)
				}
			}
		})
	}
	running.Wait()
	return sum.Load(), time.Since(began), engines.ProcessorTime(pid) - before, stats.Median(firsts), bad.Load()
}

const nginxAddr = "192.0.2.1:8080"

// nginx serves a directory with one process on the server's core.
func (b *bench) nginx(ctx context.Context, dir string) (*site.Process, error) {
	config := fmt.Sprintf(`
daemon off;
user root;
worker_processes 1;
pid %[1]s/nginx.pid;
error_log %[1]s/nginx-error.log;
events { worker_connections 2048; }
http {
	access_log off;
	sendfile on;
	tcp_nopush on;
	server {
		listen %[2]s;
		root %[3]s;
	}
}
`, b.site.Dir, nginxAddr, dir)
	path := filepath.Join(b.site.Dir, "nginx.conf")
	if err := os.WriteFile(path, []byte(config), 0o644); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	p, err := b.site.Start(link.Cloud, nil, "taskset", "-c", serverCore, "nginx", "-c", path)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, 20*time.Second, site.ErrTooLong)
	defer cancel()
	return p, p.Until(ctx, "start nginx", func() bool {
		conn, err := b.site.Link.DialContext(ctx, link.Cloud, "tcp4", nginxAddr)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
}

// keepOff keeps this program's threads, those to come included, off the server's
// core.
func keepOff() (restore func(), err error) {
	var was, others unix.CPUSet
	if err := unix.SchedGetaffinity(0, &was); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	others = was
	others.Clear(0)
	set := func(cpus *unix.CPUSet) error {
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return fmt.Errorf("bench: %w", err)
		}
		for _, task := range tasks {
			id, err := strconv.Atoi(task.Name())
			if err != nil {
				continue
			}
			if err := unix.SchedSetaffinity(id, cpus); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("bench: keep off core %s: %w", serverCore, err)
			}
		}
		return nil
	}
	return func() { set(&was) }, set(&others)
}

// Write writes a result as two tables.
func (r Result) Write(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintf(t, "\nPlanning, from the request to the end of the plan\n\nimage\tkind\tsegments\tframes\tstream by then\tfirst time\tlater (median)\n")
	for _, p := range r.Plans {
		fmt.Fprintf(t, "%s\t%s\t%d\t%d\t%.2f MB\t%.1f ms\t%.1f ms\n", p.Image, p.Kind, p.Segments, p.Frames, float64(p.Bytes)/1e6,
			p.First.Seconds()*1e3, p.Median.Seconds()*1e3)
	}
	fmt.Fprintf(t, "\nServing the bundle of %s (%.1f MB) on one core\n\nworkers\tserver\trate\tof nginx\tCPU for a GB\tof nginx\tfirst byte\tfailed\n", r.Image, float64(r.Bytes)/1e6)
	nginx := map[int]Served{}
	for _, s := range r.Serving {
		if s.Server == "nginx" {
			nginx[s.Workers] = s
		}
	}
	for _, s := range r.Serving {
		n := nginx[s.Workers]
		fmt.Fprintf(t, "%d\t%s\t%.0f MB/s\t%.2f\t%.2f s\t%.2f\t%.1f ms\t%d\n", s.Workers, s.Server, s.Rate/1e6, s.Rate/n.Rate, s.CPU, s.CPU/n.CPU, s.First.Seconds()*1e3, s.Failed)
	}
	return t.Flush()
}
