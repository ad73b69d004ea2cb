package run

import (
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/results"
	"hydrofoil.dev/foil/bench/site"
)

// session is one engine's turn with one image, in one build.
type session struct {
	of       *matrix
	engine   engines.Engine
	versions []engines.Image
	keys     []results.Key // of the versions
}

// round is one repetition over one link.
type round struct {
	rtt      time.Duration
	rate     int64
	rep      int
	sessions []session
}

// plan is what is left to do, in order. Of two builds both are measured again if one has
// not been: they are compared pair by pair.
func (s series) plan() (rounds []round) {
	m, left := s[0], &progress{}
	for _, m := range s {
		m.progress = left
	}
	for rep := 1; rep <= m.Runs; rep++ {
		for _, rate := range m.rates() {
			for _, rtt := range m.RTTs {
				r := round{rtt: rtt, rate: rate, rep: rep}
				dice := rand.New(rand.NewPCG(m.Seed, uint64(rep)<<32|uint64(rtt.Milliseconds())))
				for _, i := range dice.Perm(len(m.images)) {
					for _, j := range dice.Perm(len(m.engines)) {
						var turns []session
						for _, m := range s {
							turns = append(turns, m.session(m.engines[j], m.images[i], r))
						}
						if !slices.Contains(m.ratesOf(turns[0].keys[0].Image), rate) || !slices.ContainsFunc(turns, session.open) {
							continue
						}
						if (rep+i+j)%2 == 1 {
							slices.Reverse(turns)
						}
						for _, turn := range turns {
							r.sessions = append(r.sessions, turn)
							left.left++
							left.rest += turn.of.foresee(turn)
						}
					}
				}
				if len(r.sessions) > 0 {
					rounds = append(rounds, r)
				}
			}
		}
	}
	return rounds
}

// ratesOf are the rates at which an image is measured.
func (m *matrix) ratesOf(image string) []int64 {
	if own, ok := m.ImageRates[image]; ok {
		return own
	}
	return m.Rates
}

// rates are those of any image.
func (m *matrix) rates() (all []int64) {
	for _, versions := range m.images {
		name, _, _ := strings.Cut(versions[0].Name, ":")
		all = union(all, m.ratesOf(name))
	}
	slices.Sort(all)
	return all
}

func (m *matrix) session(e engines.Engine, versions []engines.Image, r round) session {
	s := session{of: m, engine: e, versions: versions}
	for i := range versions {
		kind := results.Fresh
		if i > 0 {
			kind = results.Update
		}
		name, _, _ := strings.Cut(versions[i].Name, ":")
		s.keys = append(s.keys, results.Key{Engine: e.Name(), Image: name, Kind: kind, RTT: r.rtt, Rate: r.rate, Rep: r.rep})
	}
	// Versions beyond the second are not measured.
	n := min(len(s.keys), 2)
	if m.Cut > 0 {
		n, s.keys[0].Kind = 1, results.Resumed
	}
	s.keys, s.versions = s.keys[:n], s.versions[:n]
	return s
}

// stops reports whether a run of a session ends at ready: completion is not asked
// for there, it takes time, and neither an update nor a cut needs the whole image.
func (m *matrix) stops(s session, i int) bool {
	return i == len(s.keys)-1 && !m.completes(s, i)
}

// hurries reports whether what comes after ready in a run of a session comes at the
// machine's rate instead of the link's: the update needs the first version whole, and
// nobody asked how long that takes.
func (m *matrix) hurries(s session, i int) bool {
	return i < len(s.keys)-1 && !m.completes(s, i)
}

// completes reports whether the time until a run is complete is a figure of it.
func (m *matrix) completes(s session, i int) bool {
	_, whole := s.engine.(engines.Whole)
	return whole || s.keys[i].Kind == results.Resumed || m.CompleteAt == nil || slices.Contains(m.CompleteAt, s.keys[i].RTT)
}

// open reports whether a run of a session is not there.
func (s session) open() bool {
	return slices.ContainsFunc(s.keys, func(k results.Key) bool {
		r, err := s.of.out.Run(k)
		return err != nil || r.Err != "" && s.of.RetryFailed || r.Stolen > results.MuchStolen && s.of.RetryStolen
	})
}

func (s series) round(ctx context.Context, r round) error {
	return s.at(ctx, link.Options{RTT: r.rtt, Rate: r.rate}, func(sites map[*matrix]*site.Site) error {
		for _, m := range s {
			if m.SkipCheck {
				continue
			}
			if err := m.check(ctx, sites[m], r); err != nil {
				return err
			}
		}
		for i, session := range r.sessions {
			began, m := time.Now(), session.of
			if i == 0 || session.keys[0].Image != r.sessions[i-1].keys[0].Image {
				if err := s.warm(ctx, sites[m], session); err != nil {
					return err
				}
			}
			if err := m.run(ctx, sites[m].Link, session); err != nil {
				return err
			}
			m.progress.ended(m.foresee(session), time.Since(began))
		}
		return nil
	})
}

// at calls fn at the sites of all builds; those that one server serves share one.
func (s series) at(ctx context.Context, o link.Options, fn func(map[*matrix]*site.Site) error) error {
	sites := map[*matrix]*site.Site{}
	var from func(i int) error
	from = func(i int) error {
		if i == len(s) {
			return fn(sites)
		}
		for _, m := range s[:i] {
			if m.state.dir == s[i].state.dir {
				sites[s[i]] = sites[m]
				return from(i + 1)
			}
		}
		return s[i].at(ctx, o, func(at *site.Site) error {
			sites[s[i]] = at
			return from(i + 1)
		})
	}
	return from(0)
}
