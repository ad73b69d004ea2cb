// Package serve assembles the server: stores, registry, ingest and the bundle
// endpoint behind one port.
//
// What is below a server's root:
//
//	access/   the keys that sign tokens (package login)
//	lock      held (flock) by the server that uses the root
//	catalog/  the SQLite catalog
//	database  instead of catalog/: in which PostgreSQL database it is (package rootdir)
//	objects/  blobs, packs, what ingest makes, and the journal (package objects, Dir)
//	store     instead of objects/: in which bucket they are (package rootdir)
//	near/     what was read of the bucket lately (package near)
//	uploads/  uploads under way (package registry)
//	webhooks.db  events that wait for their receivers (package webhooks)
//	upstream  of an accelerator: the URL of its upstream
//	reserve   room for deletions when the disk is full
//	admin.sock where administrators ask (package admin)
//	scrub.json  how far a scrub is, and what the last one found (package scrub)
//	damaged/  blobs that a scrub found damaged, and could not mend
//	fetching/ downloads from there under way (package upstream)
//
// All of it has to be on one file system, so that a finished upload becomes an
// object without a copy.
package serve

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/durable"
	format "hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/encoder"
	"hydrofoil.dev/foil/internal/format/encoder/programs"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/metrics"
	"hydrofoil.dev/foil/internal/server/admin"
	"hydrofoil.dev/foil/internal/server/bundles"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat"
	"hydrofoil.dev/foil/internal/server/collect"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/guard"
	"hydrofoil.dev/foil/internal/server/ingest"
	"hydrofoil.dev/foil/internal/server/limit"
	"hydrofoil.dev/foil/internal/server/login"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/readers"
	"hydrofoil.dev/foil/internal/server/registry"
	"hydrofoil.dev/foil/internal/server/restore"
	"hydrofoil.dev/foil/internal/server/rootdir"
	"hydrofoil.dev/foil/internal/server/scrub"
	"hydrofoil.dev/foil/internal/server/startup"
	"hydrofoil.dev/foil/internal/server/tcp"
	"hydrofoil.dev/foil/internal/server/upstream"
	"hydrofoil.dev/foil/internal/server/webhooks"
)

// Options configure a Server.
type Options struct {
	// Root is the directory of everything the server keeps. Required.
	Root string
	// Store is the bucket that objects are kept in, as the URL of an s3.Location; empty: the one that the root's were in before, or the root
	// itself.
	Store string
	// Catalog is the PostgreSQL database of the catalog (package postgres); empty: the one that the root's was in before, or a file below
	// the root.
	Catalog string
	// StoreCache bounds what is kept of a bucket on the disk of the root, bytes; 0 means DefaultStoreCache.
	StoreCache int64
	// StoreRedirect is the endpoint by which clients read blobs of the bucket themselves; empty: they are sent the bytes. A URL that one
	// is given counts for StoreRedirectFor, whatever rights its client has then; 0 means DefaultStoreRedirectFor.
	StoreRedirect    string
	StoreRedirectFor time.Duration
	// StoreCheck is how often it is asked whether the bucket is still this root's; 0 means DefaultStoreCheck.
	StoreCheck time.Duration
	// Listen is the TCP address, HOST:PORT; empty means DefaultListen, and port 0 any
	// free one.
	Listen string
	// Access is the file that says who may do what (package guard). Without one everybody who reaches the
	// server may do everything.
	Access string
	// Webhooks is the file that says who is told of pushes, pulls and deletions (package webhooks); empty: nobody.
	Webhooks string
	// InsecureOpen lets the server listen for other machines without TLS, or without Access.
	InsecureOpen bool
	// Audit takes a line of JSON for each decision about access; nil: none are written.
	Audit io.Writer
	// TLSCert and TLSKey are files in PEM form. Without them the server speaks
	// plain HTTP. They are read again for new connections when they change.
	TLSCert, TLSKey string
	// Congestion names the TCP congestion control of what is accepted. Empty or
	// kernel.BBR is BBR where the host has it; tcp.SystemCongestion leaves it to the
	// host; another name must be there.
	Congestion string
	// FirstRate, Mbit/s, is how fast a path is believed to be of which nothing is known yet: a new connection that BBR controls
	// sends at once what such a path holds. 0 leaves that to the route.
	FirstRate int
	// StartupMax is how large a startup set may be; the zero value is a quarter of
	// the image.
	StartupMax startup.Limit
	// ScrubRate has the server read what rests, over and over, at so many bytes a second, and mend it (package scrub); 0: it does not.
	ScrubRate scrub.Rate
	// ScrubEvery is the least time from the beginning of one such pass to that of the next; 0: a day.
	ScrubEvery time.Duration
	// Upstream makes the server an accelerator, if it has a URL. What is to be
	// set besides: Auth, CA, TagTTL, TagTimeout, ClientCredentials, RightsTTL.
	Upstream upstream.Options
	// IdleBody is how long the body of a request may bring nothing; 0 means a minute.
	IdleBody time.Duration
	// IdleAnswer is for how long a client may take nothing of an answer; 0 means two minutes.
	IdleAnswer time.Duration
	// Drain is how long Close goes on accepting requests while ReadyPath says that no more should come, before Grace begins: a load balancer
	// looks elsewhere meanwhile. 0: not at all.
	Drain time.Duration
	// Grace is how long requests under way may go on after Close; 0 means 10 s.
	// A pull that is cut off resumes elsewhere or later.
	Grace time.Duration
	// Collect says how what nobody needs is collected; of it Window, Grace, Leftover, Interval, Rate and PackSize
	// count. Window 0 means catalog.DefaultWindow; negative: nothing can be brought back.
	Collect collect.Options
	// Lease is for how long a blob stays after a client was told that it is there; 0 means catalog.DefaultLease.
	Lease time.Duration
	// Reserve is how much of the disk is left for deleting and collecting, bytes: pushes are refused when less is free.
	// 0 means DefaultReserve; negative: none.
	Reserve int64
	// Log takes a line a request; nil means slog.Default.
	Log *slog.Logger
}

// DefaultListen is for clients on the same machine.
const DefaultListen = "127.0.0.1:5000"

// DefaultFirstRate is the Options.FirstRate of `foil serve`.
const DefaultFirstRate = 100

// Server is a running server.
type Server struct {
	opts     Options
	log      *slog.Logger
	listener net.Listener
	http     *http.Server
	handler  http.Handler
	guard    *guard.Guard       // nil: the server is open
	retainer *retainer          // nil: there is none
	bucket   *rootdir.Attached  // nil: objects are below the root
	metrics  metrics.Collectors // set by open
	database metrics.Collectors // of the catalog's database, if there is one
	closers  []func() error     // what is open, in the order of opening

	closeOnce sync.Once
	closeErr  error
	draining  atomic.Bool
	away      atomic.Bool           // the bucket did not answer when it was asked last
	lost      atomic.Pointer[error] // why the server ends by itself; nil: it does not
	done      chan struct{}         // closed when http.Serve has returned
	serveErr  error                 // of http.Serve; read after done
}

// Start opens the stores below opts.Root and begins to serve.
func Start(ctx context.Context, opts Options) (_ *Server, err error) {
	if opts.Root == "" {
		return nil, errors.New("start server: no root directory is named")
	}
	if (opts.TLSCert == "") != (opts.TLSKey == "") {
		return nil, errors.New("start server: TLS wants both a certificate and a key")
	}
	if opts.Listen == "" {
		opts.Listen = DefaultListen
	}
	if err := checkExposed(opts); err != nil {
		return nil, fmt.Errorf("start server: %w", err)
	}
	if opts.Congestion == "" {
		opts.Congestion = kernel.BBR
	}
	if opts.IdleBody == 0 {
		opts.IdleBody = time.Minute
	}
	if opts.IdleAnswer == 0 {
		opts.IdleAnswer = 2 * time.Minute
	}
	if opts.StoreCheck == 0 {
		opts.StoreCheck = DefaultStoreCheck
	}
	if opts.Grace == 0 {
		opts.Grace = 10 * time.Second
	}
	if opts.Log == nil {
		opts.Log = slog.Default()
	}
	s := &Server{opts: opts, log: opts.Log, done: make(chan struct{})}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("start server: %w", err), s.closeAll())
		}
	}()
	if err := s.open(ctx); err != nil {
		return nil, err
	}
	if err := s.listen(ctx); err != nil {
		return nil, err
	}
	go func() {
		defer close(s.done)
		s.serveErr = s.http.Serve(s.listener)
	}()
	if s.bucket != nil {
		s.closers = append(s.closers, background(s.holdBucket))
	}
	scheme := "http"
	if opts.TLSCert != "" {
		scheme = "https"
	}
	log := s.log
	if opts.Upstream.URL != "" {
		log = log.With("upstream", opts.Upstream.URL)
	}
	if s.bucket != nil {
		log = log.With("store", s.bucket.Location())
	}
	log.Info("serving", "address", s.Addr(), "scheme", scheme, "root", opts.Root)
	return s, nil
}

// parts are what the server is assembled of.
type parts struct {
	local    *sqlcat.Catalog       // below the root
	catalog  catalog.Catalog       // local, or the accelerator's view of it
	rest     objects.Store         // where objects rest: below the root, or in a bucket
	here     objects.Store         // rest, with what is near of a bucket
	store    objects.Store         // here, with blobs that can be restored, or the accelerator's view of it
	front    *upstream.Accelerator // nil: this is no accelerator
	encoders *encoder.Set
	tables   *dedup.Tables // of packs
	blobs    *restore.Blobs
	ingester *ingest.Ingester
	bundle   *bundles.Handler
	queue    *queue
	registry *registry.Registry
	readers  *readers.Readers
	space    *space
	admin    *admin.Admin
	webhooks *webhooks.Sender   // nil: nobody is told
	bucket   metrics.Collectors // of the bucket, if there is one
}

// ReadyPath answers whether requests should be sent to this server: 200, or 503 with the reason.
const ReadyPath = "/readyz"

// open is the paths that ask nobody who they are.
func open(req *http.Request) bool {
	switch req.URL.Path {
	case "/healthz", ReadyPath, login.TokenPath, format.WarmPath:
		return true
	}
	return false
}

// open makes the handler of all requests.
func (s *Server) open(ctx context.Context) error {
	p := parts{readers: new(readers.Readers)}
	if err := s.openStores(ctx, &p); err != nil {
		return err
	}
	p.space = newSpace(s.opts.Root, s.opts.Reserve) // the root is there now
	if err := s.openWebhooks(ctx, &p); err != nil {
		return err
	}
	if err := s.openServices(&p); err != nil {
		return err
	}
	if err := syncToTop(s.opts.Root); err != nil {
		return err
	}
	requests, scrubbed := newRequestMetrics(), scrub.NewMetrics()
	s.metrics = append(append(requests.all(), s.guard.Metrics()...), p.ingester.Metrics, p.blobs.Metrics, p.bundle.Metrics(), p.queue.metrics(), scrubbed)
	s.metrics = append(append(append(s.metrics, p.webhooks.Metrics()...), p.space.metrics()...), p.bucket...)
	s.metrics = append(s.metrics, s.database...)
	if p.admin.Collector != nil {
		s.metrics = append(s.metrics, p.admin.Collector.Metrics()...)
	}
	if s.opts.ScrubRate > 0 {
		s.closers = append(s.closers, s.scrubber(&p, scrubbed))
	}
	if p.front != nil {
		s.metrics = append(s.metrics, p.front.Metrics())
	}
	s.handler = logRequests(s.log, requests, endSlowBodies(s.opts.IdleBody, s.guard.Wrap(s.route(&p), open)))
	return nil
}

// openStores opens what is kept below the root, and what is in front of it.
func (s *Server) openStores(ctx context.Context, p *parts) error {
	root := s.opts.Root
	unlock, err := lockRoot(root)
	if err != nil {
		return err
	}
	s.closers = append(s.closers, unlock)
	if s.opts.Access != "" {
		s.guard, err = guard.Open(guard.Options{File: s.opts.Access, Keys: filepath.Join(root, "access", "keys.json"), Audit: s.opts.Audit, Log: s.log})
		if err != nil {
			return err
		}
	}
	if err := s.openObjects(ctx, p); err != nil {
		return err
	}
	dir := p.here
	if p.local, err = s.openCatalog(ctx, p.rest); err != nil {
		return err
	}
	if err := checkUpstream(ctx, root, s.opts.Upstream.URL, p.local); err != nil {
		return err
	}
	p.store, p.catalog = dir, p.local
	p.encoders = &encoder.Set{Programs: programs.Program}
	s.closers = append(s.closers, p.encoders.Close)
	p.tables = dedup.NewTables(dedup.TableMemory)
	s.closers = append(s.closers, p.tables.Close)
	p.blobs = &restore.Blobs{Store: &dedup.Store{Objects: dir, Catalog: p.local, Tables: p.tables}, Encoders: p.encoders, Metrics: restore.NewMetrics(), Readers: p.readers}
	if s.opts.Upstream.URL == "" {
		front := restore.NewStore(p.blobs, toldHealed(s.log))
		s.closers = append(s.closers, front.Close)
		p.store = front
		return nil
	}
	o := s.opts.Upstream
	o.Dir, o.Catalog, o.Objects, o.Log = filepath.Join(root, "fetching"), p.local, dir, s.log
	if p.front, err = upstream.New(o); err != nil {
		return err
	}
	s.closers = append(s.closers, p.front.Close)
	if o.ClientCredentials {
		if s.guard, err = guard.Relay(guard.RelayOptions{Judge: p.front, Audit: s.opts.Audit, Log: s.log}); err != nil {
			return err
		}
	}
	p.store, p.catalog = p.front.Store(), p.front.Catalog()
	return nil
}

// openWebhooks makes what tells others of what happens.
func (s *Server) openWebhooks(ctx context.Context, p *parts) (err error) {
	if s.opts.Webhooks == "" {
		return nil
	}
	p.webhooks, err = webhooks.Open(ctx, webhooks.Options{File: s.opts.Webhooks, Queue: rootdir.Webhooks(s.opts.Root), Log: s.log})
	if err != nil {
		return fmt.Errorf("webhooks: %w", err)
	}
	s.closers = append(s.closers, p.webhooks.Close)
	return nil
}

// openServices makes what works on the stores.
func (s *Server) openServices(p *parts) (err error) {
	p.ingester = &ingest.Ingester{Objects: p.store, Catalog: p.catalog, Tables: p.tables, Metrics: ingest.NewMetrics(), Readers: p.readers, Room: p.space.full}
	if p.front != nil {
		p.ingester.Options.Parallel = upstream.Parallel
	}
	s.closers = append(s.closers, p.ingester.Close)
	// Half of the processors are left for what is light.
	heavy := limit.NewHeavy[guard.Client](max(1, runtime.GOMAXPROCS(0)/2))
	p.bundle = bundles.New(bundles.Options{
		Heavy:      heavy,
		Catalog:    p.catalog,
		Objects:    p.store,
		Tables:     p.tables,
		Rootfs:     fetched(p.front, rootfsOf(p.ingester.Rootfs, p.catalog, p.store, s.log)),
		Repair:     fetched(p.front, rootfsOf(repair(p.ingester, p.store, p.blobs), p.catalog, p.store, s.log)),
		Recipe:     recipeOf(p.ingester),
		StartupMax: s.opts.StartupMax,
		Patience:   s.opts.IdleAnswer,
		Guard:      s.guard,
		Readers:    p.readers,
		Webhooks:   p.webhooks,
		Log:        s.log,
	})
	s.closers = append(s.closers, p.bundle.Close)
	p.queue = newQueue(p.bundle, s.guard, p.front, p.catalog, s.log)
	s.closers = append(s.closers, p.queue.Close, makeRecipes(p.ingester, p.here, s.log), prove(p.ingester, p.encoders, p.here, s.log))
	bounds, err := s.bound(p)
	if err != nil {
		return err
	}
	if p.front != nil {
		heavy = nil // who asks an upstream waits for it, which nobody else has to
	}
	redirect, err := s.redirects(p)
	if err != nil {
		return err
	}
	p.registry, err = registry.New(registry.Options{
		Redirect:   redirect,
		Bounds:     bounds,
		Store:      p.store,
		Catalog:    p.catalog,
		Uploads:    filepath.Join(s.opts.Root, "uploads"),
		OnManifest: p.queue.add,
		Room:       p.space.room,
		Heal:       p.blobs.Heal,
		Guard:      s.guard,
		Heavy:      heavy,
		Webhooks:   p.webhooks,
		Log:        s.log,
	})
	if err != nil {
		return err
	}
	s.closers = append(s.closers, p.registry.Close)
	if err := p.space.refill(); err != nil {
		return err
	}
	return s.openCollector(p)
}

// route says who answers which path.
func (s *Server) route(p *parts) http.Handler {
	mux := http.NewServeMux()
	var v2 http.Handler = p.registry
	if p.front != nil {
		v2 = p.front.ReadOnly(p.registry)
		mux.Handle("POST "+upstream.WebhookPath, p.front.Webhook(p.queue.told, s.mayNotify, refuse))
	}
	v2 = tcp.PatientHandler(v2, s.opts.IdleAnswer)
	mux.Handle("/v2", v2)
	mux.Handle("/v2/", v2)
	for _, e := range bundles.Endpoints() {
		mux.Handle(e.Method+" "+e.Path, p.bundle)
	}
	mux.Handle(admin.Prefix, p.admin.Handler(s.mayAdminister))
	if s.guard != nil {
		if !s.guard.Relays() { // else the upstream names its own
			mux.HandleFunc(login.TokenPath, s.guard.Token)
		}
		mux.HandleFunc("GET "+MetricsPath, s.serveMetrics)
	}
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, req *http.Request) {
		if _, err := p.local.ListRepositories(req.Context(), "", 0); err != nil {
			s.log.Error("not healthy", "error", err)
			http.Error(w, "the catalog cannot be read", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
		if low := p.space.low(); low != "" { // no reason to restart it: a probe is content
			fmt.Fprintln(w, low)
		}
	})
	mux.HandleFunc("GET "+ReadyPath, func(w http.ResponseWriter, req *http.Request) {
		reason := ""
		if s.draining.Load() {
			reason = "the server ends"
		} else if s.away.Load() {
			reason = "the bucket does not answer"
		} else if _, err := p.local.ListRepositories(req.Context(), "", 0); err != nil {
			reason = "the catalog cannot be read"
		}
		if reason != "" {
			http.Error(w, reason, http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return mux
}

func (s *Server) listen(ctx context.Context) error {
	s.http = &http.Server{
		Handler:     tcp.Handler(s.handler, func(r *http.Request) bool { return r.URL.Path == format.PullPath }),
		ConnContext: tcp.ConnContext,
		ErrorLog:    slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		// A body may take as long as it takes, in either direction: there is no
		// timeout for whole requests. Headers are short.
		ReadHeaderTimeout: 30 * time.Second,
		// Workers keep a warm connection; the price is one descriptor.
		IdleTimeout: 15 * time.Minute,
		Protocols:   new(http.Protocols),
		HTTP2: &http.HTTP2Config{
			// Pushes go at one window a round trip: the largest window there is.
			MaxReceiveBufferPerConnection: 4<<20 - 1,
			MaxReceiveBufferPerStream:     4<<20 - 1,
			// Peers that vanished without a word.
			SendPingTimeout:  30 * time.Second,
			PingTimeout:      30 * time.Second,
			WriteByteTimeout: 2 * time.Minute,
		},
	}
	s.http.Protocols.SetHTTP1(true)
	s.http.Protocols.SetHTTP2(true)
	s.http.Protocols.SetUnencryptedHTTP2(true)

	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", s.opts.Listen)
	if errors.Is(err, unix.EADDRINUSE) {
		return fmt.Errorf("%w: end what listens there (ss -ltnp shows it), or name another address", err)
	}
	if err != nil {
		return err
	}
	plain := tcp.NewListener(l.(*net.TCPListener), s.opts.Congestion, int64(s.opts.FirstRate)*1e6/8)
	switch others := plain.CongestionErr; {
	case others != nil && s.opts.Congestion != kernel.BBR:
		err := fmt.Errorf("%w: this host has those of /proc/sys/net/ipv4/tcp_available_congestion_control; modprobe tcp_%s may add it, and %s leaves the choice to the host",
			others, s.opts.Congestion, tcp.SystemCongestion)
		return errors.Join(err, plain.Close())
	case others != nil && kernel.IdleRestart():
		s.log.Warn("idle connections lose their rate", "error", others, "fix", kernel.BBRFix)
	}
	if plain.FlightErr != nil {
		s.log.Warn("pulls over long paths are slow", "error", plain.FlightErr, "fix", kernel.FlightFix)
	}
	if plain.FirstErr != nil {
		s.log.Warn("first contacts over long paths are slow", "error", plain.FirstErr, "fix", kernel.FirstFlightFix)
	}
	plain.Shared = s.guard != nil // clients are told apart
	s.listener = plain
	if s.opts.TLSCert != "" {
		pair := &keyPair{cert: s.opts.TLSCert, key: s.opts.TLSKey}
		if _, err := pair.get(nil); err != nil {
			return errors.Join(err, s.listener.Close())
		}
		s.listener = tls.NewListener(s.listener, s.tlsConfig(pair))
	}
	return nil
}

// Addr is the address that the server listens on.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// Wait blocks until the server has ended, by Close or by an error.
func (s *Server) Wait() error {
	<-s.done
	if why := s.lost.Load(); why != nil {
		return fmt.Errorf("serve: %w", *why)
	}
	if errors.Is(s.serveErr, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serve: %w", s.serveErr)
}

// Close drains the server, stops listening, lets the requests under way go on for the grace
// period, ends them, and closes the stores.
func (s *Server) Close() error {
	s.closeOnce.Do(func() {
		s.draining.Store(true)
		select {
		case <-time.After(s.opts.Drain):
		case <-s.done:
		}
		ctx, cancel := context.WithTimeout(context.Background(), s.opts.Grace)
		defer cancel()
		err := s.http.Shutdown(ctx)
		if errors.Is(err, context.DeadlineExceeded) {
			s.log.Warn("requests cut off", "grace", s.opts.Grace)
			err = s.http.Close()
		}
		<-s.done
		s.closeErr = errors.Join(err, s.closeAll())
	})
	return s.closeErr
}

// closeAll closes what open opened, the last first.
func (s *Server) closeAll() error {
	var errs []error
	for i := len(s.closers) - 1; i >= 0; i-- {
		errs = append(errs, s.closers[i]())
	}
	s.closers = nil
	return errors.Join(errs...)
}

// syncToTop makes the names in dir durable, and dir's own name, and those of
// its parents, any of which may just have been made.
func syncToTop(dir string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	for {
		if err := durable.Sync(dir); err != nil {
			return err
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return nil
		}
		dir = parent
	}
}
