package rootfs

import "fmt"

// State is where a rootfs is in its life:
//
//	LayOut
//	   │
//	   ▼   mount    all has arrived
//	LaidOut ───▶ Filling ───▶ Complete
//	   │           ▲ │          ▲ │
//	   │     mount │ ▼ unmount  │ ▼
//	   │          Parked ◀─────────  (Parked keeps whether it is complete
//	   │             │                in its record)
//	   │             ▼ nothing names it, others borrow
//	   │          Lending
//	   ▼             │
//	  Gone ◀─────────┘
//
// LaidOut, Filling, Complete and Parked may become Broken; what is Broken becomes
// Lending, or Gone.
type State uint8

const (
	// LaidOut: directory and arena are there, and frames can be written. There is
	// no record yet: after a crash it is a leftover.
	LaidOut State = iota + 1
	// Filling: it is mounted, containers can start, and not all of it is here.
	Filling
	// Complete: it is mounted, and all of it is here and durable.
	Complete
	// Parked: it is on the disk and not mounted.
	Parked
	// Broken: nothing may be served from it. It may still be mounted, for
	// containers that began before.
	Broken
	// Lending: nothing names it; others use contents in its arena. It can never be
	// mounted again.
	Lending
	// Gone: its directory is removed, or about to be.
	Gone
)

var stateNames = [...]string{LaidOut: "laid out", Filling: "filling", Complete: "complete", Parked: "parked", Broken: "broken", Lending: "lending", Gone: "gone"}

func (s State) String() string {
	if int(s) < len(stateNames) && stateNames[s] != "" {
		return stateNames[s]
	}
	return fmt.Sprintf("state %d", uint8(s))
}

// next lists the legal transitions.
var next = map[State][]State{
	LaidOut:  {Filling, Broken, Gone},
	Filling:  {Complete, Parked, Broken},
	Complete: {Parked, Broken},
	Parked:   {Filling, Complete, Lending, Broken, Gone},
	Broken:   {Broken, Lending, Gone},
	// Renaming its record may fail: then it is what it was.
	Lending: {Gone, Parked, Broken},
}
