// Package results is what a benchmark leaves behind: a directory of JSON files,
// each written once and whole, so that an interrupted benchmark goes on where it
// was, and a result can be looked at with jq.
//
//	matrix.json           Matrix: what was asked for, and on which machine
//	images/IMAGE.json     Image: what was pushed, prepared, and the floor T*
//	checks/SETTING,REP.json  Check: what the link did before that round
//	warm/SETTING,REP.json  Warm: the warm start of an image in that round
//	runs/KEY.json         Run: one measured provisioning
//	logs/KEY/             what the processes of a failed run said
//
// KEY is ENGINE,IMAGE,KIND,rttMILLISECONDS,rateBITS,REP. Times are nanoseconds
// (names that end in _ns), sizes bytes, rates bits a second with 0 for no limit.
package results

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/workloads"
)

// Format is raised when the files change their meaning.
const Format = 1

// Matrix is what was asked for and where it ran.
type Matrix struct {
	Format  int      `json:"format"`
	Command []string `json:"command"`
	// Earlier are other commands that have added to the result before.
	Earlier [][]string      `json:"earlier_commands,omitempty"`
	Commit  string          `json:"commit"` // of the benchmark; with "-dirty" if it was changed
	Foil    string          `json:"foil"`   // what foil version says
	Began   time.Time       `json:"began"`
	Host    Host            `json:"host"`
	Engines []EngineInfo    `json:"engines"`
	Images  []string        `json:"images"`  // names, without tags
	RTTs    []time.Duration `json:"rtts_ns"` // of the link
	Rates   []int64         `json:"rates"`
	// ImageRates are those of images that are measured at others than Rates.
	ImageRates map[string][]int64 `json:"image_rates,omitempty"`
	Runs       int                `json:"runs"`
	Load       time.Duration      `json:"load_ns"` // how long a ready server is put under load
	Seed       uint64             `json:"seed"`    // of the order of runs
	// Cut is after which share of the bytes of an image's layers, 0 to 1, the connections
	// of a Resumed run were cut; 0 if there is none.
	Cut  float64 `json:"cut,omitempty"`
	Note string  `json:"note,omitempty"`
}

// Host is the machine.
type Host struct {
	Kernel       string `json:"kernel"`
	Distribution string `json:"distribution"`
	CPU          string `json:"cpu"`
	Cores        int    `json:"cores"`
	Memory       int64  `json:"memory"`
	Congestion   string `json:"congestion"` // TCP congestion control
}

// EngineInfo is an engine that was asked for.
type EngineInfo struct {
	Name    string `json:"name"`
	Version string `json:"version,omitempty"`
	Absent  string `json:"absent,omitempty"` // why it is not here
}

// Image is one version of an image, NAME:TAG, and what was done to it.
type Image struct {
	Name     string        `json:"name"`
	Digest   string        `json:"digest"`
	Layers   []int64       `json:"layers"` // compressed bytes of each
	Probe    string        `json:"probe"`
	Push     time.Duration `json:"push_ns"`     // with skopeo, and ingestion by the server
	Ingested time.Duration `json:"ingested_ns"` // until the server had ingested it, after that
	Storage  int64         `json:"storage"`     // bytes that the registry has grown by
	Floor    engines.Floor `json:"floor"`       // Compressed is without what the earlier version has
	FloorErr string        `json:"floor_error,omitempty"`
	// Prepared is by engine; PrepareErr has those that failed.
	Prepared   map[string]engines.Preparation `json:"prepared"`
	PrepareErr map[string]string              `json:"prepare_error,omitempty"`
}

// Check is what the link did when it was tried.
type Check struct {
	RTT      time.Duration `json:"rtt_ns"`
	Rate     int64         `json:"rate"`
	Rep      int           `json:"rep"`
	Measured string        `json:"measured"`
	Load1    float64       `json:"load1"` // the machine's load average before
	Err      string        `json:"error,omitempty"`
}

// Warm is the warm start of an image, as engines.WarmStarts has it, among the runs of a
// round: times of a round are compared with T* of that round.
type Warm struct {
	Image string        `json:"image"`
	Kind  Kind          `json:"kind"`
	RTT   time.Duration `json:"rtt_ns"` // of the round, as Rate and Rep; it is no part of Time
	Rate  int64         `json:"rate"`
	Rep   int           `json:"rep"`
	Began time.Time     `json:"began"`
	Time  time.Duration `json:"warm_ns"` // the fastest of All
	// All are in the order in which they were made; results of before 2026-11-23 have none. What a
	// start takes on a machine that others slow down is compared with their median, not with the fastest.
	All []time.Duration `json:"all_ns,omitempty"`
}

// Kind is what a worker had before a run.
type Kind string

const (
	Fresh   Kind = "fresh"   // nothing
	Update  Kind = "update"  // the version before
	Resumed Kind = "resumed" // nothing, and its connections were cut once, see Matrix.Cut
)

// Kinds are all of them, in the order of reports.
var Kinds = []Kind{Fresh, Update, Resumed}

// Key names a run.
type Key struct {
	Engine string        `json:"engine"`
	Image  string        `json:"image"`
	Kind   Kind          `json:"kind"`
	RTT    time.Duration `json:"rtt_ns"`
	Rate   int64         `json:"rate"`
	Rep    int           `json:"rep"`
}

func (k Key) String() string {
	return fmt.Sprintf("%s,%s,%s,rtt%d,rate%d,%d", k.Engine, k.Image, k.Kind, k.RTT.Milliseconds(), k.Rate, k.Rep)
}

// Run is one measured provisioning.
type Run struct {
	Key
	Began time.Time `json:"began"`
	// Stopped runs were ended at ready, since completion was not asked for, or came to
	// it at a rate that was not the link's, before an update: they have no mark of it,
	// and CPU, Memory and Timeline say nothing of it.
	Stopped bool `json:"stopped,omitempty"`
	engines.Outcome
	// Touched is how many bytes of pages are read before ready, as the image's floor
	// has it: what ArenaReady is to be compared with.
	Touched int64         `json:"touched"`
	Disk    int64         `json:"disk"`    // bytes below the worker's directory when complete; 0 if it was stopped
	Late    time.Duration `json:"late_ns"` // of the link's most belated packet so far
	// Stolen is the share of the processors' time, until ready or the end if it was not, that
	// the host of this virtual machine gave to others (steal in proc_stat(5)): 0 to 1.
	Stolen float64 `json:"stolen,omitempty"`
	// Own is the processor time that the benchmark itself took between the command and ready, or
	// the end if it was not: of the probe, and of the emulated link, with what the kernel does when a packet
	// leaves it. 0 in results of before 2026-11-22.
	Own  time.Duration   `json:"own_cpu_ns,omitempty"`
	Load *workloads.Load `json:"load,omitempty"`
	Err  string          `json:"error,omitempty"`
}

// MuchStolen is how much of the processors' time may be stolen in a run that is
// taken for undisturbed.
const MuchStolen = 0.05

// Dir is a result directory.
type Dir string

func (d Dir) path(kind, name string) string {
	return filepath.Join(string(d), kind, name+".json")
}

// Logs is the directory of what a failed run's processes said.
func (d Dir) Logs(k Key) string { return filepath.Join(string(d), "logs", k.String()) }

// PutMatrix writes what is asked for.
func (d Dir) PutMatrix(m Matrix) error { return put(filepath.Join(string(d), "matrix.json"), m) }

// PutImage writes what was done to an image.
func (d Dir) PutImage(im Image) error {
	return put(d.path("images", strings.ReplaceAll(im.Name, ":", "-")), im)
}

// PutCheck writes what the link did.
func (d Dir) PutCheck(c Check) error {
	return put(d.path("checks", fmt.Sprintf("rtt%d,rate%d,%d", c.RTT.Milliseconds(), c.Rate, c.Rep)), c)
}

// warmPath is the file of an image's warm start in the round of a run of it.
func (d Dir) warmPath(image string, kind Kind, rtt time.Duration, rate int64, rep int) string {
	return d.path("warm", fmt.Sprintf("%s,%s,rtt%d,rate%d,%d", image, kind, rtt.Milliseconds(), rate, rep))
}

// PutWarm writes a warm start.
func (d Dir) PutWarm(w Warm) error { return put(d.warmPath(w.Image, w.Kind, w.RTT, w.Rate, w.Rep), w) }

// Warm reads the warm start of a run's round; fs.ErrNotExist if there is none.
func (d Dir) Warm(k Key) (w Warm, err error) {
	err = get(d.warmPath(k.Image, k.Kind, k.RTT, k.Rate, k.Rep), &w)
	return w, err
}

// PutRun writes a run.
func (d Dir) PutRun(r Run) error { return put(d.path("runs", r.Key.String()), r) }

// Matrix reads what was asked for; fs.ErrNotExist if nothing was.
func (d Dir) Matrix() (m Matrix, err error) {
	err = get(filepath.Join(string(d), "matrix.json"), &m)
	if Missing(err) {
		return m, fmt.Errorf("bench: there is no result in %s, which is what bench run --out writes: %w", d, err)
	}
	if err == nil && m.Format != Format {
		err = fmt.Errorf("bench: %s is of format %d, this program reads %d", d, m.Format, Format)
	}
	return m, err
}

// Image reads what was done to NAME:TAG.
func (d Dir) Image(name string) (im Image, err error) {
	err = get(d.path("images", strings.ReplaceAll(name, ":", "-")), &im)
	return im, err
}

// Run reads a run; fs.ErrNotExist if it has not been made.
func (d Dir) Run(k Key) (r Run, err error) {
	err = get(d.path("runs", k.String()), &r)
	return r, err
}

// Everything is a whole result directory.
type Everything struct {
	Matrix Matrix  `json:"matrix"`
	Images []Image `json:"images"`
	Checks []Check `json:"checks"`
	Warm   []Warm  `json:"warm,omitempty"` // none in results of before 2026-11-23
	Runs   []Run   `json:"runs"`
}

// Load reads everything, in the order of file names.
func (d Dir) Load() (all Everything, err error) {
	if all.Matrix, err = d.Matrix(); err != nil {
		return all, err
	}
	if all.Images, err = list[Image](d, "images"); err != nil {
		return all, err
	}
	if all.Checks, err = list[Check](d, "checks"); err != nil {
		return all, err
	}
	if all.Warm, err = list[Warm](d, "warm"); err != nil {
		return all, err
	}
	all.Runs, err = list[Run](d, "runs")
	return all, err
}

func list[T any](d Dir, kind string) (all []T, err error) {
	names, err := filepath.Glob(d.path(kind, "*"))
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	slices.Sort(names)
	for _, name := range names {
		var v T
		if err := get(name, &v); err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, nil
}

// put writes a file that is there whole, or not at all.
func put(path string, value any) error {
	text, err := json.MarshalIndent(value, "", "\t")
	if err != nil {
		return fmt.Errorf("bench: %s: %w", path, err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	partial := path + ".partial"
	if err := os.WriteFile(partial, append(text, '\n'), 0o644); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := os.Rename(partial, path); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	return nil
}

func get(path string, value any) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := json.Unmarshal(text, value); err != nil {
		return fmt.Errorf("bench: read %s: %w (remove it, and the run is made again)", path, err)
	}
	return nil
}

// Missing reports whether err says that a file is not there.
func Missing(err error) bool { return errors.Is(err, fs.ErrNotExist) }
