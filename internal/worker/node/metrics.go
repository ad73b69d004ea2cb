package node

import (
	"math"

	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/metrics"
	"hydrofoil.dev/foil/internal/worker/prover"
)

// How a daemon began: what it found of the one before.
const (
	beganNew      = "new"      // no gate, and nothing that needed one
	beganTakeover = "takeover" // a gate, which it took over
	beganLost     = "lost"     // mounts over incomplete arenas, and no gate
)

// nodeMetrics counts what a daemon does. docs/metrics.md lists all.
type nodeMetrics struct {
	ready     prometheus.Histogram
	wait      prometheus.Histogram
	evicted   prometheus.Counter
	conflicts prometheus.Counter
	keepers   prometheus.Counter
	proofs    *prometheus.CounterVec
}

func newMetrics() *nodeMetrics {
	seconds := []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300}
	histogram := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: seconds})
	}
	m := &nodeMetrics{
		ready:     histogram("foil_node_ready_seconds", "From the start of a container's process until its probe said ready (those of foil run: nobody says when others are)."),
		wait:      histogram("foil_node_read_wait_seconds", "How long reads waited for bytes that were absent: its count is that of the reads."),
		evicted:   prometheus.NewCounter(prometheus.CounterOpts{Name: "foil_node_evictions_total", Help: "Images that were removed because of the disk limit."}),
		conflicts: prometheus.NewCounter(prometheus.CounterOpts{Name: "foil_node_toc_conflicts_total", Help: "Rootfs that a registry described by another TOC than before."}),
		proofs:    prometheus.NewCounterVec(prometheus.CounterOpts{Name: "foil_node_proofs_total", Help: "Tries to prove images, by how they ended: proven, unproven (tried again), failed (not what its layers make: look at once)."}, []string{"result"}),
		keepers:   prometheus.NewCounter(prometheus.CounterOpts{Name: "foil_node_keeper_restarts_total", Help: "Keepers that died and were replaced. Each is worth a look at the log."}),
	}
	for _, phase := range []prover.Phase{prover.Proven, prover.Unproven, prover.Failed} {
		m.proofs.WithLabelValues(string(phase))
	}
	return m
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
	descProofs     = describe("image_proofs", "Images, by how their proof stands: served, proving, unproven, proven, failed.", "state")
	descContainers = describe("containers", "Containers of foil run.")
	descArenas     = describe("arenas", "Arenas, by state; lender: of removed images, kept for what others use of it.", "state")
	descDisk       = describe("disk_bytes", "What rootfs take on the disk, by the state of their arenas.", "state")
	descLimit      = describe("disk_limit_bytes", "The limit above which unused images are evicted (--disk-limit); +Inf: none.")
	descFree       = describe("disk_free_bytes", "What is free on the filesystem of the root.")
	descSize       = describe("disk_size_bytes", "The size of that filesystem.")
	descKeeper     = describe("keeper_up", "1 while a keeper holds the gate together with the daemon. 0 for more than a moment: a crash of the daemon would be a hazard.")
	descServer     = describe("server_up", "1 while the connection to a server of --connect, or of those used most, is there.", "server")
	descMemory     = describe("startup_memory_bytes", "Memory of startup pages that the starts under way have read ahead (--startup-memory).")
	descRefused    = describe("startup_memory_refused_bytes_total", "Bytes of startup pages that were not read ahead, since memory was short, or their limit reached.")
	descShort      = describe("memory_short", "1 while memory is short: nothing is read ahead, and what arrives does not stay in the page cache.")
	descYielded    = describe("yielded_turns_total", "Quarters of a second in which services were found to want the processors while an image arrived, or was proven: it made room.")
	descRate       = describe("server_rate_bytes_per_second", "The rate at which that connection was warmed up; 0: it was not.", "server")
)

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("foil_node_"+name, help, labels, nil)
}

// Metrics returns what tells of the daemon. It must not be asked after Close.
func (n *Node) Metrics() prometheus.Collector {
	m := n.metrics
	return append(metrics.Collectors{m.ready, m.wait, m.evicted, m.conflicts, m.keepers, m.proofs, state{n}}, n.pulls.Metrics()...)
}

// state collects what is looked up.
type state struct{ n *Node }

// Describe implements prometheus.Collector.
func (state) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descInfo, descBegan, descWarnings, descRunning, descReceived, descWritten, descStartup, descPromotions, descDamaged, descResumes,
		descEvents, descWaits, descDenied, descPending, descImages, descProofs, descContainers, descArenas, descDisk, descLimit, descFree, descSize,
		descKeeper, descServer, descRate, descMemory, descRefused, descShort, descYielded,
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
	sum := n.pulls.Fetched()
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
	gauge(descMemory, float64(n.memory.Taken()))
	counter(descRefused, n.memory.Refused())
	counter(descYielded, n.others.Turns())
	gauge(descShort, toFloat(n.memory.Tight()))
	gauge(descKeeper, toFloat(n.keeper.PID() != 0))

	images := map[string]int{"complete": 0, "pulling": 0, "broken": 0}
	for _, img := range n.images.List() {
		images[stateOf(n.store.Get(img.Rootfs))]++
	}
	proofs := map[prover.Phase]int{prover.Served: 0, prover.Proving: 0, prover.Unproven: 0, prover.Proven: 0, prover.Failed: 0}
	for _, img := range n.images.List() {
		proofs[n.prover.StateOf(img.Image).Phase]++
	}
	running := 0
	for _, p := range n.pulls.List() {
		if !p.Ended() {
			running++
		}
	}
	for _, c := range n.connections() {
		w, ok := c.Kept()
		gauge(descServer, toFloat(ok), c.Base())
		gauge(descRate, w.Rate, c.Base())
	}
	n.mu.Lock()
	warnings := len(n.warnings)
	n.mu.Unlock()
	arenas, inState := n.store.Counts()
	gauge(descWarnings, float64(warnings))
	gauge(descContainers, float64(n.containers.Len()))
	gauge(descRunning, float64(running))
	for state, v := range images {
		gauge(descImages, float64(v), state)
	}
	for phase, v := range proofs {
		gauge(descProofs, float64(v), string(phase))
	}
	for state, v := range arenas {
		gauge(descArenas, float64(v), state)
	}

	used := map[string]int64{"complete": 0, "incomplete": 0, "broken": 0, "lender": 0, "leftover": 0}
	d, err := n.store.Disk(func(dir string, size int64) {
		state := inState[dir]
		if state == "" {
			state = "leftover" // or it was laid out just now
		}
		used[state] += size
	})
	if err != nil {
		for _, desc := range []*prometheus.Desc{descDisk, descFree, descSize, descLimit} {
			ch <- prometheus.NewInvalidMetric(desc, err)
		}
		return
	}
	for state, v := range used {
		gauge(descDisk, float64(v), state)
	}
	gauge(descFree, float64(d.Free))
	gauge(descSize, float64(d.Size))
	limit := math.Inf(1)
	if n.opts.DiskLimit.set {
		limit = float64(n.opts.DiskLimit.of(d.Size))
	}
	gauge(descLimit, limit)
}

func toFloat(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
