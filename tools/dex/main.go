// Dex is an OpenID Connect provider, for tests of logins: dex without its databases.
//
//	dex ADDRESS LIFETIME
//
// listens on ADDRESS, with ID tokens that hold for LIFETIME, for the clients registry and other, whose secret is
// "secret". The user ann, with the password "password of ann", is in no group; whoever comes by the connector mock is in the group
// authors, and needs no password. SIGHUP rotates its keys; the former ones still verify. What it was is forgotten when it ends.
//
// Dex's own program is not built: it wants cgo, for SQLite.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/dexidp/dex/server"
	"github.com/dexidp/dex/storage"
	"github.com/dexidp/dex/storage/memory"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/crypto/bcrypt"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: dex ADDRESS LIFETIME")
		os.Exit(2)
	}
	if err := serve(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "dex:", err)
		os.Exit(1)
	}
}

func serve(address, lifetime string) error {
	valid, err := time.ParseDuration(lifetime)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	keep := memory.New(log)
	hash, err := bcrypt.GenerateFromPassword([]byte("password of ann"), bcrypt.DefaultCost)
	if err != nil {
		return err
	}
	all := storage.WithStaticPasswords(keep, []storage.Password{{Email: "ann@corp.example", Username: "ann", UserID: "1", Hash: hash}}, log)
	all = storage.WithStaticConnectors(all, []storage.Connector{
		{ID: server.LocalConnector, Type: server.LocalConnector, Name: "passwords"},
		{ID: "mock", Type: "mockCallback", Name: "mock", Config: []byte("{}")},
	})
	var clients []storage.Client
	for _, id := range []string{"registry", "other"} {
		clients = append(clients, storage.Client{ID: id, Secret: "secret", Name: id, RedirectURIs: []string{"http://127.0.0.1/" + id}})
	}
	all = storage.WithStaticClients(all, clients)

	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var now atomic.Pointer[server.Server]
	begin := func() error {
		s, err := server.NewServer(ctx, server.Config{Issuer: "http://" + address + "/dex", Storage: all, SkipApprovalScreen: true, PasswordConnector: server.LocalConnector,
			IDTokensValidFor: valid, Logger: log, PrometheusRegistry: prometheus.NewRegistry(),
			AllowedGrantTypes: []string{"authorization_code", "password", "refresh_token"}})
		if err == nil {
			now.Store(s)
		}
		return err
	}
	if err := begin(); err != nil {
		return err
	}
	rotate := make(chan os.Signal, 1)
	signal.Notify(rotate, syscall.SIGHUP)
	failed := make(chan error, 2)
	go func() {
		for range rotate {
			// A server looks whether it is time when it begins.
			err := keep.UpdateKeys(func(old storage.Keys) (storage.Keys, error) {
				old.NextRotation = time.Now().Add(-time.Second)
				return old, nil
			})
			if err := errors.Join(err, begin()); err != nil {
				failed <- err
				return
			}
		}
	}()
	h := http.Server{Addr: address, ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { now.Load().ServeHTTP(w, req) })}
	go func() { failed <- h.ListenAndServe() }()
	return <-failed
}
