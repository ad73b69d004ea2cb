package trace

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// Shape is what a trace is like: the counts of DupHunter's table 2 (ATC '20), what its figures 1 to 3 say of repulls and of the time from
// a manifest to its layers, and what the paper does not print, which is guessed and said here.
type Shape struct {
	Name                            string
	GetLayers, GetManifests         int
	PutLayers, PutManifests, Layers int // Layers are distinct
	UniqueBytes                     int64
	// Always is which share of the clients keeps nothing, and pulls all layers each time.
	Always float64
	// Gap is the median of the time from a manifest to its first layer, GapSpread the sigma of its logarithm.
	Gap       time.Duration
	GapSpread float64
	// Clients, and the exponent of the popularity of images and of clients: not in the paper.
	Clients int
	Skew    float64
	Span    time.Duration
}

// Shapes are the four of the paper. Of the gaps it says: four fifths are longer than 1 s in Lon, three fifths longer than 5 s in Syd;
// half of the clients have a repull probability below 0.2, and few are in the middle.
var Shapes = []Shape{
	{Name: "dal", GetLayers: 6963, GetManifests: 7561, PutLayers: 453, PutManifests: 23, Layers: 1870, UniqueBytes: 18 << 30,
		Always: 0.4, Gap: 3500 * time.Millisecond, GapSpread: 1.5, Clients: 300, Skew: 1.1, Span: 24 * time.Hour},
	{Name: "fra", GetLayers: 4117, GetManifests: 10350, PutLayers: 508, PutManifests: 25, Layers: 1012, UniqueBytes: 9 << 30,
		Always: 0.3, Gap: 3500 * time.Millisecond, GapSpread: 1.5, Clients: 300, Skew: 1.0, Span: 24 * time.Hour},
	{Name: "lon", GetLayers: 2570, GetManifests: 11808, PutLayers: 582, PutManifests: 40, Layers: 1979, UniqueBytes: 13 << 30,
		Always: 0.2, Gap: 3500 * time.Millisecond, GapSpread: 1.5, Clients: 300, Skew: 0.8, Span: 24 * time.Hour},
	{Name: "syd", GetLayers: 3382, GetManifests: 11150, PutLayers: 453, PutManifests: 15, Layers: 558, UniqueBytes: 5 << 30,
		Always: 0.2, Gap: 7300 * time.Millisecond, GapSpread: 1.5, Clients: 300, Skew: 1.0, Span: 24 * time.Hour},
}

// Find returns the shape of a name.
func Find(name string) (Shape, error) {
	for _, s := range Shapes {
		if s.Name == name {
			return s, nil
		}
	}
	return Shape{}, fmt.Errorf("trace: there is no shape %q: dal, fra, lon or syd", name)
}

// Scale returns a shape of so many times the requests and layers, in as many times its span.
func (s Shape) Scale(f float64) Shape {
	for _, n := range []*int{&s.GetLayers, &s.GetManifests, &s.PutLayers, &s.PutManifests, &s.Layers, &s.Clients} {
		*n = max(1, int(math.Round(float64(*n)*f)))
	}
	s.UniqueBytes = int64(float64(s.UniqueBytes) * f)
	s.Span = time.Duration(float64(s.Span) * f)
	return s
}

type image struct {
	name   string
	layers []int
}

// Generate makes a trace of a shape. The same seed makes the same trace.
func Generate(s Shape, seed uint64) []Request {
	r := rand.New(rand.NewPCG(seed, 0x7ace))
	sizes := sizesOf(r, s)
	// Images have 1 to 12 layers, of which the lower ones are those of a few bases.
	var images []image
	for next := 0; next < s.Layers; {
		im := image{name: fmt.Sprintf("u%d/r%d", len(images)%17, len(images))}
		if len(images) > 8 {
			base := images[int(float64(len(images))*math.Pow(r.Float64(), 3))]
			im.layers = append(im.layers, base.layers[:1+r.IntN(len(base.layers))]...)
		}
		for range 1 + r.IntN(5) {
			if next < s.Layers && len(im.layers) < 12 {
				im.layers = append(im.layers, next)
				next++
			}
		}
		images = append(images, im)
	}
	// Some were not there at first: they are pushed.
	fresh := max(0, len(images)-s.PutManifests)
	popular, busy := newZipf(r, s.Skew, len(images)), newZipf(r, s.Skew, s.Clients)
	order := r.Perm(len(images))
	type state struct {
		always bool
		has    map[int]bool
		pulled []int // images
	}
	clients := make([]state, s.Clients)
	for i := range clients {
		clients[i] = state{always: r.Float64() < s.Always, has: map[int]bool{}}
	}
	var list []Request
	sessions := s.GetManifests + s.PutManifests
	at := func() time.Duration { return time.Duration(r.Float64() * float64(s.Span)) }
	for i := fresh; i < len(images); i++ {
		when := time.Duration(r.Float64() * 0.2 * float64(s.Span))
		n := s.PutLayers / max(1, s.PutManifests)
		for k, l := range images[i].layers {
			if k < n {
				list = append(list, Request{At: when, Put: true, Image: images[i].name, Layer: layerName(l), Client: "pusher", Bytes: sizes[l]})
			}
		}
		list = append(list, Request{At: when + time.Second, Put: true, Manifest: true, Image: images[i].name + ":1", Client: "pusher", Bytes: 2000})
	}
	times := make([]time.Duration, sessions)
	for i := range times {
		times[i] = at()
	}
	slices.Sort(times)
	layers, manifests := 0, 0
	for _, when := range times {
		if manifests == s.GetManifests {
			break
		}
		n := busy.next()
		c := &clients[n]
		// As many pulls as the counts want; else a client looks whether a tag has moved, and has all of it.
		pull := layers*s.GetManifests <= s.GetLayers*manifests
		var k int
		switch {
		case !pull && len(c.pulled) > 0 && !c.always:
			k = c.pulled[r.IntN(len(c.pulled))]
		case !pull:
			n = (n + 1) % s.Clients
			if c = &clients[n]; len(c.pulled) == 0 || c.always {
				k = order[popular.next()]
			} else {
				k = c.pulled[r.IntN(len(c.pulled))]
			}
		default:
			k = order[popular.next()]
		}
		im := images[k]
		who := fmt.Sprintf("c%d", n)
		list = append(list, Request{At: when, Manifest: true, Image: im.name + ":1", Client: who, Bytes: 2000})
		manifests++
		gap := time.Duration(float64(s.Gap) * math.Exp(r.NormFloat64()*s.GapSpread))
		c.pulled = append(c.pulled, k)
		for i, l := range im.layers {
			if c.has[l] && !c.always || layers >= s.GetLayers {
				continue
			}
			if i > 0 && i%3 == 0 { // three at a time
				gap += time.Duration(r.ExpFloat64() * float64(2*time.Second))
			}
			c.has[l] = true
			layers++
			list = append(list, Request{At: when + gap, Image: im.name, Layer: layerName(l), Client: who, Bytes: sizes[l]})
		}
	}
	slices.SortStableFunc(list, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
	return list
}

func layerName(n int) string { return fmt.Sprintf("l%d", n) }

// sizesOf are sizes of layers: logarithms are normal, with a sigma of 2, and their sum is that of the shape.
func sizesOf(r *rand.Rand, s Shape) []int64 {
	raw := make([]float64, s.Layers)
	sum := 0.0
	for i := range raw {
		raw[i] = math.Exp(r.NormFloat64() * 2)
		sum += raw[i]
	}
	sizes := make([]int64, s.Layers)
	for i := range raw {
		sizes[i] = max(200, int64(raw[i]/sum*float64(s.UniqueBytes)))
	}
	return sizes
}

// zipf draws ranks whose frequency falls with a power of them that may be below 1, as math/rand's may not.
type zipf struct {
	r   *rand.Rand
	sum []float64
}

func newZipf(r *rand.Rand, skew float64, n int) *zipf {
	z := &zipf{r: r, sum: make([]float64, n)}
	total := 0.0
	for i := range z.sum {
		total += math.Pow(float64(i+1), -skew)
		z.sum[i] = total
	}
	return z
}

func (z *zipf) next() int {
	i, _ := slices.BinarySearch(z.sum, z.r.Float64()*z.sum[len(z.sum)-1])
	return min(i, len(z.sum)-1)
}
