package commit

import (
	"encoding/json"
	"fmt"
	"path"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/worker/api"
)

// document is a JSON object of which a few fields change: the others stay as they are, whoever wrote them.
type document map[string]json.RawMessage

func (d *document) parse(b []byte) error { return json.Unmarshal(b, d) }

func (d document) get(field string, v any) error {
	if len(d[field]) == 0 || string(d[field]) == "null" {
		return nil
	}
	if err := json.Unmarshal(d[field], v); err != nil {
		return fmt.Errorf("%s: %w", field, err)
	}
	return nil
}

func (d document) set(field string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("%s: %w", field, err)
	}
	d[field] = b
	return nil
}

// madeBy begins what the history says of how a layer was made.
const madeBy = "foil commit"

// newConfig makes the config of an image that has one more layer than that of base, by its diff ID; empty: none more. Equal
// questions give equal bytes.
//
// Errors: api.CodeInvalid for a change that is none.
func newConfig(base []byte, diffID digest.Digest, req api.CommitRequest, now time.Time) ([]byte, error) {
	doc := document{}
	if err := json.Unmarshal(base, &doc); err != nil {
		return nil, err
	}
	var rootfs ocispec.RootFS
	var history []json.RawMessage
	config := document{}
	for field, v := range map[string]any{"rootfs": &rootfs, "history": &history, "config": &config} {
		if err := doc.get(field, v); err != nil {
			return nil, err
		}
	}
	for _, c := range req.Changes {
		if err := change(config, c); err != nil {
			return nil, api.Errorf(api.CodeInvalid, "change %q: %w", c, err)
		}
	}
	by := madeBy
	if len(req.Changes) > 0 {
		by += ": " + strings.Join(req.Changes, "; ")
	}
	step, err := json.Marshal(ocispec.History{Created: &now, CreatedBy: by, Author: req.Author, Comment: req.Message, EmptyLayer: diffID == ""})
	if err != nil {
		return nil, err
	}
	if diffID != "" {
		rootfs.DiffIDs = append(rootfs.DiffIDs, diffID)
	}
	set := map[string]any{"rootfs": rootfs, "history": append(history, step), "config": config, "created": now}
	if req.Author != "" {
		set["author"] = req.Author
	}
	for field, v := range set {
		if err := doc.set(field, v); err != nil {
			return nil, err
		}
	}
	// What Docker notes of the container that made the image before this one.
	for _, field := range []string{"container", "container_config", "docker_version", "id", "parent"} {
		delete(doc, field)
	}
	return json.Marshal(doc)
}

// change does to an image's config what one instruction of a Dockerfile says.
func change(config document, instruction string) error {
	name, rest, _ := strings.Cut(strings.TrimSpace(instruction), " ")
	rest = strings.TrimSpace(rest)
	name = strings.ToUpper(name)
	if rest == "" && name != "CMD" && name != "ENTRYPOINT" {
		return fmt.Errorf("write an instruction, and what it says; %s", instructions)
	}
	switch name {
	case "CMD", "ENTRYPOINT":
		args, err := command(rest)
		if err != nil {
			return err
		}
		return config.set(map[string]string{"CMD": "Cmd", "ENTRYPOINT": "Entrypoint"}[name], args)
	case "ENV":
		pairs, err := assignments(rest)
		if err != nil {
			return err
		}
		var env []string
		if err := config.get("Env", &env); err != nil {
			return err
		}
		for _, p := range pairs {
			env = setEnv(env, p[0], p[1])
		}
		return config.set("Env", env)
	case "LABEL":
		pairs, err := assignments(rest)
		if err != nil {
			return err
		}
		labels := make(map[string]string)
		if err := config.get("Labels", &labels); err != nil {
			return err
		}
		for _, p := range pairs {
			labels[p[0]] = p[1]
		}
		return config.set("Labels", labels)
	case "EXPOSE", "VOLUME":
		field := map[string]string{"EXPOSE": "ExposedPorts", "VOLUME": "Volumes"}[name]
		values, err := words(rest)
		if err != nil {
			return err
		}
		set := make(map[string]struct{})
		if err := config.get(field, &set); err != nil {
			return err
		}
		for _, v := range values {
			if name == "EXPOSE" && !strings.Contains(v, "/") {
				v += "/tcp"
			}
			set[v] = struct{}{}
		}
		return config.set(field, set)
	case "USER":
		return config.set("User", rest)
	case "STOPSIGNAL":
		return config.set("StopSignal", rest)
	case "WORKDIR":
		var before string
		if err := config.get("WorkingDir", &before); err != nil {
			return err
		}
		if !path.IsAbs(rest) {
			rest = path.Join("/", before, rest)
		}
		return config.set("WorkingDir", path.Clean(rest))
	}
	return fmt.Errorf("unknown instruction; %s", instructions)
}

const instructions = "there are CMD, ENTRYPOINT, ENV, EXPOSE, LABEL, STOPSIGNAL, USER, VOLUME and WORKDIR"

// command reads a list in JSON, or what a shell is to be given; nothing is no command.
func command(s string) ([]string, error) {
	var args []string
	switch {
	case s == "":
		return nil, nil
	case !strings.HasPrefix(s, "["):
		return []string{"/bin/sh", "-c", s}, nil
	}
	if err := json.Unmarshal([]byte(s), &args); err != nil {
		return nil, fmt.Errorf("it is no list of strings in JSON: %w", err)
	}
	return args, nil
}

// assignments reads KEY=VALUE ..., or KEY VALUE.
func assignments(s string) (pairs [][2]string, err error) {
	if key, value, ok := strings.Cut(s, " "); ok && !strings.Contains(key, "=") {
		return [][2]string{{key, strings.TrimSpace(value)}}, nil
	}
	list, err := words(s)
	if err != nil {
		return nil, err
	}
	for _, w := range list {
		key, value, ok := strings.Cut(w, "=")
		if !ok || key == "" {
			return nil, fmt.Errorf("%q: write KEY=VALUE", w)
		}
		pairs = append(pairs, [2]string{key, value})
	}
	return pairs, nil
}

// words splits s as a shell does, with quotes and backslashes; or it is a list in JSON.
func words(s string) (list []string, err error) {
	if strings.HasPrefix(s, "[") {
		err := json.Unmarshal([]byte(s), &list)
		return list, err
	}
	var word strings.Builder
	begun, quote := false, byte(0)
	for i := 0; i < len(s); i++ {
		c := s[i]
		switch {
		case quote != 0 && c == quote:
			quote = 0
		case c == '\\' && quote != '\'' && i+1 < len(s):
			i++
			word.WriteByte(s[i])
			begun = true
		case quote != 0:
			word.WriteByte(c)
		case c == '"' || c == '\'':
			quote, begun = c, true
		case c == ' ' || c == '\t':
			if begun {
				list = append(list, word.String())
				word.Reset()
				begun = false
			}
		default:
			word.WriteByte(c)
			begun = true
		}
	}
	if quote != 0 {
		return nil, fmt.Errorf("a quote %c is not closed", quote)
	}
	if begun {
		list = append(list, word.String())
	}
	return list, nil
}

func setEnv(env []string, key, value string) []string {
	for i, kv := range env {
		if k, _, _ := strings.Cut(kv, "="); k == key {
			env[i] = key + "=" + value
			return env
		}
	}
	return append(env, key+"="+value)
}

// newManifest makes the manifest of a config, which has one more layer than that of base; nil: none more.
func newManifest(base []byte, config []byte, more *ocispec.Descriptor) ([]byte, error) {
	doc := document{}
	if err := json.Unmarshal(base, &doc); err != nil {
		return nil, err
	}
	var desc ocispec.Descriptor
	var layers []ocispec.Descriptor
	if err := doc.get("config", &desc); err != nil {
		return nil, err
	}
	if err := doc.get("layers", &layers); err != nil {
		return nil, err
	}
	// What else is said of the old config is not said of the new one.
	desc = ocispec.Descriptor{MediaType: desc.MediaType, Digest: digest.FromBytes(config), Size: int64(len(config))}
	if more != nil {
		layers = append(layers, *more)
	}
	for field, v := range map[string]any{"config": desc, "layers": layers} {
		if err := doc.set(field, v); err != nil {
			return nil, err
		}
	}
	// Annotations say who made that image, when, from what; and what refers to it does not refer to this one.
	for _, field := range []string{"annotations", "subject", "artifactType"} {
		delete(doc, field)
	}
	return json.Marshal(doc)
}
