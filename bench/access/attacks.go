package access

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/bench/stats"
	"hydrofoil.dev/foil/internal/format/bundle"
)

// Attack is what one attack did.
type Attack struct {
	Name    string `json:"name"`
	Limited bool   `json:"limited"` // the server had its limits
	// Slower is how much longer honest pulls took than alone, the median of the rounds' ratios.
	Slower      float64        `json:"slower"`
	Bounds      stats.Interval `json:"bounds"`
	Pull        float64        `json:"pull"`        // seconds that one took alone, the median of the rounds' medians
	Memory      int64          `json:"memory"`      // bytes, the most
	Descriptors int            `json:"descriptors"` // the most
	Processors  float64        `json:"processors"`  // of the server, during the attack, honest pulls included
	Alone       float64        `json:"alone"`       // processors without the attack
	Steps       float64        `json:"steps"`       // a second
	Refused     float64        `json:"refused"`     // share of them
}

// attacks are prepared on a server where mallory has a token, by what has them know what to send, and go on in a process of
// their own (Assault).
var attacks = []struct {
	name    string
	prepare func(ctx context.Context, s *server, token string) (target, error)
	step    func(target) step
}{
	{"idle", nothing, ask}, {"uploads", nothing, uploads}, {"idle bodies", nothing, bodies(time.Hour)}, {"slow bodies", nothing, bodies(200 * time.Millisecond)},
	{"referrers", referrers, ask}, {"bundles", bundlesOf, ask}, {"haves", haves, ask}, {"layers", manyLayers, ask}, {"blobs", blobs, ask}, {"logins", nothing, logins},
}

// Names lists the attacks.
func Names() (all []string) {
	for _, a := range attacks {
		all = append(all, a.name)
	}
	return all
}

// nothing has to be there.
func nothing(context.Context, *server, string) (target, error) {
	return target{Method: "GET", Path: "/"}, nil
}

// referrers are many, and large.
func referrers(ctx context.Context, s *server, token string) (t target, err error) {
	_, subject, err := s.artifact(ctx, token, "mallory/app", nil, "")
	if err != nil {
		return t, err
	}
	for n := range 50 {
		if _, _, err := s.artifact(ctx, token, "mallory/app", &subject, strings.Repeat(fmt.Sprint(n), 32<<10)); err != nil {
			return t, err
		}
	}
	return target{Method: "GET", Path: "/v2/mallory/app/referrers/" + subject.Digest.String()}, nil
}

// bundlesOf asks for whole images.
func bundlesOf(ctx context.Context, s *server, token string) (t target, err error) {
	if err := s.image(ctx, token, "mallory/image"); err != nil {
		return t, err
	}
	b, err := json.Marshal(bundle.Request{Versions: []int{bundle.Version}, Image: bundle.ImageRequest{Repository: "mallory/image", Reference: "1",
		Platform: &ocispec.Platform{OS: "linux", Architecture: "amd64"}}})
	if err != nil {
		return t, fmt.Errorf("bench: %w", err)
	}
	if _, err := s.must(ctx, http.StatusOK, token, "POST", bundle.PullPath, "", b); err != nil {
		return t, err
	}
	return target{Method: "POST", Path: bundle.PullPath, Body: b}, nil
}

// haves are bundles for a worker that says four thousand times that it has the very image.
func haves(ctx context.Context, s *server, token string) (t target, err error) {
	if err := s.image(ctx, token, "mallory/image"); err != nil {
		return t, err
	}
	image := bundle.ImageRequest{Repository: "mallory/image", Reference: "1", Platform: &ocispec.Platform{OS: "linux", Architecture: "amd64"}}
	b, err := s.must(ctx, http.StatusOK, token, "GET", bundle.StartupPath+"?repository=mallory/image&reference=1", "", nil)
	if err != nil {
		return t, err
	}
	var report bundle.StartupReport
	if err := json.Unmarshal(b, &report); err != nil {
		return t, fmt.Errorf("bench: %w", err)
	}
	one := bundle.Have{ChainID: report.ChainID, TOC: report.TOC}
	if b, err = json.Marshal(bundle.Request{Versions: []int{bundle.Version}, Image: image, Have: slices.Repeat([]bundle.Have{one}, 4096)}); err != nil {
		return t, fmt.Errorf("bench: %w", err)
	}
	if _, err := s.must(ctx, http.StatusOK, token, "POST", bundle.PullPath, "", b); err != nil {
		return t, err
	}
	return target{Method: "POST", Path: bundle.PullPath, Body: b}, nil
}

// manyLayers are bundles of an image whose manifest, of almost 4 MiB, names one layer again and again.
func manyLayers(ctx context.Context, s *server, token string) (t target, err error) {
	var m ocispec.Manifest
	if err := s.image(ctx, token, "mallory/layers"); err != nil {
		return t, err
	}
	b, err := s.must(ctx, http.StatusOK, token, "GET", "/v2/mallory/layers/manifests/1", "", nil)
	if err != nil {
		return t, err
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return t, fmt.Errorf("bench: %w", err)
	}
	m.Layers = slices.Repeat(m.Layers, 24_000)
	config, err := json.Marshal(ocispec.Image{Platform: ocispec.Platform{OS: "linux", Architecture: "amd64"},
		RootFS: ocispec.RootFS{Type: "layers", DiffIDs: slices.Repeat([]digest.Digest{m.Layers[0].Digest}, len(m.Layers))}})
	if err != nil {
		return t, fmt.Errorf("bench: %w", err)
	}
	mediaType := m.Config.MediaType
	if m.Config, err = s.blob(ctx, token, "mallory/layers", config); err != nil {
		return t, err
	}
	m.Config.MediaType = mediaType
	if b, err = json.Marshal(m); err != nil {
		return t, fmt.Errorf("bench: %w", err)
	}
	if _, err := s.must(ctx, http.StatusCreated, token, "PUT", "/v2/mallory/layers/manifests/1", ocispec.MediaTypeImageManifest, b); err != nil {
		return t, err
	}
	if b, err = json.Marshal(bundle.Request{Versions: []int{bundle.Version}, Image: bundle.ImageRequest{Repository: "mallory/layers", Reference: "1",
		Platform: &ocispec.Platform{OS: "linux", Architecture: "amd64"}}}); err != nil {
		return t, fmt.Errorf("bench: %w", err)
	}
	return target{Method: "POST", Path: bundle.PullPath, Body: b}, nil
}

// image pushes one of 1,000 files of 4 KiB.
func (s *server) image(ctx context.Context, token, repository string) error {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for n := range 1000 {
		text := noise(4 << 10)
		err := w.WriteHeader(&tar.Header{Name: fmt.Sprintf("file%04d", n), Mode: 0o644, Size: int64(len(text))})
		if err == nil {
			_, err = w.Write(text)
		}
		if err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	}
	if err := w.Close(); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	config, err := json.Marshal(ocispec.Image{Platform: ocispec.Platform{OS: "linux", Architecture: "amd64"},
		RootFS: ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{digest.FromBytes(b.Bytes())}}})
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	m := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest}
	if m.Config, err = s.blob(ctx, token, repository, config); err != nil {
		return err
	}
	layer, err := s.blob(ctx, token, repository, b.Bytes())
	if err != nil {
		return err
	}
	m.Config.MediaType, layer.MediaType = ocispec.MediaTypeImageConfig, ocispec.MediaTypeImageLayer
	m.Layers = []ocispec.Descriptor{layer}
	text, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	_, err = s.must(ctx, http.StatusCreated, token, "PUT", "/v2/"+repository+"/manifests/1", m.MediaType, text)
	return err
}

// blobs are an honest image's, many times.
func blobs(ctx context.Context, s *server, token string) (t target, err error) {
	b := noise(4 << 20)
	if _, err := s.blob(ctx, token, "mallory/app", b); err != nil {
		return t, err
	}
	return target{Method: "GET", Path: "/v2/mallory/app/blobs/" + digest.FromBytes(b).String()}, nil
}

// RunAttacks measures what attacks cost the server, and honest pulls.
func RunAttacks(ctx context.Context, o Options) error {
	for _, name := range o.Attacks {
		if !slices.Contains(Names(), name) {
			return fmt.Errorf("bench: there is no attack %q: want %s", name, strings.Join(Names(), ", "))
		}
	}
	return scratch(&o, "attacks-", func(dir string) error {
		var all []Attack
		for n, a := range attacks {
			if len(o.Attacks) > 0 && !slices.Contains(o.Attacks, a.name) {
				continue
			}
			for _, limited := range []bool{true, false} {
				limits := beyondReach
				if limited {
					limits = ""
				}
				s, err := start(ctx, o.Foil, filepath.Join(dir, fmt.Sprint(n, limited)), false, limits)
				if err != nil {
					return err
				}
				got, err := measureAttack(ctx, o, s, a.name, a.prepare)
				if err := errors.Join(err, s.stop()); err != nil {
					return fmt.Errorf("%s: %w", a.name, err)
				}
				got.Name, got.Limited = a.name, limited
				o.Log(fmt.Sprintf("%s, limited %v: %.2f", a.name, limited, got.Slower))
				all = append(all, got)
			}
		}
		fmt.Fprintf(o.Out, "| attack | limits | honest pulls slower by | 95%% bounds | alone, ms | memory, MiB | descriptors | processors, alone | attacks a second | refused |\n"+
			"| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n")
		for _, a := range all {
			limits := "none"
			if a.Limited {
				limits = "as they are"
			}
			fmt.Fprintf(o.Out, "| %s | %s | %.2f | %.2f to %.2f | %.2f | %d | %d | %.2f, %.2f | %.0f | %.0f%% |\n", a.Name, limits, a.Slower, a.Bounds.Low, a.Bounds.High, 1e3*a.Pull,
				a.Memory>>20, a.Descriptors, a.Processors, a.Alone, a.Steps, 100*a.Refused)
		}
		return o.save(all)
	})
}

func measureAttack(ctx context.Context, o Options, s *server, name string, prepare func(context.Context, *server, string) (target, error)) (got Attack, err error) {
	m, _, err := s.artifact(ctx, s.token, "honest/app", nil, "", noise(1<<20), noise(1<<20), noise(1<<20), noise(1<<20))
	if err != nil {
		return got, err
	}
	token, err := s.login(ctx, "mallory")
	if err != nil {
		return got, err
	}
	t, err := prepare(ctx, s, token)
	if err != nil {
		return got, err
	}
	t.Attack, t.Server, t.Clients, t.Addresses = name, s.addr, o.Clients, o.Addresses
	if !o.Anonymous {
		t.Token = token
	}
	var ratios, pulls, busy, alone, steps, refused []float64
	for round := range o.Rounds {
		var took [2]float64
		for turn := range 2 {
			attacked := (turn+round)%2 == 1
			stop := func() (tally, error) { return tally{}, nil }
			if attacked {
				if stop, err = assault(ctx, t); err != nil {
					return got, err
				}
			}
			median, most, cpu, err := honest(ctx, o, s, m)
			done, failed := stop()
			if err := errors.Join(err, failed); err != nil {
				return got, err
			}
			if !attacked {
				took[0] = median
				alone = append(alone, cpu)
				continue
			}
			took[1] = median
			busy = append(busy, cpu)
			steps, refused = append(steps, float64(done.Steps)/done.Seconds), append(refused, float64(done.Refused)/float64(max(1, done.Steps)))
			got.Memory, got.Descriptors = max(got.Memory, most.memory), max(got.Descriptors, most.descriptors)
		}
		ratios, pulls = append(ratios, took[1]/took[0]), append(pulls, took[0])
	}
	got.Slower, got.Bounds = stats.Median(ratios), stats.Bootstrap(ratios, stats.Median)
	got.Pull, got.Processors, got.Alone, got.Steps, got.Refused = stats.Median(pulls), stats.Median(busy), stats.Median(alone), stats.Median(steps), stats.Median(refused)
	return got, nil
}

// honest pulls an image for a while, and returns the median of the seconds that it took, the most that the server used meanwhile,
// and how many processors it had.
func honest(ctx context.Context, o Options, s *server, m ocispec.Manifest) (median float64, most usage, processors float64, err error) {
	before, err := s.use()
	if err != nil {
		return 0, most, 0, err
	}
	began := time.Now()
	var took []float64
	for time.Since(began) < o.Period || len(took) < 3 {
		one := time.Now()
		paths := []string{"/v2/honest/app/manifests/1"}
		for _, d := range m.Layers {
			paths = append(paths, "/v2/honest/app/blobs/"+d.Digest.String())
		}
		for _, path := range paths {
			if err := s.take(ctx, path, o.Rate/8*1e6); err != nil {
				return 0, most, 0, err
			}
		}
		took = append(took, time.Since(one).Seconds())
		now, err := s.use()
		if err != nil {
			return 0, most, 0, err
		}
		most.memory, most.descriptors = max(most.memory, now.memory), max(most.descriptors, now.descriptors)
		processors = (now.cpu - before.cpu).Seconds() / time.Since(began).Seconds()
	}
	return stats.Median(took), most, processors, nil
}

// take gets something, at no more than a rate, bytes a second; 0: as fast as it comes.
func (s *server) take(ctx context.Context, path string, rate float64) error {
	req, err := http.NewRequestWithContext(ctx, "GET", "http://"+s.addr+path, nil)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	req.Header.Set("Authorization", "Bearer "+s.token)
	res, err := s.client.Do(req)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("bench: GET %s: %s", path, res.Status)
	}
	began, got, b := time.Now(), 0, make([]byte, 64<<10)
	for {
		n, err := res.Body.Read(b)
		if got += n; rate > 0 {
			time.Sleep(time.Until(began.Add(time.Duration(float64(got) / rate * 1e9))))
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("bench: GET %s: %w", path, err)
		}
	}
}
