package startup

import "hydrofoil.dev/foil/internal/format/toc"

// A startup set has the pages that traces and reports chose (choose.go). What else goes into it, and how it
// is laid into frames, follows these policies. Each is one function, and its numbers are here.
//
//	policy      does                                  when                            at most
//	tables      fills what lies between pages in      three runs or more, no two of   one page for two of the set, with
//	            which traces disagree                 them 128 pages apart            remainders; short gaps first
//	remainders  fills the rest of a file              no more than 64 pages lack,     the same
//	                                                  one for three that are touched
//	filled      sends filled pages last, in frames    always                          frames of 128 KiB, runs of 4 pages
//	            of their own
//	advance     sends filled pages of a file with     half of what comes after them   one page for twenty of the set
//	            the pages around them                 is more than they are
//	influence   few reports change a set that is     until three clients     additions: as much as there is, or
//	            known otherwise but little            have reported           1024 pages; cuts: a quarter, or 64
//	batches     orders pages by place                 8 MiB have gone                 an eighth of what has gone; frames
//	                                                                                  of 1 MiB
//
// Tables. Some pages differ from start to start: those of the tables of a Go program, into which its collector
// looks wherever the goroutines happen to be, or of a heap that is read by hash. However often such a
// service is traced, the next start reads pages of these tables that none has read before. Each costs a round
// trip and a segment of 256 to 512 KiB. Where traces disagree tells where the tables are. Of starts that
// were left out (two traces of four of golang's, of six of registry's) 32 and 13 segments were missed
// without this, 1 and 2 with it, for 1.21 and 1.47 times the pages. nextjs, which misses one page or none,
// gets no page more.
//
// Remainders. Of the dynamic linker's 53 pages 44 are touched in any start, and one more in one of five of
// a program with many threads.
//
// Filled. A start touches a few of all filled pages. So they go after every page that a start was seen to
// touch. A worker keeps these frames as they come, and writes of them what is asked for
// (bundle.Startup.Filled), in whole runs, since what has a digest is written whole.
//
// Advance. Who waits for a filled page waits for all of the set before it: at 100 Mbit/s 0.7 s for 8 MB.
// Few of them do not keep the others waiting.
//
// Influence. One container that slept under a database's name cut its inherited set from 6,234 pages to 257, and
// the next start took 9.9 s for 1.85. What is cut by fewer than half of the reports needs no
// more than that bound either, however many there are.
//
// Batches. Each run of a set costs a digest, a write and, on its way into the page cache, a question to the
// gate, and a service goes back and forth between its files. So what lies together goes together, as far as
// nobody waits much longer for it, and in larger frames: small frames of pages in the order of their places
// took 2% more than in that of need. The 10,800 runs of a set of 165 MB (PyTorch) became 6,300 of as many
// bytes, and the reads and writes of the worker that pulls it, in system calls, 56% of what they were.
const (
	fillGap   = 128 // pages between two of a table: what comes with a miss is no less
	fillRuns  = 3   // runs that make a table
	fillShare = 2

	remainderMost  = 64
	remainderShare = 3

	filledAt     = 1 << 30 // is added to when another filled page is needed
	filledRun    = 4       // pages
	filledTarget = 128 << 10

	advanceShare = 20

	quorum    = 3    // clients
	growLeast = 1024 // pages
	cutLeast  = 64   // pages
	cutShare  = 4

	// frameTarget is how many bytes of pages go into a frame. The more, the smaller
	// are all together, and the later is the first of them of use: sets of redis and
	// nginx (6.2 and 3.7 MB) took with their index 2.1% more with 128 KiB and 1.4%
	// less with 512; a frame of 256 KiB arrives in 8 ms at 100 Mbit/s. The highest
	// level of zstd makes them 6% smaller and takes seconds, again and again as
	// workers report.
	frameTarget = 256 << 10
	batchFrom   = 8 << 20
	batchShare  = 8
	batchTarget = 1 << 20
)

// fillers are the policies that fill pages into a set.
var fillers = []func(set, doubtful []ranked, t *toc.TOC) []gap{tables, remainders}
