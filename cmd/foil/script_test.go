package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/api/apitest"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"foil": main})
}

// TestScript runs the commands as users do. The scripts know one command more:
//
//	fakenode    starts a daemon at $FOIL_ROOT that answers from files in $WORK/daemon
//	            (see fakeNode); it ends with the script
func TestScript(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: filepath.Join("testdata", "script"),
		Setup: func(env *testscript.Env) error {
			env.Setenv("FOIL_ROOT", filepath.Join(env.WorkDir, "root"))
			env.Setenv("TZ", "UTC")
			examples, err := filepath.Abs(filepath.Join("..", "..", "examples"))
			env.Setenv("EXAMPLES", examples)
			return err
		},
		Condition: func(cond string) (bool, error) {
			if cond == "root" {
				return os.Geteuid() == 0, nil
			}
			return false, fmt.Errorf("unknown condition %q", cond)
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"fakenode": func(ts *testscript.TestScript, neg bool, args []string) {
				if neg || len(args) > 0 {
					ts.Fatalf("usage: fakenode")
				}
				node := &fakeNode{dir: ts.MkAbs("daemon")}
				stop, err := apitest.Start(ts.Getenv("FOIL_ROOT"), node.funcs())
				ts.Check(err)
				ts.Defer(stop)
			},
		},
	})
}

// fakeNode answers from files: images.jsonl, containers.jsonl, status.jsonl, tags.jsonl,
// report.jsonl (of pulls), pull.jsonl, verify.jsonl and prove.jsonl are what the requests of the same name return;
// NAME.error (an api.Error) makes them fail, streams after their lines, where
// NAME may be remove-image, remove-container and create-container as well. Of an image whose
// name without registry and tag is NAME, pull-NAME is asked instead of pull, if there is such a file. Every
// request that changes something is a line of the file log.
type fakeNode struct {
	dir string
	mu  sync.Mutex // guards the file log
}

func (n *fakeNode) funcs() apitest.Funcs {
	return apitest.Funcs{
		Images_:     func(context.Context) ([]api.Image, error) { return lines[api.Image](n, "images") },
		Containers_: func(context.Context) ([]api.Container, error) { return lines[api.Container](n, "containers") },
		Status_: func(context.Context) (*api.Status, error) {
			all, err := lines[api.Status](n, "status")
			if err != nil {
				return nil, err
			}
			if len(all) == 0 {
				return &api.Status{}, nil
			}
			return &all[0], nil
		},
		Tags_: func(_ context.Context, req api.TagsRequest) (*api.Tags, error) {
			if err := n.log("tags", req); err != nil {
				return nil, err
			}
			all, err := lines[api.Tags](n, "tags")
			if err != nil || len(all) == 0 {
				return nil, errors.Join(errors.New("no tags.jsonl"), err)
			}
			return &all[0], nil
		},
		PullReport_: func(_ context.Context, ref string) (*api.PullReport, error) {
			all, err := lines[api.PullReport](n, "report")
			if err != nil {
				return nil, err
			}
			for _, r := range all {
				if r.Ref == ref {
					return &r, nil
				}
			}
			return nil, &api.Error{Code: api.CodeNotFound, Message: "no pull of " + ref}
		},
		RemoveImage_:     func(_ context.Context, ref string) error { return n.change("remove-image", ref) },
		RemoveContainer_: func(_ context.Context, id string) error { return n.change("remove-container", id) },
		CreateContainer_: func(_ context.Context, req api.ContainerRequest) (*api.Container, error) {
			if err := n.change("create-container", req); err != nil {
				return nil, err
			}
			all, err := lines[api.Container](n, "create")
			if err != nil || len(all) == 0 {
				return nil, errors.Join(errors.New("no create.jsonl"), err)
			}
			return &all[0], nil
		},
		Pull_: func(_ context.Context, req api.PullRequest, emit func(api.Event) error) error {
			if err := n.log("pull", req); err != nil {
				return err
			}
			_, name, _ := strings.Cut(req.Ref, "/")
			name, _, _ = strings.Cut(name, ":")
			for _, suffix := range []string{".jsonl", ".error"} {
				if _, err := os.Stat(filepath.Join(n.dir, "pull-"+name+suffix)); err == nil {
					return stream(n, "pull-"+name, emit)
				}
			}
			return stream(n, "pull", emit)
		},
		Verify_: func(_ context.Context, ref string, emit func(api.VerifyEvent) error) error {
			return stream(n, "verify", emit)
		},
		Prove_: func(_ context.Context, ref string, emit func(api.VerifyEvent) error) error {
			return stream(n, "prove", emit)
		},
	}
}

// lines reads one of the files.
func lines[T any](n *fakeNode, name string) ([]T, error) {
	if err := n.failure(name); err != nil {
		return nil, err
	}
	return values[T](n, name)
}

func values[T any](n *fakeNode, name string) ([]T, error) {
	f, err := os.Open(filepath.Join(n.dir, name+".jsonl"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var all []T
	for s := bufio.NewScanner(f); s.Scan(); {
		var v T
		if err := json.Unmarshal(s.Bytes(), &v); err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name(), err)
		}
		all = append(all, v)
	}
	return all, nil
}

func stream[T any](n *fakeNode, name string, emit func(T) error) error {
	all, err := values[T](n, name)
	if err != nil {
		return err
	}
	for _, v := range all {
		if err := emit(v); err != nil {
			return err
		}
	}
	return n.failure(name)
}

// failure returns the error in NAME.error, nil if there is none.
func (n *fakeNode) failure(name string) error {
	b, err := os.ReadFile(filepath.Join(n.dir, name+".error"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	e := new(api.Error)
	if err := json.Unmarshal(b, e); err != nil {
		return fmt.Errorf("%s.error: %w", name, err)
	}
	return e
}

func (n *fakeNode) change(name string, what any) error {
	return errors.Join(n.failure(name), n.log(name, what))
}

func (n *fakeNode) log(name string, what any) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	b, err := json.Marshal(what)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(n.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(f, "%s %s\n", name, b)
	return errors.Join(err, f.Close())
}
