// Package leftover says which files nobody has continued for long: uploads and
// downloads that broke off. A clock may be wrong by a year when a file is written, or
// when its age is asked for, and be set right later. So a file's time alone is not
// believed:
//
//   - what is older by the clock than it may become goes only after it has been
//     watched for an hour, by a clock that nobody sets, and has not changed;
//   - what was changed in the future, and is still after that hour, counts from now on.
//
// A clock that is a year ahead takes an hour off what nobody continues, then, and one
// that was keeps nothing for a year.
package leftover

import "time"

// watched is how long a file is watched before its age is believed. Whoever asks does
// so every hour, more or less.
const watched = 50 * time.Minute

// Ages are those of a set of files. It is not safe for concurrent use.
type Ages struct {
	// Keep is how long a file stays that does not change.
	Keep time.Duration

	seen map[string]sighting
}

// sighting is how a file was found, and when that was first so.
type sighting struct {
	changed time.Time
	since   time.Duration
}

// Old takes when each file was changed last, by name, and returns those to be removed,
// and those that are to be given the present time. now is the time by the clock, and up
// that since some fixed moment by one that nobody sets.
func (a *Ages) Old(now time.Time, up time.Duration, changed map[string]time.Time) (remove, ahead []string) {
	seen := make(map[string]sighting, len(changed))
	for name, t := range changed {
		s, ok := a.seen[name]
		if !ok || !s.changed.Equal(t) {
			s = sighting{t, up}
		}
		seen[name] = s
		if up-s.since < watched {
			continue
		}
		switch age := now.Sub(t); {
		case age > a.Keep:
			remove = append(remove, name)
		case age < -time.Minute:
			ahead = append(ahead, name)
		}
	}
	a.seen = seen
	return remove, ahead
}
