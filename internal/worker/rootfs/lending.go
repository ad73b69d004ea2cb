package rootfs

import (
	"errors"
	"os"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/worker/contents"
	"hydrofoil.dev/foil/internal/worker/mounts"
)

// lending is of a lender: what is left of a rootfs that nothing names any more while other
// rootfs use contents in its arena: those contents, and nothing else. It is
// never mounted, and its arena only shrinks. Its directory has:
//
//	lender.json  the record that was rootfs.json. Renaming it is what makes a
//	             rootfs a lender: it takes no room on a full disk, and from then
//	             on the rootfs cannot be mounted
//	kept         what of the arena is kept, as package contents says. Without it:
//	             contents, and nothing was punched yet
//	borrowers    the IDs of the rootfs for which it was punched, one a line. A
//	             cache: without it that is found out again
//	arena        as it was, with holes in it
//
// A block is punched only when no rootfs that can be mounted refers to it, and
// the kernel has no mount of one that cannot, in whatever namespace (see
// IsOpen). What was kept is made durable before, so that after a crash at any
// instant everything that is listed is here.
type lending struct {
	// exact: contents lists only what is here. A rootfs that was incomplete
	// lists what never arrived until it is punched, and lends nothing new.
	exact bool
	// only: nobody can read anything of it but what borrowers do.
	only bool
	// borrowers are those for which it was punched, sorted; nil: not known.
	borrowers []digest.Digest
}

// Files of a lender's directory.
const (
	LenderName    = "lender.json"
	KeptName      = "kept"
	BorrowersName = "borrowers"
)

// Lend makes it a lender, unless somebody uses it, it is mounted, or about to be: no
// pull counts on it from here on. What others borrow is here; whatever is wrong with it, is not that. undo makes it what
// it was.
func (r *Rootfs) Lend() (undo func(), ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.users > 0 || r.mnt.Mounted() || !r.IsReady() {
		return nil, false
	}
	was, why := r.state, r.why
	r.become(Lending)
	r.lending = lending{exact: r.rec.Complete}
	if r.contents != nil {
		r.why = nil
	}
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.become(was)
		r.lending, r.why = lending{}, why
	}, true
}

// LendsOnly says that nobody can read anything of a lender but what its borrowers do, all of which is here: no mount of
// its own is left anywhere.
func (r *Rootfs) LendsOnly() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lending.only = true
}

func (r *Rootfs) lendsOnly() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state == Lending && r.lending.only
}

// Shrunk replaces the list of what a lender's arena holds by that of what is kept.
func (r *Rootfs) Shrunk(list *contents.List) {
	r.mu.Lock()
	r.replaced = append(r.replaced, r.contents)
	r.contents, r.lending.exact = list, true
	left := r.unusedLocked()
	r.mu.Unlock()
	left()
}

// SetBorrowers notes for whom a lender's arena was punched: IDs, sorted.
func (r *Rootfs) SetBorrowers(ids []digest.Digest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lending.borrowers = ids
}

// IsOpen reports whether the kernel has the metadata image of a rootfs mounted,
// in whatever namespace, below whatever overlay: a lease for writing is granted
// only on a file that nobody has open. Without an answer it is.
func (r *Rootfs) IsOpen() bool {
	return FileIsOpen(r.Path(mounts.Image)) || FileIsOpen(r.Path(OldMetaName))
}

// FileIsOpen is IsOpen for one file.
func FileIsOpen(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return !errors.Is(err, os.ErrNotExist)
	}
	defer f.Close()
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	if err != nil {
		return true
	}
	_, _ = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_UNLCK)
	return false
}

// ShrunkFor reports whether a lender has nothing that borrowers, sorted, do not
// need: nobody for whom it was punched has gone. Who came later uses only what
// was left.
func (r *Rootfs) ShrunkFor(borrowers []digest.Digest) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.lending.borrowers == nil {
		return false
	}
	for _, id := range r.lending.borrowers {
		if _, ok := slices.BinarySearch(borrowers, id); !ok {
			return false
		}
	}
	return true
}

// LoadLender reads a lender's directory.
func (r *Rootfs) LoadLender() error {
	r.state, r.lending.exact = Lending, true
	if err := r.readRecord(LenderName); err != nil {
		return err
	}
	var err error
	if r.contents, err = contents.Open(r.Path(KeptName)); errors.Is(err, os.ErrNotExist) {
		r.lending.exact = r.rec.Complete
		r.contents, err = contents.Open(r.Path(ContentsName))
	}
	if err != nil {
		return err
	}
	b, err := os.ReadFile(r.Path(BorrowersName))
	if err != nil {
		return nil // it is found out again
	}
	ids := []digest.Digest{}
	for _, line := range strings.Fields(string(b)) {
		id, err := digest.Parse(line)
		if err != nil {
			return nil
		}
		ids = append(ids, id)
	}
	if slices.IsSorted(ids) {
		r.lending.borrowers = ids
	}
	return nil
}
