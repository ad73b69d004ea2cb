package running

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/bench/engines"
)

// taskName is the operation that a task is.
const taskName = "task"

// tasks are shell scripts that do with an image what it is for, in a container's
// file system, by its own programs: how long they take is the measure. They
// leave nothing.
var tasks = map[string]string{
	"redis": `rm -f /tmp/s; redis-server --port 0 --unixsocket /tmp/s --save '' &
until redis-cli -s /tmp/s ping; do sleep 0.01; done
redis-benchmark -s /tmp/s -t set,get,lrange_100 -n 20000 -q
redis-cli -s /tmp/s shutdown nosave; wait`,
	"postgres": `cd /tmp; rm -rf /tmp/d; PATH=$(echo /usr/lib/postgresql/*/bin):$PATH
run() { setpriv --reuid postgres --regid postgres --clear-groups "$@"; }
run mkdir /tmp/d; run initdb -D /tmp/d
run pg_ctl -D /tmp/d -w -o "-h '' -k /tmp" start
run pgbench -h /tmp -i -s 2 postgres
run pgbench -h /tmp -c 4 -t 500 postgres
run pg_ctl -D /tmp/d -m immediate stop; rm -rf /tmp/d`,
	"gcc": `cd /tmp; printf '#include <iostream>\n#include <map>\n#include <regex>\n#include <vector>\nint main(int c, char **v) { std::map<std::string, std::vector<int>> m; m[v[0]].push_back(c); std::cout << std::regex_match(v[0], std::regex("x*")) << m.size(); }\n' >b.cc
for gxx in /usr/bin/g++*; do :; done
$gxx -O1 -o b b.cc; ./b; rm -f b b.cc`,
}

// withTask returns the operations, with that of an image if it has one.
func withTask(im engines.Image) []operation {
	name, _, _ := strings.Cut(im.Name, ":")
	script, ok := tasks[name]
	if !ok {
		return operations
	}
	return append(slices.Clone(operations), operation{taskName, func(tree string, _ inventory) (err error) {
		for _, dir := range []string{"/dev", "/proc"} {
			at := filepath.Join(tree, dir)
			if err := unix.Mount(dir, at, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
				return fmt.Errorf("bench: mount %s in a container's file system: %w", dir, err)
			}
			defer unix.Unmount(at, unix.MNT_DETACH)
		}
		// Its servers end with it, however it ends.
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		cmd := exec.CommandContext(ctx, "/bin/sh", "-e", "-c", script)
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: tree, Cloneflags: syscall.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL}
		cmd.Dir = "/"
		cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Run(); err != nil {
			text := out.String()
			return fmt.Errorf("bench: the task of %s: %w\n%s", im.Name, err, text[max(0, len(text)-2000):])
		}
		return nil
	}})
}
