package run

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/results"
)

// record finds the engines, and writes down what is asked for; what was asked
// for before, in the same directory, is asked for still.
func (m *matrix) record(ctx context.Context) error {
	now := results.Matrix{
		Format: results.Format, Command: m.Command, Commit: m.Commit, Began: time.Now().UTC(), Host: host(), Note: m.Note,
		Images: m.Images, RTTs: m.RTTs, Rates: m.Rates, ImageRates: m.ImageRates, Runs: m.Runs, Load: m.Load, Seed: m.Seed, Cut: m.Cut,
	}
	m.kernel, m.versions = now.Host.Kernel, map[string]string{}
	for _, name := range m.Engines {
		e, err := engines.Named(name)
		if err != nil {
			return err
		}
		info := results.EngineInfo{Name: name}
		if info.Version, err = e.Find(ctx, m.Programs); err != nil {
			if name == "hydrofoil" {
				return err
			}
			info.Absent = err.Error()
			m.log("%s is left out: %v", name, err)
		} else {
			m.engines = append(m.engines, e)
			m.versions[name] = info.Version
		}
		if _, own := e.(*engines.Hydrofoil); own && now.Foil == "" {
			now.Foil = info.Version
		}
		now.Engines = append(now.Engines, info)
	}
	if len(m.engines) == 0 {
		return fmt.Errorf("bench: none of the engines is here")
	}
	before, err := m.out.Matrix()
	if err == nil {
		if now, err = merge(before, now); err != nil {
			return fmt.Errorf("bench: %s: %w; choose another --out", m.out, err)
		}
	} else if !results.Missing(err) {
		return err
	}
	if m.Forecast {
		return nil
	}
	return m.out.PutMatrix(now)
}

// merge adds what is asked for now to what was before. Results of two programs
// or two machines do not belong into one directory.
func merge(before, now results.Matrix) (results.Matrix, error) {
	for _, same := range []struct{ what, before, now string }{
		{"commit", before.Commit, now.Commit},
		{"kernel", before.Host.Kernel, now.Host.Kernel},
		{"load", before.Load.String(), now.Load.String()},
	} {
		if same.before != same.now {
			return before, fmt.Errorf("there are results with another %s (%s, now %s)", same.what, same.before, same.now)
		}
	}
	if before.Cut > 0 && now.Cut > 0 && before.Cut != now.Cut {
		return before, fmt.Errorf("there are results with connections cut after another share of the bytes (%v, now %v)", before.Cut, now.Cut)
	}
	before.Cut = max(before.Cut, now.Cut)
	if !slices.Equal(before.Command, now.Command) {
		before.Earlier = slices.DeleteFunc(before.Earlier, func(c []string) bool { return slices.Equal(c, now.Command) })
		before.Earlier, before.Command = append(before.Earlier, before.Command), now.Command
	}
	before.Runs, before.Note = max(before.Runs, now.Runs), cmp.Or(now.Note, before.Note)
	for _, e := range now.Engines {
		i := slices.IndexFunc(before.Engines, func(b results.EngineInfo) bool { return b.Name == e.Name })
		if i < 0 {
			before.Engines = append(before.Engines, e)
			continue
		}
		if was := before.Engines[i]; was.Absent == "" && e.Absent == "" && was.Version != e.Version {
			return before, fmt.Errorf("there are results with another %s (%s, now %s)", e.Name, was.Version, e.Version)
		}
		if e.Absent == "" {
			before.Engines[i] = e
		}
	}
	before.Images = union(before.Images, now.Images)
	before.RTTs = union(before.RTTs, now.RTTs)
	before.Rates = union(before.Rates, now.Rates)
	for image, rates := range now.ImageRates {
		if before.ImageRates == nil {
			before.ImageRates = map[string][]int64{}
		}
		before.ImageRates[image] = union(before.ImageRates[image], rates)
	}
	if before.Foil == "" {
		before.Foil = now.Foil
	}
	return before, nil
}

func union[T comparable](a, b []T) []T {
	for _, v := range b {
		if !slices.Contains(a, v) {
			a = append(a, v)
		}
	}
	return a
}

// host describes the machine; what cannot be found out stays empty.
func host() results.Host {
	h := results.Host{Cores: runtime.NumCPU()}
	var uts unix.Utsname
	if unix.Uname(&uts) == nil {
		h.Kernel = unix.ByteSliceToString(uts.Release[:])
	}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		h.Memory = int64(info.Totalram) * int64(info.Unit)
	}
	h.CPU = field("/proc/cpuinfo", "model name", ":")
	h.Distribution = strings.Trim(field("/etc/os-release", "PRETTY_NAME", "="), `"`)
	if text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control"); err == nil {
		h.Congestion = strings.TrimSpace(string(text))
	}
	return h
}

// field is the value of the first line of a file that begins with name.
func field(path, name, separator string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if key, value, ok := strings.Cut(lines.Text(), separator); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// ticks is how much time the processors have had, and how much of it was stolen,
// in clock ticks.
type ticks struct{ all, stolen int64 }

// processorTime reads the first line of proc_stat(5): user, nice, system, idle,
// iowait, irq, softirq, steal, and then what user and nice count already.
func processorTime() (t ticks) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return t
	}
	line, _, _ := strings.Cut(string(text), "\n")
	return parseTicks(line)
}

func parseTicks(line string) (t ticks) {
	const steal = 7
	name, values, _ := strings.Cut(line, " ")
	for i, value := range strings.Fields(values) {
		n, err := strconv.ParseInt(value, 10, 64)
		if name != "cpu" || err != nil {
			return ticks{}
		}
		if i <= steal {
			t.all += n
		}
		if i == steal {
			t.stolen = n
		}
	}
	return t
}

// stolenSince is the share of the processors' time since then that was stolen, 0 to 1.
func (t ticks) stolenSince() float64 { return t.share(processorTime()) }

func (t ticks) share(now ticks) float64 {
	if now.all <= t.all || now.stolen < t.stolen {
		return 0
	}
	return float64(now.stolen-t.stolen) / float64(now.all-t.all)
}

func loadAverage() float64 {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), " ")
	load, err := strconv.ParseFloat(first, 64)
	if err != nil {
		return 0
	}
	return load
}
