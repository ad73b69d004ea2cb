package site

import (
	"context"
	"net"
	"testing"
)

func TestParseReadiness(t *testing.T) {
	for _, c := range []struct {
		probe string
		redis bool
		port  string
		tries bool
		fails bool
	}{
		{probe: "tcp:6379", redis: true, port: "6379", tries: true},
		{probe: "tcp:80", port: "80", tries: true},
		{probe: "http:8080/health", port: "8080", tries: true},
		{probe: "http:8080", port: "8080", tries: true},
		{probe: "exit"},
		{probe: "exec:test -e /run/ready:now"},
		{probe: "exec:", fails: true},
		{probe: "exit:0", fails: true},
		{probe: "tcp", fails: true},
		{probe: "http:/", fails: true},
		{probe: "stdout:^ready$"},
		{probe: "stdout:(", fails: true},
		{probe: "stdout:", fails: true},
		{probe: "", fails: true},
	} {
		r, err := ParseReadiness(c.probe, c.redis)
		if (err != nil) != c.fails {
			t.Errorf("%q: error %v", c.probe, err)
			continue
		}
		if err == nil && (r.port != c.port || (r.try != nil) != c.tries) {
			t.Errorf("%q: port %q, tries %v", c.probe, r.port, r.try != nil)
		}
	}
}

// Whoever answers otherwise than a ready service is not taken for one.
func TestTries(t *testing.T) {
	for _, c := range []struct {
		probe, answer string
		redis, want   bool
	}{
		{"tcp:1", "+PONG\r\n", true, true},
		{"tcp:1", "-LOADING Redis is loading the dataset in memory\r\n", true, false},
		{"tcp:1", "", true, false},
		{"http:1/", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", false, true},
		{"http:1/", "HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 0\r\n\r\n", false, true},
		{"http:1/", "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", false, false},
		{"http:1/", "+PONG\r\n", false, false},
	} {
		r, err := ParseReadiness(c.probe, c.redis)
		if err != nil {
			t.Fatal(err)
		}
		client, server := net.Pipe()
		go func() {
			server.Read(make([]byte, 4096))
			server.Write([]byte(c.answer))
			server.Close()
		}()
		if got := r.try(context.Background(), client); got != c.want {
			t.Errorf("%s answered %q: ready %v", c.probe, c.answer, got)
		}
		client.Close()
	}
}
