package pull

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"
)

func TestListTags(t *testing.T) {
	var all []string
	for i := range 25 {
		all = append(all, fmt.Sprintf("v%02d", i))
	}
	after := func(last string, most int) []string {
		i := 0
		if last != "" {
			i = slices.Index(all, last) + 1
		}
		return all[i:min(i+most, len(all))]
	}
	for name, answer := range map[string]func(last string) any{
		"pages of ten":       func(last string) any { return after(last, 10) },
		"pages of five":      func(last string) any { return after(last, 5) },
		"all, whatever":      func(string) any { return all },
		"none at the end":    func(last string) any { return map[bool]any{true: nil, false: all}[last == "v24"] },
		"overlapping pages ": func(last string) any { return append([]string{"v00"}, after(last, 7)...) },
	} {
		asked := 0
		got, err := listTags(func(last string, page any) error {
			if asked++; asked > 30 {
				return errors.New("asked for ever")
			}
			b, err := json.Marshal(map[string]any{"name": "r", "tags": answer(last)})
			return errors.Join(err, json.Unmarshal(b, page))
		})
		if err != nil || !slices.Equal(got, all) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	broken := errors.New("broken")
	if _, err := listTags(func(string, any) error { return broken }); !errors.Is(err, broken) {
		t.Error(err)
	}
	// A registry that never ends is not listened to for ever.
	n := 0
	if tags, err := listTags(func(_ string, page any) error {
		var many []string
		for range tagsPage {
			n++
			many = append(many, fmt.Sprint(n))
		}
		b, err := json.Marshal(map[string]any{"tags": many})
		return errors.Join(err, json.Unmarshal(b, page))
	}); err == nil {
		t.Errorf("believed %d tags", len(tags))
	}
}
