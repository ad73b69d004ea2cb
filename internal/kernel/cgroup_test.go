package kernel

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCgroupProcs(t *testing.T) {
	for _, test := range []struct {
		proc string
		want []string
	}{
		{"0::/user.slice/a:b\n", []string{"/cg/user.slice/a:b/cgroup.procs", "/cg/unified/user.slice/a:b/cgroup.procs"}},
		{"9:name=systemd:/\n4:memory:/x\n3:cpu,cpuacct:/y\n", []string{"/cg/systemd/cgroup.procs", "/cg/memory/x/cgroup.procs", "/cg/cpu,cpuacct/y/cgroup.procs"}},
		{"", nil},
		{"nonsense\n", nil},
	} {
		if diff := cmp.Diff(test.want, cgroupProcs("/cg", []byte(test.proc))); diff != "" {
			t.Errorf("%q: %s", test.proc, diff)
		}
	}
}

// The process is where it was.
func TestRejoinCgroup(t *testing.T) {
	before, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Skip(err)
	}
	if err := RejoinCgroup(); err != nil {
		t.Skip("cgroups cannot be written here: ", err)
	}
	after, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(before), string(after)); diff != "" {
		t.Error(diff)
	}
}
