package modes

import (
	"strings"
	"testing"
	"time"
)

func TestWant(t *testing.T) {
	r, err := ParseRules([]byte(`
mode = "selective"
[selective]
stay = "2d"
hot = 4
cold = 1
[[rule]]
repositories = ["prod/**", "base"]
mode = "intact"
[[rule]]
repositories = ["prod/never", "archive/*"]
mode = "full"
[[rule]]
repositories = ["two/*"]
mode = "2"
`), Intact)
	if err != nil {
		t.Fatal(err)
	}
	const day = 24 * time.Hour
	for _, tc := range []struct {
		repos  string
		s      State
		stores int
		want   int
		by     string
	}{
		{"prod/a/b", State{}, 3, 3, "intact"},
		{"prod/never", State{}, 3, 3, "intact"}, // the first rule that names it
		{"archive/x", State{Have: 1, Score: 100}, 3, 0, "full"},
		{"archive/x/y", State{Have: 1, Age: 3 * day}, 3, 0, "selective"},
		{"archive/x,base", State{}, 2, 2, "intact"},
		{"base,archive/x", State{}, 2, 2, "intact"},
		{"two/x", State{}, 1, 1, "2"},
		{"two/x", State{Have: 5}, 5, 2, "2"},
		// It stays for a while, and not in more than one store for that.
		{"x", State{Have: 3}, 3, 1, "selective"},
		{"x", State{}, 3, 1, "selective"},
		{"x", State{Have: 1, Age: 3 * day}, 3, 0, "selective"},
		// What is between cold and hot stays as it is.
		{"x", State{Have: 1, Age: 3 * day, Score: 2}, 3, 1, "selective"},
		{"x", State{Have: 0, Age: 3 * day, Score: 2}, 3, 0, "selective"},
		{"x", State{Have: 0, Age: 3 * day, Score: 4}, 3, 1, "selective"},
		{"x", State{Have: 0, Age: 3 * day, Score: 9}, 3, 2, "selective"},
		{"x", State{Have: 3, Age: 3 * day, Score: 2.5}, 3, 2, "selective"},
		{"x", State{Have: 1, Age: 3 * day, Score: 900}, 2, 2, "selective"},
	} {
		n, by := r.Want(strings.Split(tc.repos, ","), tc.s, tc.stores)
		if n != tc.want || by.String() != tc.by {
			t.Errorf("%s, %+v in %d stores: %d by %s, want %d by %s", tc.repos, tc.s, tc.stores, n, by, tc.want, tc.by)
		}
	}
}

// Whatever is pulled how often, a copy that was just earned is not lost at once, and the other way round.
func TestHysteresis(t *testing.T) {
	r := Default(Selective)
	for have := range 5 {
		for score := 0.0; score < 20; score += 0.1 {
			s := State{Have: have, Score: score, Age: 100 * time.Hour}
			n := r.want(Selective, s, 4)
			s.Have = n
			if again := r.want(Selective, s, 4); again != n {
				t.Fatalf("%d copies at %.1f: first %d, then %d", have, score, n, again)
			}
		}
	}
}

func TestRulesThatMakeNoSense(t *testing.T) {
	for text, want := range map[string]string{
		`mode = "half"`:                                   "want intact, selective, full",
		`mode = "-1"`:                                     "want intact",
		`mode = "65"`:                                     "want intact",
		`modes = "full"`:                                  "there is no setting modes",
		"[selective]\nhot = 1\ncold = 2":                  "hot above cold",
		"[selective]\nhot = 1":                            "hot above cold",
		"[selective]\nhot = nan\ncold = 1":                "hot above cold",
		"[selective]\nstay = \"100d\"":                    "at most 60 days",
		"[[rule]]\nmode = \"full\"":                       "names no repositories",
		"[[rule]]\nrepositories=[\"A\"]\nmode = \"full\"": "pattern",
		"[[rule]]\nrepositories=[\"a\"]":                  "[[rule]] 1",
		`rate = "quick"`:                                  "bytes",
		`mode = `:                                         "",
	} {
		if _, err := ParseRules([]byte(text), Intact); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}
