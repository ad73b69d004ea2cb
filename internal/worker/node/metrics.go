package node

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/metrics"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/fetch"
)

// How a daemon began: what it found of the one before.
const (
	beganNew      = "new"      // no gate, and nothing that needed one
	beganTakeover = "takeover" // a gate, which it took over
	beganLost     = "lost"     // mounts over incomplete arenas, and no gate
)

// nodeMetrics counts what a daemon does. docs/metrics.md lists all.
type nodeMetrics struct {
	pulls    *prometheus.CounterVec
	failures *prometheus.CounterVec
	mount    prometheus.Histogram
	ready    prometheus.Histogram
	wait     prometheus.Histogram
	reused   *prometheus.CounterVec
	pages    *prometheus.CounterVec
	evicted  prometheus.Counter
	keepers  prometheus.Counter

	mu      sync.Mutex
	running map[*fetch.Pull]struct{} // guarded by mu
	ended   fetch.Progress           // guarded by mu: sums of those that have ended
}

func newMetrics() *nodeMetrics {
	seconds := []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300}
	histogram := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: seconds})
	}
	return &nodeMetrics{
		pulls: metrics.Counters(prometheus.CounterOpts{Name: "foil_node_pulls_total",
			Help: "Pulls that have ended: complete, failed, or stopped (by a removal, or the end of the daemon)."},
			[]string{"result"}, metrics.Each("complete", "failed", "stopped")...),
		failures: metrics.Counters(prometheus.CounterOpts{Name: "foil_node_pull_failures_total",
			Help: "Pulls that failed, by the code of the error."},
			[]string{"code"}, metrics.Each(api.Codes...)...),
		mount: histogram("foil_node_mount_seconds", "From the begin of a pull until containers could start on the image."),
		ready: histogram("foil_node_ready_seconds", "From the start of a container's process until its probe said ready (those of foil run: nobody says when others are)."),
		wait:  histogram("foil_node_read_wait_seconds", "How long reads waited for bytes that were absent: its count is that of the reads."),
		reused: metrics.Counters(prometheus.CounterOpts{Name: "foil_node_reused_bytes_total",
			Help: "Bytes of contents that pulls had from the disk: shared in the arena of another image, or copied from there."},
			[]string{"how"}, metrics.Each("shared", "copied")...),
		pages: metrics.Counters(prometheus.CounterOpts{Name: "foil_node_startup_pages_total",
			Help: "Pages of 4 KiB of startup sets: hit, read until the container was ready, or unused by then. Only starts that are reported (--report) are looked at."},
			[]string{"result"}, metrics.Each("hit", "unused")...),
		evicted: prometheus.NewCounter(prometheus.CounterOpts{Name: "foil_node_evictions_total", Help: "Images that were removed because of the disk limit."}),
		keepers: prometheus.NewCounter(prometheus.CounterOpts{Name: "foil_node_keeper_restarts_total", Help: "Keepers that died and were replaced. Each is worth a look at the log."}),
		running: make(map[*fetch.Pull]struct{}),
	}
}

// begin counts a fetch from now on.
func (m *nodeMetrics) begin(f *fetch.Pull) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.running[f] = struct{}{}
}

// end keeps what a fetch that has ended did.
func (m *nodeMetrics) end(f *fetch.Pull) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.running, f)
	addProgress(&m.ended, f.Progress())
}

func addProgress(sum *fetch.Progress, p fetch.Progress) {
	sum.Moved += p.Moved
	sum.Stored += p.Stored
	sum.Startup.Raw += p.Startup.Raw
	sum.Promotions += p.Promotions
	sum.Damaged += p.Damaged
	sum.Resumes += p.Resumes
}

// fetched sums what all fetches did.
func (m *nodeMetrics) fetched() fetch.Progress {
	m.mu.Lock()
	defer m.mu.Unlock()
	sum := m.ended
	for f := range m.running {
		addProgress(&sum, f.Progress())
	}
	return sum
}

// over counts a pull that has ended.
func (m *nodeMetrics) over(stopped bool, err error) {
	switch {
	case err == nil:
		m.pulls.WithLabelValues("complete").Inc()
	case stopped:
		m.pulls.WithLabelValues("stopped").Inc()
	default:
		m.pulls.WithLabelValues("failed").Inc()
		m.failures.WithLabelValues(asError(err).Code).Inc()
	}
}

// What is looked up when somebody asks.
var (
	descInfo       = describe("info", "1; the version of the daemon and the kind of its gate.", "version", "gate")
	descBegan      = describe("start", "1 for how the daemon began: new, takeover of the gate of the one before, or lost: containers may have to be started again, see foil status.", "kind")
	descWarnings   = describe("warnings", "What foil status warns of.")
	descRunning    = describe("pulls_running", "Pulls under way.")
	descReceived   = describe("received_bytes_total", "Bytes that came over the network as bundles.")
	descWritten    = describe("written_bytes_total", "Bytes of contents that came in bundles, were verified and written to arenas.")
	descStartup    = describe("startup_bytes_total", "Bytes of pages of startup sets that were written.")
	descPromotions = describe("promotions_total", "Frames that were asked for out of turn, because a read waited.")
	descDamaged    = describe("damaged_frames_total", "Frames that arrived damaged, and were asked for again.")
	descResumes    = describe("stream_resumes_total", "Streams that broke and were resumed.")
	descEvents     = describe("gate_events_total", "Reads that met the gate.")
	descWaits      = describe("gate_waits_total", "Of these: found bytes absent and had to wait.")
	descDenied     = describe("gate_denied_total", "Of these: failed with EIO.")
	descPending    = describe("gate_pending", "Reads that the gate has not answered now.")
	descImages     = describe("images", "Images, by state.", "state")
	descContainers = describe("containers", "Containers of foil run.")
	descArenas     = describe("arenas", "Arenas, by state; lender: of removed images, kept for what others use of it.", "state")
	descDisk       = describe("disk_bytes", "What rootfs take on the disk, by the state of their arenas.", "state")
	descLimit      = describe("disk_limit_bytes", "The limit above which unused images are evicted (--disk-limit); +Inf: none.")
	descFree       = describe("disk_free_bytes", "What is free on the filesystem of the root.")
	descSize       = describe("disk_size_bytes", "The size of that filesystem.")
	descKeeper     = describe("keeper_up", "1 while a keeper holds the gate together with the daemon. 0 for more than a moment: a crash of the daemon would be a hazard.")
	descServer     = describe("server_up", "1 while the connection to a server of --connect is there and warm.", "server")
	descRate       = describe("server_rate_bytes_per_second", "The rate at which that connection was warmed up; 0: it was not.", "server")
)

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("foil_node_"+name, help, labels, nil)
}

// Metrics returns what tells of the daemon. It must not be asked after Close.
func (n *Node) Metrics() prometheus.Collector {
	m := n.metrics
	return metrics.Collectors{m.pulls, m.failures, m.mount, m.ready, m.wait, m.reused, m.pages, m.evicted, m.keepers, state{n}}
}

// state collects what is looked up.
type state struct{ n *Node }

// Describe implements prometheus.Collector.
func (state) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descInfo, descBegan, descWarnings, descRunning, descReceived, descWritten, descStartup, descPromotions, descDamaged, descResumes,
		descEvents, descWaits, descDenied, descPending, descImages, descContainers, descArenas, descDisk, descLimit, descFree, descSize,
		descKeeper, descServer, descRate,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (s state) Collect(ch chan<- prometheus.Metric) {
	n := s.n
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v int64) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v))
	}
	gauge(descInfo, 1, n.opts.Version, n.gateName())
	for _, kind := range []string{beganNew, beganTakeover, beganLost} {
		gauge(descBegan, toFloat(kind == n.began), kind)
	}
	sum := n.metrics.fetched()
	counter(descReceived, sum.Moved)
	counter(descWritten, sum.Stored)
	counter(descStartup, sum.Startup.Raw)
	counter(descPromotions, sum.Promotions)
	counter(descDamaged, sum.Damaged)
	counter(descResumes, sum.Resumes)
	g := n.gate.Stats()
	counter(descEvents, g.Events)
	counter(descWaits, g.Waits)
	counter(descDenied, g.Denied)
	gauge(descPending, float64(g.Pending))
	gauge(descKeeper, toFloat(n.keeper.PID() != 0))

	images := map[string]int{"complete": 0, "pulling": 0, "broken": 0}
	arenas := map[string]int{"complete": 0, "incomplete": 0, "broken": 0, "lender": 0}
	stateOf := make(map[string]string) // of directories
	running := 0
	n.mu.Lock()
	gauge(descWarnings, float64(len(n.warnings)))
	gauge(descContainers, float64(len(n.containers)))
	for _, p := range n.pulls {
		if !p.ended() {
			running++
		}
	}
	for _, img := range n.images {
		images[n.imageState(img)]++
	}
	for _, r := range n.rootfs {
		state := "incomplete"
		switch {
		case r.broken != nil:
			state = "broken"
		case r.rec.Complete:
			state = "complete"
		}
		arenas[state]++
		stateOf[r.dir] = state
	}
	for _, r := range n.lent {
		arenas["lender"]++
		stateOf[r.dir] = "lender"
	}
	for _, c := range n.kept {
		w, ok := c.Kept()
		gauge(descServer, toFloat(ok), c.Base())
		gauge(descRate, w.Rate, c.Base())
	}
	n.mu.Unlock()
	gauge(descRunning, float64(running))
	for state, v := range images {
		gauge(descImages, float64(v), state)
	}
	for state, v := range arenas {
		gauge(descArenas, float64(v), state)
	}

	d, err := n.space()
	used := map[string]int64{"complete": 0, "incomplete": 0, "broken": 0, "lender": 0, "leftover": 0}
	if err == nil {
		var dirs []os.DirEntry
		dirs, err = os.ReadDir(filepath.Join(n.opts.Root, "rootfs"))
		for _, e := range dirs {
			dir := filepath.Join(n.opts.Root, "rootfs", e.Name())
			size, _ := usage(dir)
			state := stateOf[dir]
			if state == "" {
				state = "leftover" // or it was laid out just now
			}
			used[state] += size
		}
	}
	if err != nil {
		for _, desc := range []*prometheus.Desc{descDisk, descFree, descSize, descLimit} {
			ch <- prometheus.NewInvalidMetric(desc, err)
		}
		return
	}
	for state, v := range used {
		gauge(descDisk, float64(v), state)
	}
	gauge(descFree, float64(d.free))
	gauge(descSize, float64(d.size))
	limit := math.Inf(1)
	if n.opts.DiskLimit.set {
		limit = float64(n.opts.DiskLimit.of(d.size))
	}
	gauge(descLimit, limit)
}

func toFloat(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// imageState says how an image is: complete, pulling or broken. Called with
// Node.mu held.
func (n *Node) imageState(img *image) string {
	r := n.rootfs[img.ChainID]
	switch {
	case r == nil || r.broken != nil:
		return "broken"
	case r.rec.Complete:
		return "complete"
	case r.mounted:
		return "pulling"
	}
	return "broken"
}

// isStopped reports whether a pull ended because it was told to.
func isStopped(err error) bool { return errors.Is(err, errStopping) || errors.Is(err, errRemoved) }
