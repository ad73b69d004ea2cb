package hosts

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"oras.land/oras-go/v2/registry/remote/auth"
	docker "oras.land/oras-go/v2/registry/remote/credentials"

	"hydrofoil.dev/foil/internal/worker/credentials"
)

// DockerConfig is where Docker's config.json is, as Docker's own tools look for
// it: below $DOCKER_CONFIG, or in the home directory.
func DockerConfig() string {
	if dir := os.Getenv("DOCKER_CONFIG"); dir != "" {
		return filepath.Join(dir, "config.json")
	}
	home, err := os.UserHomeDir()
	if err != nil {
		home = "/root" // a service without HOME
	}
	return filepath.Join(home, ".docker", "config.json")
}

// fromDocker returns what a config.json has for a host: by its auths, credsStore
// or credHelpers, whose programs are run. It is none when there is nothing, or
// no such file. The file is read each time, so that a login is noticed.
func fromDocker(ctx context.Context, file, host string) (credentials.Credential, error) {
	if file == "" {
		return credentials.Credential{}, nil
	}
	store, err := docker.NewStore(file, docker.StoreOptions{})
	var c auth.Credential
	if err == nil {
		c, err = docker.Credential(store)(ctx, host)
	}
	if err != nil {
		return credentials.Credential{}, fmt.Errorf("credentials for %s from %s: %w", host, file, err)
	}
	switch {
	case c.RefreshToken != "":
		return credentials.Credential{Secret: c.RefreshToken, Host: host}, nil
	case c.AccessToken != "":
		return credentials.Credential{Token: c.AccessToken, Host: host}, nil
	}
	return credentials.Credential{Username: c.Username, Secret: c.Password, Host: host}, nil
}
