// Package arc decides what a cache keeps: the adaptive replacement cache of Megiddo and Modha (FAST '03), in bytes instead of
// entries.
//
// What was asked for once is in one list, what was asked for again in another; each has a ghost list of the names of what it lost last. A name
// that is asked for while it is a ghost says that its list was too short, and moves the bound between both. So what is read once,
// as by a scan, pushes out what is read often only as long as that pays.
//
// Sizes change two things against the paper. The bound moves by the size of what was asked for, times the ratio of the ghost
// lists where that is more than 1. And what is larger than a quarter of the cache is not kept: it would empty a list for
// itself.
package arc

import "container/list"

// Cache says what is kept. It is for whoever holds the lock that guards it.
type Cache struct {
	limit  int64
	target int64 // bytes that are meant for once
	items  map[string]*list.Element

	once, often           queue // what is kept
	onceGhosts, oftGhosts queue // what was

	// Evicted is called for each name that is not kept any more; nil: it is not.
	Evicted func(name string)
}

// maxGhosts bounds the names of both ghost lists, however small what they were of.
const maxGhosts = 100_000

// queue is a list with its bytes; the last used is in front.
type queue struct {
	list  list.List
	bytes int64
}

type item struct {
	name string
	size int64
	in   *queue
}

// New returns a Cache of so many bytes.
func New(limit int64) *Cache {
	return &Cache{limit: limit, items: map[string]*list.Element{}}
}

// Fits reports whether something of a size would be kept at all.
func (c *Cache) Fits(size int64) bool { return size >= 0 && size <= c.limit/4 }

// Bytes is what is kept.
func (c *Cache) Bytes() int64 { return c.once.bytes + c.often.bytes }

// Len is how many names are kept.
func (c *Cache) Len() int { return c.once.list.Len() + c.often.list.Len() }

// Has reports whether a name is kept; nobody asks for it by that.
func (c *Cache) Has(name string) bool {
	e := c.items[name]
	return e != nil && c.kept(e.Value.(*item))
}

func (c *Cache) kept(i *item) bool { return i.in == &c.once || i.in == &c.often }

// Get says that somebody asks for a name, and reports whether it is kept.
func (c *Cache) Get(name string) bool {
	e := c.items[name]
	if e == nil || !c.kept(e.Value.(*item)) {
		return false
	}
	c.move(e, &c.often)
	return true
}

// Add keeps a name that somebody has asked for, or will, and makes room. It reports whether it is kept.
func (c *Cache) Add(name string, size int64) bool {
	if !c.Fits(size) {
		return false
	}
	e := c.items[name]
	if e == nil {
		c.room(size, false)
		i := &item{name: name, size: size, in: &c.once}
		c.items[name] = c.once.list.PushFront(i)
		c.once.bytes += size
		c.trim()
		return true
	}
	i := e.Value.(*item)
	switch i.in {
	case &c.onceGhosts:
		c.target = min(c.limit, c.target+share(i.size, c.oftGhosts.bytes, c.onceGhosts.bytes))
		c.room(size, false)
	case &c.oftGhosts:
		c.target = max(0, c.target-share(i.size, c.onceGhosts.bytes, c.oftGhosts.bytes))
		c.room(size, true)
	default:
		return true // it is kept
	}
	i.in.bytes += size - i.size
	i.size = size
	c.move(e, &c.often)
	c.trim()
	return true
}

// share is a size times the ratio of two ghost lists, at least once.
func share(size, over, under int64) int64 {
	if under <= 0 || over <= under {
		return size
	}
	return int64(float64(size) * float64(over) / float64(under))
}

// room removes until so many bytes fit.
func (c *Cache) room(size int64, oftenGhost bool) {
	for c.Bytes()+size > c.limit {
		from, to := &c.often, &c.oftGhosts
		if c.once.list.Len() > 0 && (c.once.bytes > c.target || c.once.bytes == c.target && oftenGhost || c.often.list.Len() == 0) {
			from, to = &c.once, &c.onceGhosts
		}
		e := from.list.Back()
		name := e.Value.(*item).name
		c.move(e, to)
		if c.Evicted != nil {
			c.Evicted(name)
		}
	}
}

// trim forgets the oldest ghosts: those of once beyond the limit together with it, all beyond twice the limit.
func (c *Cache) trim() {
	for c.onceGhosts.list.Len() > 0 && (c.once.bytes+c.onceGhosts.bytes > c.limit || c.onceGhosts.list.Len() > maxGhosts/2) {
		c.drop(c.onceGhosts.list.Back())
	}
	for c.oftGhosts.list.Len() > 0 && (c.Bytes()+c.onceGhosts.bytes+c.oftGhosts.bytes > 2*c.limit || c.oftGhosts.list.Len() > maxGhosts/2) {
		c.drop(c.oftGhosts.list.Back())
	}
}

// Remove forgets a name, as one whose bytes are lost. Evicted is not called.
func (c *Cache) Remove(name string) {
	if e := c.items[name]; e != nil {
		c.drop(e)
	}
}

// drop forgets an item.
func (c *Cache) drop(e *list.Element) {
	i := e.Value.(*item)
	i.in.list.Remove(e)
	i.in.bytes -= i.size
	delete(c.items, i.name)
}

// move puts an item in front of a queue.
func (c *Cache) move(e *list.Element, to *queue) {
	i := e.Value.(*item)
	i.in.list.Remove(e)
	i.in.bytes -= i.size
	i.in = to
	to.bytes += i.size
	c.items[i.name] = to.list.PushFront(i)
}
