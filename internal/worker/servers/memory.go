package servers

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/url"
	"slices"
	"time"
)

// Server is a server of bundles as pulls found it.
type Server struct {
	Registry  string `json:"registry"`             // for which it answered: HOST[:PORT] of image names
	PlainHTTP bool   `json:"plain_http,omitempty"` // the pull asked for that
	Base      string `json:"base"`                 // its address, of which package remote says the form
}

// check refuses what no pull notes.
func (s Server) check() error {
	u, err := url.Parse(s.Base)
	if err != nil {
		return err
	}
	if s.Registry == "" || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return fmt.Errorf("server %q of registry %q: want http://HOST:PORT or https://HOST", s.Base, s.Registry)
	}
	if u.User != nil || u.RawQuery != "" {
		return errors.New("the address of a server holds more than its place")
	}
	return nil
}

const (
	// MostKept is the most that Options.Most may be.
	MostKept = 8
	// mostRemembered is how many servers are remembered. A new one takes the place of the one
	// that is used least.
	mostRemembered = 16
	// halfLife is the time in which a use comes to count half: what the worker pulls from
	// today counts for more than what it pulled from last week.
	halfLife = 24 * time.Hour
	// ForgetAfter is how long a server is remembered that is not used.
	ForgetAfter = 3 * 24 * time.Hour
	// maxRecord bounds the record, in bytes.
	maxRecord = 1 << 20
	// recordVersion is that of the record.
	recordVersion = 1
)

// memory says which servers were used, and which the most. It is a value without locks or
// clocks; Set guards it.
type memory struct{ uses []use }

// use is what is remembered of one server.
type use struct {
	Server
	// Uses counts pulls, each less the longer ago it was; as of Last.
	Uses float64   `json:"uses"`
	Last time.Time `json:"last"`
}

// at is what the uses count at a time. A clock that was set back makes nothing of it larger.
func (u use) at(now time.Time) float64 {
	return u.Uses * math.Exp2(-max(0, now.Sub(u.Last)).Hours()/halfLife.Hours())
}

// forget drops who was not used for too long. What claims to be of the future is of now, so
// that a clock that ran ahead keeps nothing for ever.
func (m *memory) forget(now time.Time) {
	for i := range m.uses {
		if m.uses[i].Last.After(now) {
			m.uses[i].Last = now
		}
	}
	m.uses = slices.DeleteFunc(m.uses, func(u use) bool { return now.Sub(u.Last) >= ForgetAfter })
}

// note counts a use.
func (m *memory) note(now time.Time, s Server) {
	m.forget(now)
	i := slices.IndexFunc(m.uses, func(u use) bool { return u.Server == s })
	if i < 0 {
		if len(m.uses) == mostRemembered {
			m.rank(now)
			m.uses = m.uses[:mostRemembered-1]
		}
		m.uses = append(m.uses, use{Server: s, Uses: 1, Last: now})
		return
	}
	m.uses[i].Uses, m.uses[i].Last = m.uses[i].at(now)+1, now
}

// rank puts those first that are used most.
func (m *memory) rank(now time.Time) {
	slices.SortStableFunc(m.uses, func(a, b use) int {
		return cmp.Or(cmp.Compare(b.at(now), a.at(now)), b.Last.Compare(a.Last))
	})
}

// top returns the servers that are used most, at most n, each address once.
func (m *memory) top(now time.Time, n int) (list []Server) {
	m.forget(now)
	m.rank(now)
	for _, u := range m.uses {
		if len(list) < n && !slices.ContainsFunc(list, func(s Server) bool { return s.Base == u.Base }) {
			list = append(list, u.Server)
		}
	}
	return list
}

// record is the file.
type record struct {
	Version int   `json:"version"`
	Servers []use `json:"servers"`
}

func (m *memory) encode() ([]byte, error) {
	return json.Marshal(record{recordVersion, m.uses})
}

// decodeMemory reads a record. It takes nothing that encode would not have written.
func decodeMemory(b []byte) (m memory, err error) {
	if len(b) > maxRecord {
		return m, fmt.Errorf("%d bytes, at most %d", len(b), maxRecord)
	}
	var r record
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		return m, err
	}
	if r.Version != recordVersion {
		return m, fmt.Errorf("version %d, this foil reads %d", r.Version, recordVersion)
	}
	if len(r.Servers) > mostRemembered {
		return m, fmt.Errorf("%d servers, at most %d", len(r.Servers), mostRemembered)
	}
	for i, u := range r.Servers {
		if err := u.check(); err != nil {
			return m, err
		}
		if !(u.Uses > 0) || math.IsInf(u.Uses, 0) {
			return m, fmt.Errorf("server %s was used %v times", u.Base, u.Uses)
		}
		if slices.ContainsFunc(r.Servers[:i], func(o use) bool { return o.Server == u.Server }) {
			return m, fmt.Errorf("server %s is there twice", u.Base)
		}
	}
	return memory{r.Servers}, nil
}
