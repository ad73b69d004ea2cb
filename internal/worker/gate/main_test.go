package gate_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel/kerneltest"
	"hydrofoil.dev/foil/internal/worker/gate"
	"hydrofoil.dev/foil/internal/worker/gate/gatetest"
	"hydrofoil.dev/foil/internal/worker/keeper"
)

// This test binary is also the keeper and the daemon of the crash tests.
const (
	keeperEnv = "FOIL_GATE_TEST_KEEPER"
	daemonEnv = "FOIL_GATE_TEST_DAEMON"
)

func TestMain(m *testing.M) {
	kerneltest.OwnMounts()
	gatetest.Child()
	if socket := os.Getenv(keeperEnv); socket != "" {
		err := keeper.Serve(context.Background(), socket, func() {
			fmt.Println("ready")
			keeper.Detach()
		})
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		return
	}
	if config := os.Getenv(daemonEnv); config != "" {
		var d daemon
		err := json.Unmarshal([]byte(config), &d)
		if err == nil {
			err = d.run()
		}
		if err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// daemon is a worker daemon that has nothing but a gate over one arena, whose
// bytes are in the file "truth" of Dir and whose presence map is the file
// "present", which outlives it like a real one's.
type daemon struct {
	Dir    string
	FUSE   bool          // its gate is a FUSE gate
	Stop   string        // die by SIGKILL at this point of the gate ...
	StopAt int64         // ... when it comes there for this time
	Demand bool          // ranges arrive when they are needed ...
	Delay  time.Duration // ... after at most so long
}

func (d *daemon) run() error {
	ctx := context.Background()
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	socket := filepath.Join(d.Dir, "keeper")
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	k, err := keeper.Start(ctx, keeper.Options{
		Socket: socket, Command: []string{exe}, Env: []string{keeperEnv + "=" + socket}, Logger: log,
		Restarted: func(pid int) { fmt.Println("restarted", pid) },
	})
	if err != nil {
		return err
	}
	var points atomic.Int64
	o := gate.Options{Keeper: k, Held: k.Held(), Logger: log}.WithStop(func(point string) {
		if point == d.Stop && points.Add(1) == d.StopAt {
			unix.Kill(os.Getpid(), unix.SIGKILL)
		}
	})
	o.Dir = filepath.Join(d.Dir, "gate")
	g, how, err := d.gate(ctx, o)
	if err != nil {
		return err
	}
	arena := k.Held()[gate.KeptArena+"arena"]
	if arena == nil {
		if arena, err = os.OpenFile(filepath.Join(d.Dir, "arena"), os.O_RDWR, 0); err != nil {
			return err
		}
	}
	truth, err := mapFile(filepath.Join(d.Dir, "truth"))
	if err != nil {
		return err
	}
	present, err := mapFile(filepath.Join(d.Dir, "present"))
	if err != nil {
		return err
	}
	b := gatetest.NewBacking(arena, truth, present)
	b.Demand(d.Demand)
	if err := g.Guard("arena", arena, late{b, d.Delay}); err != nil {
		return err
	}
	if err := g.Start(); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(d.Dir, "device"), []byte(g.Device("arena", arena.Name())), 0o600); err != nil {
		return err
	}
	fmt.Println("ready", how, k.PID())
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		command, arg, _ := strings.Cut(in.Text(), " ")
		switch command {
		case "demand":
			b.Demand(true)
		case "pending": // wait until as many events have no answer
			n, _ := strconv.Atoi(arg)
			for g.Stats().Pending < n {
				time.Sleep(time.Millisecond)
			}
		case "quit":
			err := errors.Join(g.Close(), k.Close())
			if err != nil {
				return err
			}
			fmt.Println("ok")
			return nil
		}
		fmt.Println("ok")
	}
	return in.Err()
}

// stated is a gate that says what it does.
type stated interface {
	gate.Gate
	Stats() gate.Stats
}

func (d *daemon) gate(ctx context.Context, o gate.Options) (g stated, how string, err error) {
	how = "takeover"
	if d.FUSE {
		g, err = gate.TakeoverFUSE(o)
	} else {
		g, err = gate.Takeover(ctx, o)
	}
	if !errors.Is(err, gate.ErrNoGate) {
		return g, how, err
	}
	how = "nogate"
	if d.FUSE {
		g, err = gate.NewFUSE(ctx, o)
	} else {
		g, err = gate.New(ctx, o)
	}
	return g, how, err
}

// late is a backing whose bytes take their time.
type late struct {
	*gatetest.Backing
	most time.Duration
}

func (l late) Need(ctx context.Context, off, n int64) error {
	if l.most > 0 {
		select {
		case <-time.After(rand.N(l.most)):
		case <-ctx.Done():
		}
	}
	return l.Backing.Need(ctx, off, n)
}

func mapFile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}
