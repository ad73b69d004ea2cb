package pods

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"hydrofoil.dev/foil/bench/engines"
)

// more is what pods with arguments of their own add to the image's: what somebody may well set.
var more = map[string][]string{
	"redis":     {"--appendonly", "yes"},
	"nginx":     {"-e", "stderr"},
	"postgres":  {"-c", "work_mem=8MB"},
	"memcached": {"-m", "32"},
}

// withArgs returns the image as a pod with such arguments runs it.
func withArgs(im engines.Image, args string) (engines.Image, error) {
	if args == imageArgs {
		return im, nil
	}
	name, _, _ := strings.Cut(im.Name, ":")
	own, ok := more[name]
	if !ok {
		return im, fmt.Errorf("bench: no arguments of a pod's own are known for %s: say --args %s", name, imageArgs)
	}
	command := im.Command
	if len(command) == 0 {
		command = im.Built.Config.Config.Cmd
	}
	im.Command = slices.Concat(command, own)
	return im, nil
}

// manifest is a static pod on the host's network.
func manifest(name, image string, args []string, probe map[string]any) (string, error) {
	container := map[string]any{"name": "app", "image": image, "imagePullPolicy": "IfNotPresent"}
	if len(args) > 0 {
		container["args"] = args
	}
	if probe != nil {
		probe["periodSeconds"] = 1
		container["readinessProbe"] = probe
	}
	text, err := json.MarshalIndent(map[string]any{
		"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": name},
		"spec": map[string]any{
			"hostNetwork": true, "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": false,
			"containers": []any{container},
		},
	}, "", "  ")
	return string(text), err
}

// probe is a declared probe as a kubelet takes it, at the loopback of the host.
func probe(declared string) (map[string]any, error) {
	kind, rest, _ := strings.Cut(declared, ":")
	text, path, _ := strings.Cut(rest, "/")
	port, err := strconv.ParseUint(text, 10, 16)
	if err == nil {
		at := map[string]any{"host": "127.0.0.1", "port": port}
		switch kind {
		case "tcp":
			return map[string]any{"tcpSocket": at}, nil
		case "http":
			at["path"] = "/" + path
			return map[string]any{"httpGet": at}, nil
		}
	}
	return nil, fmt.Errorf("bench: probe %q: a kubelet is asked for tcp:PORT and http:PORT/PATH here", declared)
}
