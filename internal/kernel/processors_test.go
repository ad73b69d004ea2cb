package kernel

import (
	"testing"
	"time"
)

func TestProcessors(t *testing.T) {
	p := Proc(tree(t, map[string]string{"stat": "cpu  100 200 300 400 50 60 70 80 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\ncpu2 1 1 1 1 1 1 1 1 0 0\nintr 5\n"}))
	got, err := p.Processors()
	if err != nil || got.Number != 2 || got.Usual != 4*time.Second || got.Low != 2*time.Second || got.Idle != 4500*time.Millisecond {
		t.Errorf("%+v, %v", got, err)
	}
	if got.Own <= 0 || got.OwnUser > got.Own {
		t.Errorf("of this process: %+v", got)
	}
	for _, bad := range []string{"", "cpu 1 2 3\n", "cpu 1 2 3 4 x\n", "intr 1 2 3 4 5 6\n"} {
		if _, err := Proc(tree(t, map[string]string{"stat": bad})).Processors(); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
	if here, err := Proc("").Processors(); err != nil || here.Usual <= 0 || here.Number == 0 {
		t.Errorf("of this host: %+v, %v", here, err)
	}
}
