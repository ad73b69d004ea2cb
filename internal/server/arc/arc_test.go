package arc

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"
)

// check holds what is always true.
func (c *Cache) check(t interface{ Fatalf(string, ...any) }) {
	n := 0
	for _, q := range []*queue{&c.once, &c.often, &c.onceGhosts, &c.oftGhosts} {
		sum := int64(0)
		for e := q.list.Front(); e != nil; e = e.Next() {
			i := e.Value.(*item)
			if i.in != q || c.items[i.name] != e {
				t.Fatalf("%s is not where it says", i.name)
			}
			sum += i.size
			n++
		}
		if sum != q.bytes {
			t.Fatalf("%d bytes, it says %d", sum, q.bytes)
		}
	}
	if n != len(c.items) {
		t.Fatalf("%d items in lists, %d by name", n, len(c.items))
	}
	if c.Bytes() > c.limit || c.target < 0 || c.target > c.limit || c.Bytes()+c.onceGhosts.bytes+c.oftGhosts.bytes > 2*c.limit {
		t.Fatalf("%d bytes kept, ghosts %d and %d, target %d, limit %d", c.Bytes(), c.onceGhosts.bytes, c.oftGhosts.bytes, c.target, c.limit)
	}
}

func TestInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := New(rapid.Int64Range(0, 1000).Draw(t, "limit"))
		kept := map[string]bool{}
		c.Evicted = func(name string) {
			if !kept[name] {
				t.Fatalf("%s was not kept", name)
			}
			delete(kept, name)
		}
		for range rapid.IntRange(0, 200).Draw(t, "steps") {
			name := fmt.Sprint(rapid.IntRange(0, 40).Draw(t, "name"))
			switch rapid.IntRange(0, 9).Draw(t, "what") {
			case 0:
				c.Remove(name)
				delete(kept, name)
			case 1, 2, 3:
				if c.Get(name) != kept[name] {
					t.Fatalf("%s: kept %v", name, kept[name])
				}
			default:
				size := rapid.Int64Range(0, 300).Draw(t, "size")
				was := c.Has(name)
				if c.Add(name, size) {
					kept[name] = true
				} else if c.Fits(size) || was && !c.Has(name) {
					t.Fatalf("%s of %d bytes is not kept", name, size)
				}
			}
			c.check(t)
			for name := range kept {
				if !c.Has(name) {
					t.Fatalf("%s went without a word", name)
				}
			}
		}
	})
}

// lru is a plain one of the same size, to compare with.
type lru struct {
	limit, used int64
	order       []string
	size        map[string]int64
}

func (l *lru) ask(name string, size int64) bool {
	_, hit := l.size[name]
	if hit {
		for i, n := range l.order {
			if n == name {
				l.order = append(l.order[:i], l.order[i+1:]...)
				break
			}
		}
	} else {
		l.size[name] = size
		l.used += size
	}
	l.order = append(l.order, name)
	for l.used > l.limit {
		l.used -= l.size[l.order[0]]
		delete(l.size, l.order[0])
		l.order = l.order[1:]
	}
	return hit
}

// A scan over what nobody asks for again does not push out what is asked for often; in a plain LRU it does.
func TestScans(t *testing.T) {
	const limit = 10_000
	c, l := New(limit), &lru{limit: limit, size: map[string]int64{}}
	ask := func(name string, size int64) (hit, plain bool) {
		if hit = c.Get(name); !hit {
			c.Add(name, size)
		}
		return hit, l.ask(name, size)
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	hits, plainHits, asked := 0, 0, 0
	for round := range 50 {
		for range 100 {
			hit, plain := ask(fmt.Sprint("hot", rnd.IntN(40)), 150)
			if round < 5 {
				continue
			}
			asked++
			if hit {
				hits++
			}
			if plain {
				plainHits++
			}
		}
		for i := range 100 {
			ask(fmt.Sprint("scan", round, " ", i), 200)
		}
	}
	if hits*10 < asked*9 || hits <= plainHits {
		t.Errorf("of %d: %d hits, a plain LRU has %d", asked, hits, plainHits)
	}
}

// What comes back soon after it went says that its list was too short.
func TestAdapts(t *testing.T) {
	c := New(1000)
	for i := range 3 {
		c.Add(fmt.Sprint("often", i), 200)
		c.Get(fmt.Sprint("often", i))
	}
	for i := range 4 {
		c.Add(fmt.Sprint("once", i), 200)
	}
	if c.Has("once0") || !c.Has("often0") || c.target != 0 {
		t.Fatalf("at first what was asked for once goes: target %d", c.target)
	}
	c.Add("once0", 200)
	if c.target != 200 || c.often.bytes != 800 {
		t.Errorf("target %d, %d bytes asked for often", c.target, c.often.bytes)
	}
	c.Add("once9", 200) // now one of those asked for often goes
	if !c.Has("once9") || c.Has("often0") {
		t.Error("the bound did not move")
	}
	c.Add("often0", 200)
	if c.target != 0 {
		t.Errorf("target %d after the other list was too short", c.target)
	}
	c.check(t)
	if c.Fits(251) || c.Add("large", 251) {
		t.Error("what takes more than a quarter is kept")
	}
}
