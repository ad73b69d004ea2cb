package credentials

import (
	"fmt"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for in, ok := range map[string]bool{"u:p": true, "u:p:q": true, "u": false, "u:": false, ":p": false, "": false} {
		c, err := Parse(in)
		if (err == nil) != ok || ok && c.Username+":"+c.Secret != in {
			t.Errorf("%q: %v", in, err)
		}
		if err != nil && in != "" && in != "u" && strings.Contains(err.Error(), in) {
			t.Errorf("the error prints what was given: %v", err)
		}
	}
}

func TestMemory(t *testing.T) {
	var m Memory
	secret := func() string { return m.For("r.example/a").Secret }
	first := m.Remember("r.example/a", Credential{Secret: "1"})
	second := m.Remember("r.example/a", Credential{Secret: "2"})
	if got := secret(); got != "2" {
		t.Errorf("%q, want the last one", got)
	}
	second()
	second()
	if got := secret(); got != "1" {
		t.Errorf("%q, want the one that is left", got)
	}
	first()
	if got := secret(); got != "" {
		t.Errorf("%q is remembered", got)
	}
	forget := m.Remember("r.example/a", Credential{Secret: "3"})
	for i := range 2 * most {
		m.Remember(fmt.Sprint("r.example/", i), Credential{Secret: "x"})
	}
	if n := len(m.entries); n != most || secret() != "" {
		t.Errorf("%d are remembered", n)
	}
	forget()
}
