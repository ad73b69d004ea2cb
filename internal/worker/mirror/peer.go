package mirror

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/containerd/platforms"
)

// platform is what containerd pulls on this host.
func platform() string { return platforms.Format(platforms.DefaultSpec()) }

// root reports whether the client of a connection over loopback is a process of
// root, or of this one's user.
func root(client, server net.Addr) bool {
	uid, err := uidOf(client, server)
	return err == nil && (uid == 0 || uid == os.Geteuid())
}

// uidOf finds the user of the socket at the client's end, which is on this host,
// in the kernel's list.
func uidOf(client, server net.Addr) (int, error) {
	c, err := netip.ParseAddrPort(client.String())
	if err != nil {
		return 0, err
	}
	s, err := netip.ParseAddrPort(server.String())
	if err != nil {
		return 0, err
	}
	// An IPv4 client of an IPv6 socket is in either list.
	for _, list := range []string{"/proc/self/net/tcp", "/proc/self/net/tcp6"} {
		f, err := os.Open(list)
		if err != nil {
			continue // no IPv6
		}
		uid, err := uidIn(f, c, s)
		f.Close()
		if err == nil {
			return uid, nil
		}
	}
	return 0, fmt.Errorf("no socket of %s to %s", client, server)
}

// uidIn looks through a list as /proc/net/tcp is.
func uidIn(list io.Reader, local, remote netip.AddrPort) (int, error) {
	in := bufio.NewScanner(list)
	for in.Scan() {
		// sl local remote st tx:rx tr:when retransmits uid
		f := strings.Fields(in.Text())
		if len(f) < 8 {
			continue
		}
		l, err1 := parseSocket(f[1])
		r, err2 := parseSocket(f[2])
		if err1 == nil && err2 == nil && same(l, local) && same(r, remote) {
			return strconv.Atoi(f[7])
		}
	}
	if err := in.Err(); err != nil {
		return 0, err
	}
	return 0, io.EOF
}

func same(a, b netip.AddrPort) bool {
	return a.Port() == b.Port() && a.Addr().Unmap().WithZone("") == b.Addr().Unmap().WithZone("")
}

// parseSocket reads an address as the kernel writes it: 32-bit words of the
// host's byte order, then the port, all in hexadecimal.
func parseSocket(s string) (netip.AddrPort, error) {
	addr, port, ok := strings.Cut(s, ":")
	b, err := hex.DecodeString(addr)
	if !ok || err != nil || len(b) != 4 && len(b) != 16 {
		return netip.AddrPort{}, fmt.Errorf("socket address %q", s)
	}
	n, err := strconv.ParseUint(port, 16, 16)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("socket address %q", s)
	}
	for i := 0; i < len(b); i += 4 {
		binary.NativeEndian.PutUint32(b[i:], binary.BigEndian.Uint32(b[i:]))
	}
	a, _ := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(a, uint16(n)), nil
}
