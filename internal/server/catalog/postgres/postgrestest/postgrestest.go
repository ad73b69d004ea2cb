// Package postgrestest runs PostgreSQL for tests.
package postgrestest

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver
)

// Server is a PostgreSQL of its own.
type Server struct {
	t         testing.TB
	bin, data string
	port      int
	as        *syscall.Credential // nil: who runs the test
	cmd       *exec.Cmd
	ended     chan struct{}
	out       lockedBuffer
	databases int
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer // guarded by mu
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// bin is where the programs of PostgreSQL are; distributions keep them away from PATH.
func bin(t testing.TB) string {
	if path, err := exec.LookPath("initdb"); err == nil {
		return filepath.Dir(path)
	}
	all, err := filepath.Glob("/usr/lib/postgresql/*/bin/initdb")
	if err != nil || len(all) == 0 {
		t.Skip("there is no PostgreSQL: scripts/deps test installs it")
	}
	return filepath.Dir(slices.MaxFunc(all, func(a, b string) int { return len(a) - len(b) }))
}

// Start runs a server until the test ends. Nothing of it survives a crash of the machine.
func Start(t testing.TB) *Server {
	t.Helper()
	s := &Server{t: t, bin: bin(t)}
	base, err := os.MkdirTemp("", "pg-") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(base) })
	s.data = filepath.Join(base, "data")
	if os.Geteuid() == 0 { // as whom it refuses to run
		u, err := user.Lookup("postgres")
		if err != nil {
			t.Skipf("PostgreSQL does not run as root, and there is no user for it: %v", err)
		}
		uid, err1 := strconv.Atoi(u.Uid)
		gid, err2 := strconv.Atoi(u.Gid)
		if err1 != nil || err2 != nil {
			t.Fatal(err1, err2)
		}
		s.as = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
		if err := os.Chown(base, uid, gid); err != nil {
			t.Fatal(err)
		}
	}
	init := s.command("initdb", "--pgdata", s.data, "--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync")
	if out, err := init.CombinedOutput(); err != nil {
		t.Fatalf("initdb: %v\n%s", err, out)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.port = l.Addr().(*net.TCPAddr).Port
	l.Close()
	s.Restart()
	t.Cleanup(s.Kill)
	t.Cleanup(func() {
		if t.Failed() {
			said := s.out.String()
			t.Logf("PostgreSQL said at last:\n%s", said[max(0, len(said)-4096):])
		}
	})
	return s
}

func (s *Server) command(program string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(s.bin, program), args...)
	cmd.Dir = filepath.Dir(s.data)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.as, Pdeathsig: syscall.SIGKILL, Setpgid: true}
	return cmd
}

// Restart runs it, after Kill, with the data that it had.
func (s *Server) Restart() {
	s.t.Helper()
	s.cmd = s.command("postgres", "-D", s.data, "-k", filepath.Dir(s.data), "-h", "127.0.0.1", "-p", strconv.Itoa(s.port),
		"-c", "fsync=off", "-c", "max_connections=100", "-c", "shared_buffers=32MB", "-c", "deadlock_timeout=100ms")
	s.cmd.Stdout, s.cmd.Stderr = &s.out, &s.out
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan struct{}) {
		_ = cmd.Wait() // it is killed
		close(ended)
	}(s.cmd, s.ended)
	db := s.open("postgres")
	defer db.Close()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		err := db.PingContext(context.Background())
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("PostgreSQL does not answer: %v\n%s", err, s.out.String())
		}
	}
}

// Kill ends it as a power cut would, with all its processes.
func (s *Server) Kill() {
	// The others end when the first one has.
	_ = s.cmd.Process.Kill()
	<-s.ended
	s.awaitGone()
}

// Stop ends it, and its connections, in order.
func (s *Server) Stop() {
	_ = s.cmd.Process.Signal(syscall.SIGINT)
	<-s.ended
}

// awaitGone waits for the processes that the first one has left: a new server refuses to begin beside them.
func (s *Server) awaitGone() {
	pid := s.cmd.Process.Pid
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if syscall.Kill(-pid, 0) != nil {
			return
		}
	}
}

// URL is the location of a database.
func (s *Server) URL(database string) string {
	return fmt.Sprintf("postgres://postgres@127.0.0.1:%d/%s?sslmode=disable", s.port, database)
}

// Address is where it listens.
func (s *Server) Address() string { return fmt.Sprintf("127.0.0.1:%d", s.port) }

func (s *Server) open(database string) *sql.DB {
	db, err := sql.Open("pgx", s.URL(database))
	if err != nil {
		s.t.Fatal(err)
	}
	return db
}

// Database makes an empty database and returns its location.
func (s *Server) Database() string {
	s.t.Helper()
	s.databases++
	name := fmt.Sprint("test", s.databases)
	s.Exec("postgres", `CREATE DATABASE `+name)
	return s.URL(name)
}

// Exec runs statements in a database.
func (s *Server) Exec(database string, statements ...string) {
	s.t.Helper()
	db := s.open(database)
	defer db.Close()
	for _, statement := range statements {
		if _, err := db.ExecContext(context.Background(), statement); err != nil {
			s.t.Fatalf("%s: %v", statement, err)
		}
	}
}

// Open connects to the database at a location.
func Open(t testing.TB, location string) *sql.DB {
	t.Helper()
	db, err := sql.Open("pgx", location)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

// Proxy is between a catalog and its server, and loses connections.
type Proxy struct {
	l      net.Listener
	server string

	mu    sync.Mutex
	conns map[net.Conn]bool // guarded by mu
	// cut ends a connection when the client has sent a message that has this; empty: none. Guarded by mu.
	cut              string
	before           bool // guarded by mu: the message does not arrive; else its answer does not
	cuts             int  // guarded by mu
	parsed, executed int  // guarded by mu
}

// Proxy runs one until the test ends.
func (s *Server) Proxy() *Proxy {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.t.Fatal(err)
	}
	p := &Proxy{l: l, server: s.Address(), conns: map[net.Conn]bool{}}
	s.t.Cleanup(func() { l.Close(); p.Drop() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go p.serve(c)
		}
	}()
	return p
}

// Through is a location by way of the proxy.
func (p *Proxy) Through(location string) string {
	return strings.Replace(location, p.server, p.l.Addr().String(), 1)
}

// CutAt ends connections on which a client sends what has text in it, so often: before it arrives, or before it is answered.
func (p *Proxy) CutAt(text string, before bool, times int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut, p.before, p.cuts = text, before, times
}

// Left is how many cuts are still to come.
func (p *Proxy) Left() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cuts
}

// Messages is how many statements clients had the server parse, and execute.
func (p *Proxy) Messages() (parsed, executed int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.parsed, p.executed
}

// messages counts those that begin in b, which a client sent after its first one. What is cut up is not counted right: tests are small.
func (p *Proxy) messages(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(b) >= 5 {
		switch b[0] {
		case 'P':
			p.parsed++
		case 'E':
			p.executed++
		}
		n := 1 + int(binary.BigEndian.Uint32(b[1:]))
		b = b[min(len(b), n):]
	}
}

// Drop ends all connections.
func (p *Proxy) Drop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.Close()
	}
}

// due reports whether a connection ends now.
func (p *Proxy) due(b []byte) (cut, before bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cuts == 0 || p.cut == "" || !bytes.Contains(bytes.ToLower(b), []byte(p.cut)) {
		return false, false
	}
	p.cuts--
	return true, p.before
}

func (p *Proxy) serve(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", p.server)
	if err != nil {
		return
	}
	defer server.Close()
	p.mu.Lock()
	p.conns[client] = true
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.conns, client)
		p.mu.Unlock()
	}()
	silent := make(chan struct{})
	go func() {
		b := make([]byte, 64<<10)
		for {
			n, err := server.Read(b)
			if n > 0 {
				select {
				case <-silent:
					client.Close() // the answer is there, and nobody gets it
					return
				default:
				}
				if _, err := client.Write(b[:n]); err != nil {
					return
				}
			}
			if err != nil {
				client.Close()
				return
			}
		}
	}()
	b := make([]byte, 64<<10)
	first := true // a message without a type
	for {
		n, err := client.Read(b)
		if n > 0 {
			if !first {
				p.messages(b[:n])
			}
			first = false
			cut, before := p.due(b[:n])
			if cut && before {
				return
			}
			if cut {
				close(silent)
			}
			if _, err := server.Write(b[:n]); err != nil {
				return
			}
			if cut {
				_, _ = io.Copy(io.Discard, client) // until the answer has come
				return
			}
		}
		if err != nil {
			return
		}
	}
}
