// Package locks gives the worker's mutexes a place in one order. A goroutine
// takes them from the top of this list to the bottom, and never two of one rank:
//
//	Layout      whoever makes, takes over or removes directories of rootfs
//	Node        holds, warnings, whether the daemon is closing
//	Images      what the worker remembers of each reference
//	Containers  what foil run made
//	Pulls       which pulls run, which are tried again, what is being removed
//	Pull        one pull: its milestones, its stream
//	Store       which rootfs there are
//	Rootfs      one rootfs: its state, its mount, who fills it
//	Leaf        everything that calls nobody while it is held
//
// Layout orders long operations and is held over I/O; nothing that a container
// waits for takes it. The others are held for moments only, never over I/O. A page
// fault takes Rootfs and Leaf.
//
// With the build tag lockorder, which the tests have, and under the race detector, an
// order that is broken ends the program (mutex_checked.go). Otherwise a Mutex is a
// sync.Mutex.
package locks

// A Rank is a place in the order.
type Rank interface{ rank() int }

// The ranks; see the package comment.
type (
	Layout     struct{}
	Node       struct{}
	Images     struct{}
	Containers struct{}
	Pulls      struct{}
	Pull       struct{}
	Store      struct{}
	Rootfs     struct{}
	Leaf       struct{}
)

func (Layout) rank() int     { return 1 }
func (Node) rank() int       { return 2 }
func (Images) rank() int     { return 3 }
func (Containers) rank() int { return 4 }
func (Pulls) rank() int      { return 5 }
func (Pull) rank() int       { return 6 }
func (Store) rank() int      { return 7 }
func (Rootfs) rank() int     { return 8 }
func (Leaf) rank() int       { return 9 }
