// Package deflate makes DEFLATE streams (RFC 1951) that are, bit for bit, those of
// compress/flate up to Go 1.26 at levels 1 to 9. Most layers of the world's images were
// compressed by it. Go 1.27 has another encoder, so that the library of the day cannot be
// relied on. And here a stream can be begun in the middle: see "Restart points".
//
// The rest of this comment is the specification of the encoder, as it was observed. What
// a decoder does not care about is told: which of the many streams it is.
//
// # Plaintext and blocks
//
// Plaintext becomes tokens, literal bytes and matches; tokens become blocks. No block is
// marked as the last one: after the last is an empty stored block that is, and the byte
// that it ends in is filled with zero bits. Empty plaintext is that block alone.
//
// # Levels 2 to 9
//
// A match has 4 to 258 bytes, and one of 4 bytes is not farther away than 4096 bytes.
// Candidates are earlier positions, the latest first, that have the same hash of
// four bytes: as a big-endian number times 0x1e35a7bd modulo 2^32, its upper 17 bits. (So
// a candidate that only shares the hash counts as one of those that are tried.)
//
//	level                    2    3    4    5    6    7    8     9
//	candidates that are tried 8    32   16   32   128  256  1024  4096
//	a match that is enough   16   32   16   32   128  128  258   258
//	lazy below               -    -    4    16   16   32   128   258
//	all is entered up to     5    6    all
//
// Of the candidates that are tried the longest match wins, among equally long ones the
// latest position. The search ends at a match that is enough, or has as many bytes as there
// are. That there is a table of "good" lengths in that library changes nothing: it is
// compared with a length that is always 3.
//
// Levels 2 and 3 are greedy: the first match is taken. Its positions are entered into the
// chains if it is not longer than the table says, else only its first one is. Levels 4
// to 9 are lazy: what was found at a position is held back until the next one was looked
// at, too. If the match held back has at least 4 bytes, and the new one is not longer, the
// one held back is taken, all its positions are entered, and nothing is held back after
// it. Else the first position is a literal. When the length held back is not below the
// level's "lazy", or is not less than the bytes that are left, nothing is looked for. The
// last 3 positions of the plaintext have no hash: they are not entered, and have no match.
//
// A block ends when it has 16384 tokens. What is held back then belongs to the next one.
//
// The window is 65536 bytes that begin at a multiple of 32768. No match begins before
// it, nor farther away than 32768. It slides by 32768 when fewer than 262 bytes of it are
// left to be worked on and more plaintext comes. So after a slide matches reach back
// some 32506 bytes first. A block whose first byte has left the window cannot be stored.
//
// # Writes
//
// At level 1 it makes no difference in which pieces plaintext is written. At the others it
// does, in a rare case: the window slides, too, when it is not full, but all was worked on
// that can be, which is what has 262 bytes after it, and the next position is at 65274 or
// later in the window, and then another Write comes. A full window slides when that position
// is at 65275 or later. So a Write that ends in the window's last 262 bytes changes
// how far the position 65274 may reach, if it begins a token; and how far the plaintext's last
// bytes may, when it ends in the same window. Encoder.Between is for that. Writes of
// 32768 bytes, and of any multiple, are like a single Write.
//
// # Level 1
//
// Blocks have 65535 bytes of plaintext, the last one fewer. A last one of up to 16 bytes is
// stored, one of fewer than 128 has literals only. In the others a table knows one position,
// the latest, for each hash of four bytes: as a little-endian number times 0x1e35a7bd modulo
// 2^32, its upper 14 bits. Looking for a match at a position enters it, and finds one if the
// table had a position not farther away than 32768 with the same four bytes. It may be in
// the block before, and a match may run from there into this one; it ends with the block
// and has at most 258 bytes. Steps from one look to the next grow while nothing is
// found: a counter begins with 32, each step is a 32nd of it, rounded down, and is added to
// it. The search in a block ends when a step would lead beyond the 15th byte before its
// end; the position before that step is not entered. After a match, if it ends before the
// 15th byte from the end, its last position is entered and the one after it looked at; if
// that has no match, the search goes on a byte later, with small steps.
//
// A block with more tokens than 15/16 of its bytes (less than: bytes less a 16th, rounded
// down) is written as literals only.
//
// # Blocks
//
// At levels 2 to 9 a block is stored, or has fixed codes, or codes of its own,
// whichever takes the fewest bits; equal ones in the order fixed, own, stored. The size of a
// stored block is 8 times its bytes and 5, wherever in a byte it begins. It is no choice beyond
// 65535 bytes. At level 1 a block has codes of its own, or is stored if that takes less than
// 17/16 of their size (the 16th rounded down), where the bits that follow the codes for
// lengths and distances are not counted. A block without matches has one distance code of one
// bit, the first, and all sizes are as if it was used once.
//
// The header of codes has no more literal and distance codes than up to the last that
// occurs. Lengths of codes are one sequence, literals before distances. A run of equal lengths is
// the length and then as many 16 as have 3 to 6 more, the longest first; a run of zeros as
// many 18 as have 11 to 138, the longest first, and then a 17, if 3 to 10 are left; what is
// left after that is written singly. At least 4 code lengths of the header's own codes are
// written, and the last of them is one that occurs.
//
// # Codes
//
// Codes are at most 15 bits long, those of the header 7. One or two symbols have
// one bit each. For n > 2 symbols the lengths are those of package-merge: row 1
// is the symbols by frequency, then by number; each row after it is the same symbols, merged
// with the pairs of what is in the row before (first and second, third and fourth, ...), by
// weight, pairs before symbols of equal weight. There are as many rows as a code may have
// bits, but at most n-1. Of the last row 2n-2 items are taken; of each one before it, those
// that make the pairs which were taken. As many symbols as were taken of the k-th row from
// the end have at least k bits: the symbols that come first in the order of row 1. Codes are
// numbered as RFC 1951 says.
//
// # Restart points
//
// Between two blocks little is in an encoder that is not in the last 32768 bytes of plaintext: the
// bits of the byte that has begun, where the window begins, what is held back, and, at levels
// 1 to 3, which positions of these bytes are in the table or the chains. A Point is
// that. At levels 4 to 9 all positions are in the chains. An Index is the points of one
// stream, and what it takes to make any range of it again (Index.WriteRange), on
// several cores. It does not say what the plaintext was: who restores compares digests.
//
// An index is encoded as the seven bytes "HFDRP\r\n", the version (1, one byte), the level
// (one byte), the bytes of plaintext, the bytes of the stream, the number of points,
// these, the number of Writes whose ends made a difference ("Writes", above), and for each how
// far it ended in the plaintext, less that of the one before. Numbers are uvarints in their
// shortest form. A point is
//
//	in       bytes of plaintext before the next position, less the point's before
//	out      whole bytes of the stream, less the point's before
//	begun    one byte: the bits of the byte that has begun, and above them a one
//	window   how far before that position the window begins; not at level 1
//	marks    levels 1 to 3: a bit for each of the last 32768 bytes, or as many as there are,
//	         the first one lowest in the first byte: 1 if it is in the table or a chain
//	held     levels 4 to 9: 0, if nothing is held back; or the length of the match that
//	         is, 3 for none, and its distance, 0 for none
//
// Points, and ends of Writes, are in order, and before the ends. Nothing follows.
package deflate
