package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/worker/workload"
)

func newCredentialProviderCommand() *cobra.Command {
	var o workload.Options
	cmd := &cobra.Command{
		Use:   "credential-provider",
		Short: "Log a kubelet in with the service account of the pod (kubelets run this)",
		Long: `credential-provider is a credential provider plugin of the kubelet: a CredentialProviderRequest
of credentialprovider.kubelet.k8s.io/v1 comes on standard input, a CredentialProviderResponse goes to
standard output. Kubelets run it; nobody else has to.

The request has the image, and a token of the service account that its pod runs as. The registry
of the image is asked where its token service is, and that gives a token of the registry in
exchange, if it knows the cluster as an issuer (docs/access.md, "Kubernetes with workload identity").
The kubelet keeps that for half of its lifetime, for all images of the registry; a pull that takes
longer than the other half needs a longer one: [tokens] lifetime, in the registry's rules.
A registry that asks nobody to log in gets nothing.

The kubelet sends the token of a service account if its configuration has tokenAttributes (Kubernetes 1.34
or later). docs/kubernetes.md has the whole configuration.

Exit codes: 0; 1 there are no credentials, and standard error, which the kubelet logs, says why; 2 the command
line makes no sense.`,
		Example: `  # /etc/kubernetes/credential-providers.yaml has args: [credential-provider] of the provider foil
  kubelet --image-credential-provider-config /etc/kubernetes/credential-providers.yaml \
    --image-credential-provider-bin-dir /usr/local/bin`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.Timeout <= 0 {
				return usagef("--timeout %v: want more than nothing", o.Timeout)
			}
			if err := workload.Provide(cmd.Context(), o, cmd.InOrStdin(), cmd.OutOrStdout()); err != nil {
				return fmt.Errorf("credentials for the kubelet: %w", err)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&o.CA, "ca", "", "`FILE` with certificates in PEM form that vouch for registries, besides the system's")
	cmd.Flags().BoolVar(&o.PlainHTTP, "plain-http", false, "speak HTTP without TLS, over which everybody on the way sees the tokens; on this machine's own addresses that is done anyway when there is no TLS")
	cmd.Flags().DurationVar(&o.Timeout, "timeout", 20*time.Second, "how long a registry has to answer; the kubelet ends this after a minute")
	return cmd
}
