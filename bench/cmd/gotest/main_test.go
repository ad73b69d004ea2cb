package main

import (
	"strings"
	"testing"
)

const sample = `{"Action":"start","Package":"p"}
{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestA","Output":"=== RUN   TestA\n"}
{"Action":"output","Package":"p","Test":"TestA/sub","Output":"    quiet\n"}
{"Action":"pass","Package":"p","Test":"TestA/sub"}
{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestB","Output":"    b_test.go:7: got 1, want 2\n"}
{"Action":"fail","Package":"p","Test":"TestB"}
{"Action":"output","Package":"p","Test":"TestC","Output":"=== RUN   TestC\n"}
{"Action":"output","Package":"p","Test":"TestC","Output":"    c_test.go:9: needs Linux 9\n"}
{"Action":"output","Package":"p","Test":"TestC","Output":"--- SKIP: TestC (0.00s)\n"}
{"Action":"skip","Package":"p","Test":"TestC"}
{"Action":"fail","Package":"p","Elapsed":1.5}
{"ImportPath":"q","Action":"build-output","Output":"q.go:1: syntax error\n"}
{"Action":"fail","Package":"q","Elapsed":0,"FailedBuild":"q"}
not JSON
`

func TestReport(t *testing.T) {
	var out strings.Builder
	r := report{out: &out, output: map[test][]string{}}
	if err := r.read(strings.NewReader(sample)); err != nil {
		t.Fatal(err)
	}
	if r.passed != 1 || r.failed != 1 || r.skipped != 1 {
		t.Errorf("counted %d passed, %d failed, %d skipped; want one each", r.passed, r.failed, r.skipped)
	}
	want := "    b_test.go:7: got 1, want 2\n" +
		"skip\tp TestC: c_test.go:9: needs Linux 9\n" +
		"FAIL\tp\t1.500s\n" +
		"q.go:1: syntax error\n" +
		"FAIL\tq\t0.000s\n" +
		"not JSON\n"
	if out.String() != want {
		t.Errorf("printed:\n%swant:\n%s", out.String(), want)
	}
}

func TestArguments(t *testing.T) {
	dir, flags, modules, err := arguments([]string{"-C", "..", "-p", "2", "--", ".", "bench"})
	if err != nil {
		t.Fatal(err)
	}
	if dir != ".." || strings.Join(flags, " ") != "-p 2" || strings.Join(modules, " ") != ". bench" {
		t.Errorf("got %q %q %q", dir, flags, modules)
	}
	if _, _, _, err := arguments([]string{"-p", "2"}); err == nil {
		t.Error("no modules: no error")
	}
}
