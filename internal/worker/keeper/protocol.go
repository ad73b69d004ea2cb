// Package keeper holds the daemon's descriptors in a second, very small
// process, so that they outlive the daemon: the gate's fanotify group and
// journal, arenas, mounts. It does nothing else.
//
// # Protocol
//
// The keeper listens on a Unix socket of type SOCK_SEQPACKET, mode 0600, and
// talks only to processes of root or of its own user (SO_PEERCRED). Each
// message is one packet of at most 65,536 bytes; descriptors travel beside it
// (SCM_RIGHTS). Integers are little-endian. The client sends a request and
// reads its answer before it sends the next.
//
//	message: uint8 type, then
//	  1 Hello  client  uint16 lowest, uint16 highest version that it speaks
//	  2 Put    client  name; one descriptor. Replaces what had the name.
//	  3 Drop   client  name. A name that is not there is no error.
//	  4 All    client  nothing
//	  5 Stop   client  nothing. Refused (NotEmpty) while anything is held.
//	  6 Mind   client  nothing. Answer at listening sockets from now on.
//	  7 Take   client  nothing. Answer there no more; answered by Items, see Life.
//	128 Welcome keeper uint16 version chosen, uint32 process ID, uint32 names held
//	129 OK     keeper  nothing
//	130 Error  keeper  uint16 code, text
//	131 Items  keeper  uint8 more follow (1) or not (0), uint16 count, count names; count descriptors
//
//	name: uint8 length (1 to 255), bytes
//
// Hello is the first message of a connection and is answered by Welcome with
// the highest version both speak, or by an Error (Version). All is answered by
// one or more Items, each with at most 253 names and descriptors (the
// kernel's limit), in the order of the names; Put, Drop, Stop and Mind by OK. The
// keeper answers a type that it does not know with an Error (Unknown) and goes
// on, so a newer daemon can ask an older keeper. This text is version 1.
//
// One connection at a time owns the keeper: from Welcome until it is closed.
// Another one gets an Error (Busy) for its Hello. The kernel closes a dead process's
// connection when its last thread has left its last system call, so a
// daemon that is welcome knows that no earlier one still reads events.
//
// # Life
//
// A lock file beside the socket (its name and ".lock") is locked (flock) for
// as long as the keeper lives, so there is one keeper a socket. The keeper
// ends when it is told (Stop, SIGTERM) and holds nothing; never because a
// client went away.
//
// A descriptor whose name begins with "listen/" is a listening Unix socket at which clients expect gRPC. From
// the end of a connection that owned the keeper, or from Mind, until Take, the keeper accepts what connects there, at
// most 200 connections, and sends an empty HTTP/2 SETTINGS frame. For without one clients give up within a second,
// and with one they send their calls, which wait in the connection. Take is answered by one Items with
// these connections, each under the name of its socket, which the keeper then closes. What nobody takes within
// a minute is closed, and the sockets with it; a keeper that holds nothing else then, and has no client, ends.
package keeper

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Version is the highest version of the protocol that this code speaks;
// minVersion the lowest.
const (
	Version    = 1
	minVersion = 1
)

const (
	maxMessage = 65536
	maxName    = 255
	// maxFDs is how many descriptors one message can carry (SCM_MAX_FD).
	maxFDs = 253
)

type kind uint8

const (
	kindHello kind = 1
	kindPut   kind = 2
	kindDrop  kind = 3
	kindAll   kind = 4
	kindStop  kind = 5
	kindMind  kind = 6
	kindTake  kind = 7

	kindWelcome kind = 128
	kindOK      kind = 129
	kindError   kind = 130
	kindItems   kind = 131
)

type code uint16

const (
	codeInvalid  code = 1 // a message that the protocol does not allow
	codeUnknown  code = 2 // a type that this keeper does not know
	codeVersion  code = 3 // no version in common
	codeBusy     code = 4 // another connection owns the keeper
	codeNotEmpty code = 5 // told to stop while something is held
	codeFull     code = 6 // no descriptor is left to hold it with
)

// message is any message of the protocol; which fields count depends on kind.
type message struct {
	kind kind

	lowest, highest uint16 // Hello

	name string // Put, Drop

	version uint16 // Welcome
	pid     uint32
	held    uint32

	code code // Error
	text string

	more  bool // Items
	names []string
}

// appendMessage appends m's packet to b.
func appendMessage(b []byte, m message) []byte {
	le := binary.LittleEndian
	b = append(b, byte(m.kind))
	switch m.kind {
	case kindHello:
		b = le.AppendUint16(b, m.lowest)
		b = le.AppendUint16(b, m.highest)
	case kindPut, kindDrop:
		b = appendName(b, m.name)
	case kindWelcome:
		b = le.AppendUint16(b, m.version)
		b = le.AppendUint32(b, m.pid)
		b = le.AppendUint32(b, m.held)
	case kindError:
		b = le.AppendUint16(b, uint16(m.code))
		b = append(b, m.text...)
	case kindItems:
		var more byte
		if m.more {
			more = 1
		}
		b = append(b, more)
		b = le.AppendUint16(b, uint16(len(m.names)))
		for _, n := range m.names {
			b = appendName(b, n)
		}
	}
	return b
}

func appendName(b []byte, name string) []byte {
	b = append(b, byte(len(name)))
	return append(b, name...)
}

var errShort = errors.New("it ends too early")

// unknownKind is a message of a type that this code does not know.
type unknownKind kind

func (k unknownKind) Error() string {
	return fmt.Sprintf("parse keeper message: unknown type %d", uint8(k))
}

// parseMessage reads one packet.
func parseMessage(b []byte) (message, error) {
	if len(b) == 0 {
		return message{}, fmt.Errorf("parse keeper message: %w", errShort)
	}
	m := message{kind: kind(b[0])}
	b = b[1:]
	le := binary.LittleEndian
	var err error
	need := func(n int) bool {
		if len(b) < n {
			err = errShort
			return false
		}
		return true
	}
	switch m.kind {
	case kindHello:
		if need(4) {
			m.lowest, m.highest = le.Uint16(b), le.Uint16(b[2:])
			b = b[4:]
		}
	case kindPut, kindDrop:
		m.name, b, err = cutName(b)
	case kindAll, kindStop, kindMind, kindTake, kindOK:
	case kindWelcome:
		if need(10) {
			m.version, m.pid, m.held = le.Uint16(b), le.Uint32(b[2:]), le.Uint32(b[6:])
			b = b[10:]
		}
	case kindError:
		if need(2) {
			m.code, m.text = code(le.Uint16(b)), string(b[2:])
			b = nil
		}
	case kindItems:
		if !need(3) {
			break
		}
		count := int(le.Uint16(b[1:]))
		switch {
		case b[0] > 1:
			err = fmt.Errorf("more is %d", b[0])
		case count > maxFDs:
			err = fmt.Errorf("%d names, more than %d", count, maxFDs)
		}
		m.more = b[0] == 1
		b = b[3:]
		for i := 0; i < count && err == nil; i++ {
			var n string
			n, b, err = cutName(b)
			m.names = append(m.names, n)
		}
	default:
		return message{}, unknownKind(m.kind)
	}
	if err == nil && len(b) > 0 {
		err = fmt.Errorf("%d bytes too many", len(b))
	}
	if err != nil {
		return message{}, fmt.Errorf("parse keeper message of type %d: %w", m.kind, err)
	}
	return m, nil
}

func cutName(b []byte) (string, []byte, error) {
	if len(b) < 1 || len(b) < 1+int(b[0]) {
		return "", nil, errShort
	}
	if b[0] == 0 {
		return "", nil, errors.New("empty name")
	}
	n := 1 + int(b[0])
	return string(b[1:n]), b[n:], nil
}
