package running

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
	"hydrofoil.dev/foil/bench/stats"
	"hydrofoil.dev/foil/internal/worker/api"
)

// arriving times each operation in a container that has just become ready, of an
// image of which the rest is on its way.
func arriving(ctx context.Context, s *site.Site, o Options, im engines.Image) error {
	r := Result{Image: im.Name, Link: describe(o.Link)}
	for _, op := range withTask(im) {
		row := Arriving{What: op.name, Rounds: o.Rounds}
		var times []float64
		for round := range o.Rounds {
			took, complete, err := arrivingOnce(ctx, s, o, im, op, filepath.Join(s.Dir, fmt.Sprintf("arriving-%s-%d", op.name, round)))
			if err != nil {
				return err
			}
			times = append(times, took.Seconds())
			if complete {
				row.Complete++
			}
		}
		row.Seconds = stats.Median(times)
		r.Arriving = append(r.Arriving, row)
		if o.Log != nil {
			o.Log("measured " + op.name)
		}
	}
	return r.deliver(o)
}

func arrivingOnce(ctx context.Context, s *site.Site, o Options, im engines.Image, op operation, dir string) (took time.Duration, complete bool, err error) {
	if err := site.DropCaches(); err != nil {
		return 0, false, err
	}
	w := (&engines.Hydrofoil{}).Worker(s, o.Programs, dir)
	if err := w.Start(ctx); err != nil {
		return 0, false, err
	}
	defer func() { err = errors.Join(err, w.Stop(), site.RemoveTree(dir)) }()
	if err := provision(ctx, s, w, im, false); err != nil {
		return 0, false, err
	}
	err = w.(engines.Mounter).Mounted(ctx, im.Ref, func(tree string) error {
		took, err = inProcess(ctx, im.Name, op.name, tree)
		if err != nil {
			return err
		}
		client := api.Dial(dir)
		defer client.Close()
		list, err := client.Images(ctx)
		for _, i := range list {
			complete = complete || i.State == "complete"
		}
		return err
	})
	return took, complete, err
}

// inProcess has a process of its own do an operation: this one emulates the link, and
// would wait for itself in each page fault that waits for bytes.
func inProcess(ctx context.Context, image, name, tree string) (time.Duration, error) {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", OperationCommand, image, name, tree)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var out, diagnosis bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &diagnosis
	if err := cmd.Run(); err != nil {
		return 0, fmt.Errorf("bench: %s in %s: %w\n%s", name, tree, err, diagnosis.Bytes())
	}
	return time.ParseDuration(strings.TrimSpace(out.String()))
}

// OperationCommand is the command of bench that calls Operation.
const OperationCommand = "running-operation"

// Operation times one operation on the tree of an image's container, NAME:TAG.
func Operation(image, name, tree string) (time.Duration, error) {
	ops := withTask(engines.Image{Name: image})
	i := slices.IndexFunc(ops, func(op operation) bool { return op.name == name })
	if i < 0 {
		return 0, fmt.Errorf("bench: %s has no operation %s", image, name)
	}
	in, err := look(tree) // asks for metadata only
	if err != nil {
		return 0, err
	}
	began := time.Now()
	if err := ops[i].do(tree, in); err != nil {
		return 0, fmt.Errorf("bench: %s in %s: %w", name, tree, err)
	}
	return time.Since(began), nil
}

func describe(l link.Options) string {
	rate := "an unlimited link"
	if l.Rate > 0 {
		rate = fmt.Sprintf("%.0f Mbit/s", float64(l.Rate)/1e6)
	}
	return fmt.Sprintf("%s, %v", rate, l.RTT)
}
