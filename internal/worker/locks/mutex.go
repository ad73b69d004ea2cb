//go:build !race && !lockorder

package locks

import "sync"

// Checked says that bugs of order end the program.
const Checked = false

// Mutex is a sync.Mutex of a rank. Its zero value is unlocked.
type Mutex[R Rank] struct{ sync.Mutex }
