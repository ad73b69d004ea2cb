// Package webhooks tells receivers what happens to images: CloudEvents 1.0, in structured JSON, by HTTP POST.
//
// # Events
//
//	dev.hydrofoil.image.pushed.v1    a manifest was pushed, or a tag
//	dev.hydrofoil.image.pulled.v1    somebody got a manifest, or a bundle: once each PullEvery for a subject and an image
//	dev.hydrofoil.image.deleted.v1   a manifest or a tag was deleted
//	dev.hydrofoil.test.v1            foil server webhooks test
//
// Data says what (see Data).
//
// # Delivery
//
// Each event waits in a queue on the disk, for each receiver that wants it (queue.go). A push or a deletion is answered
// when its event is there, durably; pulls are written in the background, and may be lost with the process. An event is
// delivered when the receiver answers 2xx, and may come more than once, always with its id. Each receiver has one request under way, and
// knows nothing of the others. What fails is tried again, later and later; events that a receiver is not
// to blame for alone (400, 410, 413, 415, 422), those that are older than give-up, and those that find the queue full, are dropped,
// which is counted and logged. Order is that of the events as long as nothing fails.
//
// A nil *Sender tells nobody.
package webhooks

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/backoff"
	"hydrofoil.dev/foil/internal/metrics"
	"hydrofoil.dev/foil/internal/server/reread"
)

// Kinds of events, as the configuration has them.
const (
	Push   = "push"
	Pull   = "pull"
	Delete = "delete"
)

var types = map[string]string{
	Push: "dev.hydrofoil.image.pushed.v1", Pull: "dev.hydrofoil.image.pulled.v1", Delete: "dev.hydrofoil.image.deleted.v1",
	"test": "dev.hydrofoil.test.v1",
}

// Data is what happened.
type Data struct {
	Repository string   `json:"repository"`
	Digest     string   `json:"digest,omitempty"` // of the manifest; empty: a tag was deleted
	Tags       []string `json:"tags,omitempty"`   // that were pushed, asked for or deleted
	MediaType  string   `json:"mediaType,omitempty"`
	Size       int64    `json:"size,omitempty"` // of the manifest, in bytes
	// Subject is who did it; empty where nobody is known.
	Subject string `json:"subject,omitempty"`
}

// event is a CloudEvent.
type event struct {
	SpecVersion string    `json:"specversion"`
	ID          string    `json:"id"`
	Source      string    `json:"source"`
	Type        string    `json:"type"`
	Subject     string    `json:"subject,omitempty"`
	Time        time.Time `json:"time"`
	ContentType string    `json:"datacontenttype"`
	Data        Data      `json:"data"`
}

// Options configure a Sender. File and Queue are required.
type Options struct {
	File  string // the configuration
	Queue string // the file of the queue; made when missing
	// First is the pause after one failure, which doubles up to Most; 0 means 1 s and 5 minutes.
	First, Most time.Duration
	// Look is how often the configuration is looked at; 0 means 2 s.
	Look time.Duration
	// Limit is how many events wait for one receiver; 0 means 10,000.
	Limit int
	// Log takes what goes wrong; nil means slog.Default.
	Log *slog.Logger
}

// Sender tells the receivers of one configuration.
type Sender struct {
	o     Options
	log   *slog.Logger
	file  *reread.File[*Config]
	queue *queue
	pulls chan pulled
	stop  context.CancelFunc
	work  sync.WaitGroup

	mu      sync.Mutex
	running map[string]*receiver // guarded by mu: by name
	told    map[string]time.Time // guarded by mu: of pulls, when they were told last

	events, tries *prometheus.CounterVec
}

// pulled is a pull that is not in the queue yet.
type pulled struct {
	data Data
	at   time.Time
}

// Open reads the configuration and begins to deliver what waits.
func Open(ctx context.Context, o Options) (_ *Sender, err error) {
	o.First, o.Most, o.Look = cmp.Or(o.First, time.Second), cmp.Or(o.Most, 5*time.Minute), cmp.Or(o.Look, 2*time.Second)
	o.Limit = cmp.Or(o.Limit, 10_000)
	if o.Log == nil {
		o.Log = slog.Default()
	}
	s := &Sender{
		o: o, log: o.Log, pulls: make(chan pulled, 1024), running: map[string]*receiver{}, told: map[string]time.Time{},
		events: metrics.Counters(prometheus.CounterOpts{Name: "foil_serve_webhook_events_total",
			Help: "Events for receivers: queued, delivered, or dropped: refused, too old, or beyond what may wait."}, []string{"result"}, metrics.Each("queued", "delivered", "dropped")...),
		tries: metrics.Counters(prometheus.CounterOpts{Name: "foil_serve_webhook_tries_total",
			Help: "Requests to receivers; those that failed are sent again."}, []string{"result"}, metrics.Each("ok", "failed")...),
	}
	s.file = &reread.File[*Config]{
		Path: o.File, Parse: parse,
		Failed:  func(err error) { s.log.Error("webhooks stay as they were", "error", err) },
		Changed: func() { s.log.Info("webhooks were read again", "file", o.File) },
	}
	if _, err := s.file.Get(); err != nil {
		return nil, err
	}
	if s.queue, err = openQueue(ctx, o.Queue, false); err != nil {
		return nil, err
	}
	background, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.agree(background)
	s.work.Go(func() { s.watch(background) })
	s.work.Go(func() { s.takePulls(background) })
	return s, nil
}

// Close ends deliveries; what waits is delivered by the next Sender.
func (s *Sender) Close() error {
	if s == nil {
		return nil
	}
	s.stop()
	s.work.Wait()
	return s.queue.Close()
}

// watch follows the configuration.
func (s *Sender) watch(ctx context.Context) {
	for backoff.Wait(ctx, s.o.Look) == nil {
		s.agree(ctx)
	}
}

// agree has a receiver run for each webhook that is configured, and none for others. What waits for
// those is dropped.
func (s *Sender) agree(ctx context.Context) {
	c, _ := s.file.Get() // it was read once, and stays
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, r := range s.running {
		if h := c.find(name); h == nil {
			r.stop()
			delete(s.running, name)
		} else if *r.hook.Load() != h {
			r.hook.Store(&h)
			r.poke(true)
		}
	}
	for _, h := range c.Webhooks {
		if s.running[h.Name] == nil {
			own, stop := context.WithCancel(ctx)
			r := newReceiver(s, h, stop)
			s.running[h.Name] = r
			s.work.Go(func() { r.run(own) })
		}
	}
	dropped, err := s.queue.keepOnly(ctx, c.names())
	if err != nil && ctx.Err() == nil {
		s.log.Error("the queue of webhooks cannot be tidied", "error", err)
	}
	if dropped > 0 {
		s.events.WithLabelValues("dropped").Add(float64(dropped))
		s.log.Warn("events dropped: their webhook is not configured any more", "events", dropped)
	}
}

// Happened queues an event of a kind, and returns when it is durable. What keeps it from that is counted and logged: what
// has happened has.
func (s *Sender) Happened(kind string, d Data) {
	if s == nil {
		return
	}
	s.add(kind, []pulled{{d, time.Now()}})
}

// Pulled queues a pull, in the background, unless one of the same was told lately.
func (s *Sender) Pulled(d Data) {
	if s == nil {
		return
	}
	c, _ := s.file.Get()
	if !c.wants(Pull, d.Repository) {
		return
	}
	now, key := time.Now(), d.Subject+" "+d.Repository+"@"+d.Digest
	s.mu.Lock()
	last, ok := s.told[key]
	lately := ok && now.Sub(last) < time.Duration(c.PullEvery)
	if !lately {
		if len(s.told) >= 100_000 {
			clear(s.told)
		}
		s.told[key] = now
	}
	s.mu.Unlock()
	if lately {
		return
	}
	select {
	case s.pulls <- pulled{d, now}:
	default:
		s.drop("too many pulls at once", 1)
	}
}

// takePulls queues pulls, those that are there together.
func (s *Sender) takePulls(ctx context.Context) {
	for {
		var all []pulled
		select {
		case <-ctx.Done():
			return
		case p := <-s.pulls:
			all = append(all, p)
		}
		for len(all) < 256 && len(s.pulls) > 0 {
			all = append(all, <-s.pulls)
		}
		s.add(Pull, all)
	}
}

// add queues events of one kind for whoever wants them.
func (s *Sender) add(kind string, all []pulled) {
	c, _ := s.file.Get()
	var items []item
	for _, p := range all {
		if !c.wants(kind, p.data.Repository) {
			continue
		}
		id, body, err := encode(c.Source, kind, p.data, p.at)
		if err != nil {
			s.drop(err.Error(), 1)
			continue
		}
		for _, h := range c.Webhooks {
			if h.wants(kind, p.data.Repository) {
				items = append(items, item{webhook: h.Name, id: id, made: p.at, body: body})
			}
		}
	}
	if len(items) == 0 {
		return
	}
	full, err := s.queue.add(context.Background(), items, s.o.Limit)
	if err != nil {
		s.log.Error("events cannot be queued", "error", err)
		full = len(items)
	}
	s.events.WithLabelValues("queued").Add(float64(len(items) - full))
	if full > 0 {
		s.drop("as many as may wait do already, or the disk is full", full)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, i := range items {
		if r := s.running[i.webhook]; r != nil {
			r.poke(false)
		}
	}
}

func (s *Sender) drop(why string, n int) {
	s.events.WithLabelValues("dropped").Add(float64(n))
	s.log.Warn("events dropped", "events", n, "why", why)
}

// encode makes the body of an event.
func encode(source, kind string, d Data, at time.Time) (id string, body []byte, err error) {
	if source == "" {
		host, err := os.Hostname()
		if err != nil {
			return "", nil, err
		}
		source = "//" + host
	}
	subject := d.Repository
	switch {
	case d.Digest != "":
		subject += "@" + d.Digest
	case len(d.Tags) > 0:
		subject += ":" + d.Tags[0]
	}
	id = rand.Text()
	body, err = json.Marshal(event{SpecVersion: "1.0", ID: id, Source: source, Type: types[kind], Subject: subject,
		Time: at.UTC(), ContentType: "application/json", Data: d})
	return id, body, err
}

// Metrics returns what tells of events.
func (s *Sender) Metrics() metrics.Collectors {
	if s == nil {
		return nil
	}
	return metrics.Collectors{s.events, s.tries, prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "foil_serve_webhook_waiting_events",
		Help: "Events that wait for a receiver."}, func() float64 { return float64(s.queue.waiting()) })}
}
