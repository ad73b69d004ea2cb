package leftover

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestOld(t *testing.T) {
	const week, year = 7 * 24 * time.Hour, 365 * 24 * time.Hour
	start := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	type look struct {
		clock  time.Duration // what the clock shows, since start
		up     time.Duration
		change time.Duration // when the file was changed, since start
		want   string
	}
	for name, looks := range map[string][]look{
		"a week passes": {
			{0, 0, 0, ""}, {time.Hour, time.Hour, 0, ""}, {week, week, 0, ""}, {week + time.Hour, week + time.Hour, 0, "remove"},
		},
		"after a restart": {{2 * week, 0, 0, ""}, {2*week + time.Hour, time.Hour, 0, "remove"}},
		"it is continued while the clock is ahead": {
			{0, 0, 0, ""}, {year, time.Hour, year - time.Minute, ""}, {year + time.Hour, 2 * time.Hour, year + time.Hour - 1, ""},
		},
		"the clock jumps between two looks": {
			{0, 0, 0, ""}, {year, 10 * time.Minute, 0, ""}, {20 * time.Minute, 20 * time.Minute, 0, ""}, {2 * time.Hour, 2 * time.Hour, 0, ""},
		},
		"a clock that stays ahead": {{year, 0, 0, ""}, {year + time.Hour, time.Hour, 0, "remove"}},
		"a clock that was ahead": {
			{0, 0, year, ""}, {time.Hour, time.Hour, year, "ahead"}, {2 * time.Hour, 2 * time.Hour, time.Hour, ""}, {week + time.Hour, week, time.Hour, ""},
			{week + 2*time.Hour, week + time.Hour, time.Hour, "remove"},
		},
		"a moment ahead": {{0, 0, 30 * time.Second, ""}, {0, time.Hour, 30 * time.Second, ""}},
	} {
		t.Run(name, func(t *testing.T) {
			a := Ages{Keep: week}
			for i, l := range looks {
				remove, ahead := a.Old(start.Add(l.clock), l.up, map[string]time.Time{"f": start.Add(l.change)})
				got := map[string][]string{"remove": remove, "ahead": ahead}
				want := map[string][]string{"remove": nil, "ahead": nil}
				if l.want != "" {
					want[l.want] = []string{"f"}
				}
				if d := cmp.Diff(want, got); d != "" {
					t.Errorf("look %d: %s", i, d)
				}
			}
		})
	}
}

// What has gone is forgotten.
func TestOldForgets(t *testing.T) {
	var a Ages
	now := time.Now()
	a.Old(now, 0, map[string]time.Time{"f": now})
	a.Old(now, time.Hour, nil)
	if len(a.seen) > 0 {
		t.Errorf("%v", a.seen)
	}
}
