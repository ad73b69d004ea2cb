package upstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"oras.land/oras-go/v2/registry/remote/credentials"
)

// AuthEnv is the environment variable that holds USER:PASSWORD for the upstream.
const AuthEnv = "FOIL_UPSTREAM_AUTH"

// credentialsOf returns what finds the credentials of a host, anew for each
// call: they may be changed while the server runs. A secret without a user is
// an identity token.
func credentialsOf(file string) func(host string) (user, secret string, err error) {
	return func(host string) (string, string, error) {
		user, secret, err := findCredentials(file, host)
		if err != nil {
			return "", "", fmt.Errorf("credentials for the upstream %s: %w", host, err)
		}
		return user, secret, nil
	}
}

func findCredentials(file, host string) (user, secret string, err error) {
	if file == "" {
		if s := os.Getenv(AuthEnv); s != "" {
			return parseUser(AuthEnv, s)
		}
		store, err := credentials.NewStoreFromDocker(credentials.StoreOptions{})
		if err != nil {
			return "", "", err
		}
		return fromStore(store, host)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return "", "", err
	}
	if !json.Valid(b) {
		return parseUser(file, strings.TrimSpace(string(b)))
	}
	store, err := credentials.NewStore(file, credentials.StoreOptions{})
	if err != nil {
		return "", "", err
	}
	return fromStore(store, host)
}

func parseUser(where, s string) (user, secret string, err error) {
	user, secret, ok := strings.Cut(s, ":")
	if !ok || user == "" || secret == "" || strings.ContainsAny(s, "\n") {
		return "", "", errors.New(where + ": want USER:PASSWORD or a Docker configuration")
	}
	return user, secret, nil
}

func fromStore(store credentials.Store, host string) (user, secret string, err error) {
	// Credential helpers are programs.
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	c, err := store.Get(ctx, credentials.ServerAddressFromHostname(host))
	if err != nil {
		return "", "", err
	}
	if c.RefreshToken != "" {
		return "", c.RefreshToken, nil
	}
	return c.Username, c.Password, nil
}
