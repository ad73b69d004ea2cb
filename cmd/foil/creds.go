package main

import (
	"os"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/worker/credentials"
)

// credsFlag adds --creds. The function reads what was given: an error of the
// flag itself would print it.
func credsFlag(cmd *cobra.Command) func() (credentials.Credential, error) {
	creds := cmd.Flags().String("creds", "", "`USER:PASSWORD` for the image's registry, in place of what docker login left; everybody on this host sees it in the list of processes, but not FOIL_CREDS in the environment, which sets it as well")
	return func() (credentials.Credential, error) {
		if *creds == "" {
			*creds = os.Getenv("FOIL_CREDS")
		}
		if *creds == "" {
			return credentials.Credential{}, nil
		}
		return credentials.Parse(*creds)
	}
}
