package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// tree writes files, by path and text, and returns the directory of them.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		at := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

const noLimitV1 = "9223372036854771712\n"

// cgroupV1 and cgroupV2 are files of one cgroup.
func cgroupV1(files map[string]string, dir, limit, usage, inactive string) {
	files["memory/"+dir+"/memory.limit_in_bytes"] = limit
	files["memory/"+dir+"/memory.usage_in_bytes"] = usage
	files["memory/"+dir+"/memory.stat"] = "cache 7\ninactive_file 1\ntotal_inactive_file " + inactive + "\n"
}

func cgroupV2(files map[string]string, dir, high, most, current, inactive string) {
	files[dir+"/memory.high"], files[dir+"/memory.max"] = high, most
	files[dir+"/memory.current"] = current
	files[dir+"/memory.stat"] = "anon 7\ninactive_file " + inactive + "\nactive_file 99\n"
}

func TestMemoryLeft(t *testing.T) {
	v1 := map[string]string{"memory/cgroup.procs": ""}
	cgroupV1(v1, "", noLimitV1, "5000", "0")
	cgroupV1(v1, "kubepods/pod1", "1000\n", "700", "200")
	cgroupV1(v1, "kubepods/pod1/small", "300\n", "100", "0")
	cgroupV1(v1, "kubepods/pod1/free", noLimitV1, "100", "0")
	cgroupV1(v1, "over", "300\n", "400", "0")
	cgroupV1(v1, "strange", "much\n", "400", "0")
	hybrid := map[string]string{"unified/cgroup.controllers": "\n"}
	for name, text := range v1 {
		hybrid[name] = text
	}
	v2 := map[string]string{"cgroup.controllers": "cpuset cpu io memory pids\n", "memory.stat": "inactive_file 5\n"}
	cgroupV2(v2, "kubepods.slice", "max\n", "1000\n", "700", "200")
	cgroupV2(v2, "kubepods.slice/high", "300\n", "max\n", "100", "50")
	cgroupV2(v2, "kubepods.slice/free", "max\n", "max\n", "100", "0")
	cgroupV2(v2, "other.slice", "max\n", "max\n", "100", "0")
	under := make(map[string]string)
	for name, text := range v2 {
		under["unified/"+name] = text
	}
	under["cpu/cgroup.procs"] = ""
	for _, c := range []struct {
		name, cgroup string
		files        map[string]string
		want         int64
		err          string
	}{
		{"v1: the limit of the container", "/kubepods/pod1/small", v1, 200, ""},
		{"v1: that of its pod", "/kubepods/pod1/free", v1, 500, ""},
		{"v1: not there yet, in a pod", "/kubepods/pod1/new", v1, 500, ""},
		{"v1: nothing of it is there", "/foil/new", v1, Unlimited, ""},
		{"v1: more is used than may be", "/over", v1, 0, ""},
		{"v1: no number", "/strange", v1, 0, "no number of bytes"},
		{"v1, and v2 without controllers", "/kubepods/pod1/small", hybrid, 200, ""},
		{"v2: memory.high", "/kubepods.slice/high", v2, 250, ""},
		{"v2: memory.max above", "/kubepods.slice/free", v2, 500, ""},
		{"v2: not there yet", "/kubepods.slice/a/b", v2, 500, ""},
		{"v2: no limit", "/other.slice", v2, Unlimited, ""},
		{"v2 has the controller, in unified", "/kubepods.slice/high", under, 250, ""},
		{"no memory controller", "/x", map[string]string{"cpu/x": ""}, 0, "no cgroups with the memory controller"},
	} {
		got, err := Cgroups(tree(t, c.files)).MemoryLeft(c.cgroup)
		if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %d, %v; want %d, %q", c.name, got, err, c.want, c.err)
		}
	}
}

func TestOwnMemory(t *testing.T) {
	v1 := Cgroups(tree(t, map[string]string{"memory/cgroup.procs": "", "unified/cgroup.controllers": ""}))
	v2 := Cgroups(tree(t, map[string]string{"cgroup.controllers": "memory\n"}))
	for _, c := range []struct {
		at         Cgroups
		self, want string
	}{
		{v1, "4:memory:/a\n0::/b\n", "/a"},
		{v1, "4:cpu,memory:/a:c\n0::/b\n", "/a:c"},
		{v2, "4:cpu:/a\n0::/b\n", "/b"},
		{v1, "0::/b\n", ""},
	} {
		got, err := c.at.OwnMemory(Proc(tree(t, map[string]string{"self/cgroup": c.self})))
		if got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%q: %q, %v; want %q", c.self, got, err, c.want)
		}
	}
}

func TestCgroupOf(t *testing.T) {
	for oci, want := range map[string]string{
		"/kubepods/burstable/pod1/abc":          "/kubepods/burstable/pod1/abc",
		"foil/x":                                "/foil/x",
		"kubepods-burstable-pod1.slice:cri:abc": "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-abc.scope",
		"system.slice::abc":                     "/system.slice/abc.scope",
		":docker:abc":                           "/system.slice/docker-abc.scope",
		"-.slice:cri:abc":                       "/cri-abc.scope",
		"a.slice:cri:a-b.slice":                 "/a.slice/a-b.slice",
		"../../etc":                             "/etc",
		"":                                      "/",
	} {
		if got := CgroupOf(oci); got != want {
			t.Errorf("%q: %s, want %s", oci, got, want)
		}
	}
}

func TestAvailable(t *testing.T) {
	p := Proc(tree(t, map[string]string{"meminfo": "MemTotal:       24683520 kB\nMemFree:  1 kB\nMemAvailable:   23923520 kB\nHugePages_Total: 0\n"}))
	total, available, err := p.Available()
	if err != nil || total != 24683520<<10 || available != 23923520<<10 {
		t.Errorf("%d, %d, %v", total, available, err)
	}
	if _, _, err := Proc(tree(t, map[string]string{"meminfo": "MemTotal: 5 kB\n"})).Available(); err == nil {
		t.Error("a kernel before 3.14 is not noticed")
	}
	if total, available, err := Proc("").Available(); err != nil || available <= 0 || available > total {
		t.Errorf("of this host: %d of %d, %v", available, total, err)
	}
}

func TestMemoryPressure(t *testing.T) {
	some := Proc(tree(t, map[string]string{"pressure/memory": "some avg10=12.50 avg60=1.00 avg300=0.00 total=0\nfull avg10=3.00 avg60=0.00 avg300=0.00 total=0\n"}))
	if got, err := some.MemoryPressure(); err != nil || got != .125 {
		t.Errorf("%v, %v", got, err)
	}
	for name, p := range map[string]Proc{
		"none":     Proc(t.TempDir()),
		"nonsense": Proc(tree(t, map[string]string{"pressure/memory": "full avg10=3.00\n"})),
	} {
		if _, err := p.MemoryPressure(); !errors.Is(err, ErrNoPressure) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Proc("").MemoryPressure(); err != nil {
		t.Skip("this host: ", err)
	}
}

// What version 1 of this kernel says of a cgroup with a limit.
func TestMemoryLeftOfKernel(t *testing.T) {
	var c Cgroups
	root, v2, err := c.memory()
	if err != nil {
		t.Skip(err)
	}
	own, err := c.OwnMemory("")
	if err != nil {
		t.Skip(err)
	}
	if _, err := c.MemoryLeft(own); err != nil {
		t.Fatal(err)
	}
	if v2 {
		t.Skip("version 2 would have this process leave its cgroup for one to be made below it")
	}
	cgroup := filepath.Join(own, fmt.Sprintf("foil-test-%d", os.Getpid()))
	dir := filepath.Join(root, cgroup)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skip("cgroups cannot be written here: ", err)
	}
	defer func() {
		if err := os.Remove(dir); err != nil {
			t.Error(err)
		}
	}()
	above, err := c.MemoryLeft(own)
	if err != nil {
		t.Fatal(err)
	}
	if left, err := c.MemoryLeft(cgroup); err != nil || left > above {
		t.Errorf("without a limit %d bytes are left, %v; above it %d", left, err, above)
	}
	const limit = 64 << 20
	if err := os.WriteFile(filepath.Join(dir, "memory.limit_in_bytes"), fmt.Append(nil, limit), 0); err != nil {
		t.Fatal(err)
	}
	if left, err := c.MemoryLeft(cgroup); err != nil || left > limit || left < limit/2 && above > limit {
		t.Errorf("with a limit of %d, %d are left, %v", limit, left, err)
	}
}
