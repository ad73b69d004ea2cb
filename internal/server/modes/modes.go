// Package modes says in how many stores a blob is to rest intact. What has no intact copy is made again from packs when it is read.
// It is a pure function of rules.
//
// # Rules
//
//	mode = "selective"                # of repositories that no rule names
//	rate = "32M"                      # how much is converted a second, bytes of blobs
//	[selective]
//	stay = "24h"                      # for how long a blob has an intact copy after it was pushed, however cold
//	hot = 3                           # pulls that earn a copy: those of the last day count whole, those of the day before half
//	cold = 1                          # a copy is lost below
//	[[rule]]
//	repositories = ["prod/**"]        # patterns of package access
//	mode = "intact"
//
// The first rule that names a repository counts. A blob of several repositories has as many copies as the one that wants most.
//
//	intact      in every store
//	N           in N stores, a number; as many as there are, if these are fewer
//	selective   in none to all, by how often it is pulled
//	full        in none: 0
package modes

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/limit"
)

// Mode is one of those above.
type Mode struct {
	name   string
	copies int // of a number
}

// The modes that are no numbers.
var (
	Intact    = Mode{name: "intact"}
	Selective = Mode{name: "selective"}
	Full      = Mode{name: "full"}
)

// String is how rules name it.
func (m Mode) String() string { return m.name }

// maxCopies bounds numbers.
const maxCopies = 64

// Parse reads a mode.
func Parse(s string) (Mode, error) {
	for _, m := range []Mode{Intact, Selective, Full} {
		if s == m.name {
			return m, nil
		}
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 || n > maxCopies {
		return Mode{}, fmt.Errorf("want intact, selective, full, or a number of intact copies, not %q", s)
	}
	return Mode{name: strconv.Itoa(n), copies: n}, nil
}

// Settings are a file of rules.
type Settings struct {
	Mode      string      `toml:"mode"`
	Rate      limit.Bytes `toml:"rate"`
	Selective struct {
		Stay limit.Duration `toml:"stay"`
		Hot  float64        `toml:"hot"`
		Cold float64        `toml:"cold"`
	} `toml:"selective"`
	Rules []Rule `toml:"rule"`
}

// Rule is one of them.
type Rule struct {
	Repositories []string `toml:"repositories"`
	Mode         string   `toml:"mode"`
}

// Rules are those of one configuration. They do not change.
type Rules struct {
	mode      Mode
	rate      int64
	stay      time.Duration
	hot, cold float64
	rules     []rule
}

type rule struct {
	repositories []access.Pattern
	mode         Mode
}

const maxRules = 1000

// Default are the rules without a file: one mode for all.
func Default(m Mode) *Rules {
	return &Rules{mode: m, rate: 32 << 20, stay: 24 * time.Hour, hot: 3, cold: 1}
}

// ParseRules reads a file, strictly. What it does not say is as in Default.
func ParseRules(b []byte, m Mode) (*Rules, error) {
	var c Settings
	d := toml.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&c); err != nil {
		if unknown, ok := errors.AsType[*toml.StrictMissingError](err); ok && len(unknown.Errors) > 0 {
			line, _ := unknown.Errors[0].Position()
			return nil, fmt.Errorf("line %d: there is no setting %s: docs/modes.md has those there are", line, strings.Join(unknown.Errors[0].Key(), "."))
		}
		return nil, err
	}
	r := Default(m)
	if c.Mode != "" {
		var err error
		if r.mode, err = Parse(c.Mode); err != nil {
			return nil, fmt.Errorf("mode: %w", err)
		}
	}
	if c.Rate > 0 {
		r.rate = int64(c.Rate)
	}
	if c.Selective.Stay > 0 {
		r.stay = time.Duration(c.Selective.Stay)
	}
	if c.Selective.Hot != 0 || c.Selective.Cold != 0 {
		r.hot, r.cold = c.Selective.Hot, c.Selective.Cold
	}
	switch {
	case r.stay > 60*24*time.Hour:
		return nil, errors.New("[selective] stay: at most 60 days; intact keeps for ever")
	case !(r.cold > 0 && r.hot > r.cold && r.hot < 1e9):
		return nil, errors.New("[selective] want cold above 0, and hot above cold: else copies come and go")
	case len(c.Rules) > maxRules:
		return nil, fmt.Errorf("at most %d rules", maxRules)
	}
	for i, x := range c.Rules {
		m, err := Parse(x.Mode)
		if err == nil && len(x.Repositories) == 0 {
			err = errors.New(`it names no repositories: ["**"] are all`)
		}
		one := rule{mode: m}
		for _, s := range x.Repositories {
			var p access.Pattern
			if err == nil {
				p, err = access.ParsePattern(s)
			}
			one.repositories = append(one.repositories, p)
		}
		if err != nil {
			return nil, fmt.Errorf("[[rule]] %d: %w", i+1, err)
		}
		r.rules = append(r.rules, one)
	}
	return r, nil
}

// Rate is how many bytes of blobs a second are converted.
func (r *Rules) Rate() int64 { return r.rate }

// Of returns the mode of a repository.
func (r *Rules) Of(repo string) Mode {
	for _, x := range r.rules {
		if slices.ContainsFunc(x.repositories, func(p access.Pattern) bool { return p.Match(repo) }) {
			return x.mode
		}
	}
	return r.mode
}

// Most is the largest number of copies that a mode names; 0: none does.
func (r *Rules) Most() int {
	n := r.mode.copies
	for _, x := range r.rules {
		n = max(n, x.mode.copies)
	}
	return n
}

// State is what is known of a blob.
type State struct {
	Have  int           // intact copies
	Score float64       // pulls (package popularity)
	Age   time.Duration // since it was pushed
}

// Want returns how many intact copies a blob of these repositories is to have in so many stores, and the mode that says so.
func (r *Rules) Want(repos []string, s State, stores int) (n int, by Mode) {
	for i, repo := range repos {
		m := r.Of(repo)
		if want := r.want(m, s, stores); i == 0 || want > n {
			n, by = want, m
		}
	}
	return n, by
}

func (r *Rules) want(m Mode, s State, stores int) int {
	switch m {
	case Intact:
		return stores
	case Full:
		return 0
	case Selective:
	default:
		return min(m.copies, stores)
	}
	n := min(s.Have, stores)
	for n < stores && s.Score >= r.hot*float64(n+1) {
		n++
	}
	for n > 0 && s.Score < r.cold*float64(n) {
		n--
	}
	if s.Age < r.stay {
		n = max(n, 1)
	}
	return n
}
