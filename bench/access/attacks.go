package access

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
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
	Memory      int64          `json:"memory"`      // bytes, the most
	Descriptors int            `json:"descriptors"` // the most
	Processors  float64        `json:"processors"`  // of the server, during the attack, honest pulls included
	Alone       float64        `json:"alone"`       // processors without the attack
	Steps       float64        `json:"steps"`       // a second
	Refused     float64        `json:"refused"`     // share of them
}

// pause is what attackers do between steps: the round trip of a network.
const pause = 100 * time.Millisecond

// step is one thing that an attacker does again and again. refused: the server would not.
type step func(ctx context.Context, c *http.Client) (refused bool)

// attacks make a step each, for a server where mallory has a token.
var attacks = []struct {
	name string
	make func(ctx context.Context, s *server, token string) (step, error)
}{
	{"idle", nothing}, {"uploads", uploads}, {"idle bodies", bodies(time.Hour)}, {"slow bodies", bodies(200 * time.Millisecond)},
	{"referrers", referrers}, {"bundles", bundlesOf}, {"haves", haves}, {"layers", manyLayers}, {"logins", logins},
}

// Names lists the attacks.
func Names() (all []string) {
	for _, a := range attacks {
		all = append(all, a.name)
	}
	return all
}

// ask sends a request of an attacker, and throws its answer away.
func (s *server) ask(ctx context.Context, c *http.Client, token, method, path string, body []byte) (refused bool) {
	status, _, err := s.send(ctx, c, token, method, path, "application/octet-stream", body)
	return err != nil || status == http.StatusTooManyRequests
}

// nothing is asked of a server that does nothing: what attackers take of the processors themselves.
func nothing(ctx context.Context, _ *server, _ string) (step, error) {
	h := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	context.AfterFunc(ctx, h.Close)
	s := &server{addr: strings.TrimPrefix(h.URL, "http://")}
	return func(ctx context.Context, c *http.Client) bool { return s.ask(ctx, c, "", "GET", "/", nil) }, nil
}

// uploads are begun, and never ended.
func uploads(_ context.Context, s *server, token string) (step, error) {
	b := noise(64 << 10)
	return func(ctx context.Context, c *http.Client) bool {
		req, err := http.NewRequestWithContext(ctx, "POST", "http://"+s.addr+"/v2/mallory/app/blobs/uploads/", nil)
		if err != nil {
			return true
		}
		req.Header.Set("Authorization", "Bearer "+token)
		res, err := c.Do(req)
		if err != nil {
			return true
		}
		res.Body.Close()
		if res.StatusCode != http.StatusAccepted {
			return true
		}
		return s.ask(ctx, c, token, "PATCH", res.Header.Get("Location"), b)
	}, nil
}

// bodies are announced, and come a byte each interval.
func bodies(interval time.Duration) func(context.Context, *server, string) (step, error) {
	return func(_ context.Context, s *server, token string) (step, error) {
		head := fmt.Sprintf("POST /v2/mallory/app/blobs/uploads/?digest=%s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Length: 1000000000\r\n\r\n",
			digest.FromString("never"), s.addr, token)
		return func(ctx context.Context, _ *http.Client) bool {
			conn, err := attacker.DialContext(ctx, "tcp", s.addr)
			if err != nil {
				return true
			}
			defer conn.Close()
			stop := context.AfterFunc(ctx, func() { conn.Close() })
			defer stop()
			if _, err := conn.Write([]byte(head)); err != nil {
				return true
			}
			ended := make(chan bool, 1)
			go func() {
				answer := make([]byte, 64)
				n, _ := conn.Read(answer)
				ended <- bytes.Contains(answer[:n], []byte(" 429 "))
			}()
			for {
				select {
				case refused := <-ended:
					return refused
				case <-time.After(interval):
					if _, err := conn.Write([]byte{0}); err != nil {
						return <-ended
					}
				}
			}
		}, nil
	}
}

// referrers are many, and large.
func referrers(ctx context.Context, s *server, token string) (step, error) {
	_, subject, err := s.artifact(ctx, token, "mallory/app", nil, "")
	if err != nil {
		return nil, err
	}
	for n := range 50 {
		if _, _, err := s.artifact(ctx, token, "mallory/app", &subject, strings.Repeat(fmt.Sprint(n), 32<<10)); err != nil {
			return nil, err
		}
	}
	path := "/v2/mallory/app/referrers/" + subject.Digest.String()
	return func(ctx context.Context, c *http.Client) bool { return s.ask(ctx, c, token, "GET", path, nil) }, nil
}

// bundlesOf asks for whole images.
func bundlesOf(ctx context.Context, s *server, token string) (step, error) {
	if err := s.image(ctx, token, "mallory/image"); err != nil {
		return nil, err
	}
	b, err := json.Marshal(bundle.Request{Versions: []int{bundle.Version}, Image: bundle.ImageRequest{Repository: "mallory/image", Reference: "1",
		Platform: &ocispec.Platform{OS: "linux", Architecture: "amd64"}}})
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	if _, err := s.must(ctx, http.StatusOK, token, "POST", bundle.PullPath, "", b); err != nil {
		return nil, err
	}
	return func(ctx context.Context, c *http.Client) bool {
		return s.ask(ctx, c, token, "POST", bundle.PullPath, b)
	}, nil
}

// haves are bundles for a worker that says four thousand times that it has the very image.
func haves(ctx context.Context, s *server, token string) (step, error) {
	if err := s.image(ctx, token, "mallory/image"); err != nil {
		return nil, err
	}
	image := bundle.ImageRequest{Repository: "mallory/image", Reference: "1", Platform: &ocispec.Platform{OS: "linux", Architecture: "amd64"}}
	b, err := s.must(ctx, http.StatusOK, token, "GET", bundle.StartupPath+"?repository=mallory/image&reference=1", "", nil)
	if err != nil {
		return nil, err
	}
	var report bundle.StartupReport
	if err := json.Unmarshal(b, &report); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	one := bundle.Have{ChainID: report.ChainID, TOC: report.TOC}
	if b, err = json.Marshal(bundle.Request{Versions: []int{bundle.Version}, Image: image, Have: slices.Repeat([]bundle.Have{one}, 4096)}); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	if _, err := s.must(ctx, http.StatusOK, token, "POST", bundle.PullPath, "", b); err != nil {
		return nil, err
	}
	return func(ctx context.Context, c *http.Client) bool {
		return s.ask(ctx, c, token, "POST", bundle.PullPath, b)
	}, nil
}

// manyLayers are bundles of an image whose manifest, of almost 4 MiB, names one layer again and again.
func manyLayers(ctx context.Context, s *server, token string) (step, error) {
	var m ocispec.Manifest
	if err := s.image(ctx, token, "mallory/layers"); err != nil {
		return nil, err
	}
	b, err := s.must(ctx, http.StatusOK, token, "GET", "/v2/mallory/layers/manifests/1", "", nil)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	m.Layers = slices.Repeat(m.Layers, 24_000)
	config, err := json.Marshal(ocispec.Image{Platform: ocispec.Platform{OS: "linux", Architecture: "amd64"},
		RootFS: ocispec.RootFS{Type: "layers", DiffIDs: slices.Repeat([]digest.Digest{m.Layers[0].Digest}, len(m.Layers))}})
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	mediaType := m.Config.MediaType
	if m.Config, err = s.blob(ctx, token, "mallory/layers", config); err != nil {
		return nil, err
	}
	m.Config.MediaType = mediaType
	if b, err = json.Marshal(m); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	if _, err := s.must(ctx, http.StatusCreated, token, "PUT", "/v2/mallory/layers/manifests/1", ocispec.MediaTypeImageManifest, b); err != nil {
		return nil, err
	}
	if b, err = json.Marshal(bundle.Request{Versions: []int{bundle.Version}, Image: bundle.ImageRequest{Repository: "mallory/layers", Reference: "1",
		Platform: &ocispec.Platform{OS: "linux", Architecture: "amd64"}}}); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	return func(ctx context.Context, c *http.Client) bool {
		return s.ask(ctx, c, token, "POST", bundle.PullPath, b)
	}, nil
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

// logins guess passwords.
func logins(_ context.Context, s *server, _ string) (step, error) {
	var n atomic.Int64
	return func(ctx context.Context, c *http.Client) bool {
		req, err := http.NewRequestWithContext(ctx, "GET", "http://"+s.addr+"/v2/", nil)
		if err != nil {
			return true
		}
		req.SetBasicAuth("honest", fmt.Sprint("guess ", n.Add(1)))
		res, err := c.Do(req)
		if err != nil {
			return true
		}
		defer res.Body.Close()
		_, err = io.Copy(io.Discard, res.Body)
		return err != nil || res.StatusCode == http.StatusTooManyRequests
	}, nil
}

// attacker dials from an address of its own.
var attacker = &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}

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
				got, err := measureAttack(ctx, o, s, a.make)
				if err := errors.Join(err, s.stop()); err != nil {
					return fmt.Errorf("%s: %w", a.name, err)
				}
				got.Name, got.Limited = a.name, limited
				o.Log(fmt.Sprintf("%s, limited %v: %.2f", a.name, limited, got.Slower))
				all = append(all, got)
			}
		}
		fmt.Fprintf(o.Out, "| attack | limits | honest pulls slower by | 95%% bounds | memory, MiB | descriptors | processors, alone | attacks a second | refused |\n"+
			"| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |\n")
		for _, a := range all {
			limits := "none"
			if a.Limited {
				limits = "as they are"
			}
			fmt.Fprintf(o.Out, "| %s | %s | %.2f | %.2f to %.2f | %d | %d | %.2f, %.2f | %.0f | %.0f%% |\n", a.Name, limits, a.Slower, a.Bounds.Low, a.Bounds.High,
				a.Memory>>20, a.Descriptors, a.Processors, a.Alone, a.Steps, 100*a.Refused)
		}
		return o.save(all)
	})
}

func measureAttack(ctx context.Context, o Options, s *server, prepare func(context.Context, *server, string) (step, error)) (got Attack, err error) {
	m, _, err := s.artifact(ctx, s.token, "honest/app", nil, "", noise(1<<20), noise(1<<20), noise(1<<20), noise(1<<20))
	if err != nil {
		return got, err
	}
	token, err := s.login(ctx, "mallory")
	if err != nil {
		return got, err
	}
	all, end := context.WithCancel(ctx)
	defer end()
	one, err := prepare(all, s, token)
	if err != nil {
		return got, err
	}
	var ratios, busy, alone, steps, refused []float64
	for round := range o.Rounds {
		var took [2]float64
		for turn := range 2 {
			attacked := (turn+round)%2 == 1
			stop := func() (done, refused int64) { return 0, 0 }
			if attacked {
				stop = assault(ctx, o.Clients, one)
			}
			median, most, cpu, err := honest(ctx, o.Period, s, m)
			done, not := stop()
			if err != nil {
				return got, err
			}
			if !attacked {
				took[0] = median
				alone = append(alone, cpu)
				continue
			}
			took[1] = median
			busy = append(busy, cpu)
			steps, refused = append(steps, float64(done)/o.Period.Seconds()), append(refused, float64(not)/float64(max(1, done)))
			got.Memory, got.Descriptors = max(got.Memory, most.memory), max(got.Descriptors, most.descriptors)
		}
		ratios = append(ratios, took[1]/took[0])
	}
	got.Slower, got.Bounds = stats.Median(ratios), stats.Bootstrap(ratios, stats.Median)
	got.Processors, got.Alone, got.Steps, got.Refused = stats.Median(busy), stats.Median(alone), stats.Median(steps), stats.Median(refused)
	return got, nil
}

// assault has n attackers take steps until stop is called, which returns how many they took, and how many of them the server refused.
func assault(ctx context.Context, n int, one step) (stop func() (done, refused int64)) {
	ctx, cancel := context.WithCancel(ctx)
	c := &http.Client{Transport: &http.Transport{DialContext: attacker.DialContext, MaxIdleConnsPerHost: n}}
	var wg sync.WaitGroup
	var steps, refusals atomic.Int64
	for range n {
		wg.Go(func() {
			for ctx.Err() == nil {
				refused := one(ctx, c)
				if ctx.Err() != nil {
					return
				}
				steps.Add(1)
				if refused {
					refusals.Add(1)
				}
				select {
				case <-ctx.Done():
				case <-time.After(pause):
				}
			}
		})
	}
	return func() (int64, int64) {
		cancel()
		wg.Wait()
		c.CloseIdleConnections()
		return steps.Load(), refusals.Load()
	}
}

// honest pulls an image for a while, and returns the median of the seconds that it took, the most that the server used meanwhile,
// and how many processors it had.
func honest(ctx context.Context, period time.Duration, s *server, m ocispec.Manifest) (median float64, most usage, processors float64, err error) {
	before, err := s.use()
	if err != nil {
		return 0, most, 0, err
	}
	began := time.Now()
	var took []float64
	for time.Since(began) < period || len(took) < 3 {
		one := time.Now()
		if _, err := s.must(ctx, http.StatusOK, s.token, "GET", "/v2/honest/app/manifests/1", "", nil); err != nil {
			return 0, most, 0, err
		}
		for _, d := range m.Layers {
			if _, err := s.must(ctx, http.StatusOK, s.token, "GET", "/v2/honest/app/blobs/"+d.Digest.String(), "", nil); err != nil {
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
