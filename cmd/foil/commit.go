package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/progress"
	"hydrofoil.dev/foil/internal/worker/api"
)

// epochEnv is by what builds are told of a time that they are to claim (reproducible-builds.org).
const epochEnv = "SOURCE_DATE_EPOCH"

func newCommitCommand() *cobra.Command {
	var root string
	var asJSON bool
	var req api.CommitRequest
	cmd := &cobra.Command{
		Use:   "commit [flags] CONTAINER REF",
		Short: "Make an image of what a container has changed",
		Long: `commit makes an image: that of the container, with one more layer that has all that
the container has changed. It can be run at once. What it has of its base stays
where it is; only what has changed is read. The base must have arrived.

REF must be of the registry of the container's image, since it is made of what
came from there. An image of that name is replaced. The layer is an uncompressed
tar stream; what the runtime has made to mount on is not in it. The image is on
this worker only, and is never evicted.

The container's processes stand still while its files are read; with --pause=false
they go on, and a file that changes meanwhile is an error.

--change takes an instruction of a Dockerfile: CMD, ENTRYPOINT, ENV, EXPOSE, LABEL,
STOPSIGNAL, USER, VOLUME or WORKDIR. With ` + epochEnv + ` in the environment, seconds
since 1970, that is when the image is said to be made, and no file is said to be
younger: who does the same again gets the same digest.

Exit codes: 0; 1 an error, and nothing has changed; 2 the command line makes no sense.`,
		Example: `  foil commit web registry.example/web:patched
  foil commit --change 'CMD ["redis-server", "--appendonly", "yes"]' -m 'persistent' db registry.example/redis:7-aof
  ` + epochEnv + `=1700000000 foil commit build registry.example/app:v3`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			req.Ref = args[1]
			if _, err := api.NormalRef(req.Ref); err != nil {
				return &usageError{err}
			}
			if s := os.Getenv(epochEnv); s != "" {
				seconds, err := strconv.ParseInt(s, 10, 64)
				if err != nil || seconds < 0 || seconds > 1<<33 {
					return usagef("%s=%s: write seconds since 1970", epochEnv, s)
				}
				req.Created = time.Unix(seconds, 0).UTC()
			}
			return ask(cmd.Context(), root, func(ctx context.Context, c *api.Client) error {
				v, err := c.Commit(ctx, args[0], req)
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), v)
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s %s: %d entries, %s in %s\n", v.Ref, v.Digest, v.Entries, progress.Bytes(v.FileBytes), progress.Duration(seconds(v.Took)))
				return err
			})
		},
	}
	clientRoot(cmd, &root)
	jsonFlag(cmd, &asJSON)
	cmd.ValidArgsFunction = completeNames(&root, true)
	f := cmd.Flags()
	f.StringArrayVarP(&req.Changes, "change", "c", nil, "change the image's config by an `INSTRUCTION` of a Dockerfile; may be repeated")
	f.StringVarP(&req.Message, "message", "m", "", "say `WHY`, in the image's history")
	f.StringVarP(&req.Author, "author", "a", "", "`WHO` made it")
	f.BoolVar(&req.Pause, "pause", true, "have the container stand still while its files are read")
	return cmd
}
