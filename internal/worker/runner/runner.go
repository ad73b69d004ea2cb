// Package runner runs containers with runc: it turns an image's config into an
// OCI runtime configuration, and follows one container from its creation to its
// exit code.
//
//	spec, err := runner.Spec(image, runner.SpecOptions{ID: id, Dir: dir, Rootfs: rootfs})
//	err = runner.WriteSpec(dir, spec)
//	r := runner.Runner{StateRoot: "/var/lib/foil/run/runc"}
//	c, err := r.Create(ctx, id, dir, runner.IO{...})  // namespaces, cgroup; waits
//	err = c.Start(ctx)                                // executes its first process
//	code, err := c.Wait(ctx)                          // exit code, or 128 + signal
//	err = r.Delete(ctx, id)
//
// Run does the five steps in one.
package runner
