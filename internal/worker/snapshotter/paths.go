package snapshotter

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/metrics"
	"hydrofoil.dev/foil/internal/worker/api"
)

// newPaths counts the ways that images took. The reason of lazy and full is the
// path itself; of plain it is the code of the node's error, or one of those here.
func newPaths() *prometheus.CounterVec {
	values := [][]string{{PathLazy, PathLazy}, {PathFull, PathFull}}
	for _, why := range append([]string{"timeout", "no_name", "not_in_image", "another_origin", "off"}, api.Codes...) {
		values = append(values, []string{PathPlain, why})
	}
	return metrics.Counters(prometheus.CounterOpts{Name: "foil_node_images_total",
		Help: "Images that containerd asked for, by the path that they took: lazy, full (every byte was here before) or plain (containerd unpacks it). The reason of plain is the code of an error, timeout (no header in time), no_name (containerd did not say which image it is: see deploy/containerd), not_in_image (it has other layers than containerd says), another_origin (without a mirror only one registry's images come lazily) or off."},
		[]string{"path", "reason"}, values...)
}

// Metrics returns what tells of the snapshotter.
func (s *Snapshotter) Metrics() prometheus.Collector { return metrics.Collectors{s.paths, s.unpacked} }

// plainly counts an image that goes the plain way, and tells the log; not when
// that was done for another layer of it. It returns why, as a label can be.
func (s *Snapshotter) plainly(first bool, image, code, why string) string {
	why = shorten(why)
	if first {
		s.paths.WithLabelValues(PathPlain, code).Inc()
		s.log.Warn("containerd gets an image the plain way", "image", image, "path", PathPlain, "reason", why)
	}
	return why
}

// codeOf is the code of an error of the node.
func codeOf(err error) string {
	if e, ok := errors.AsType[*api.Error](err); ok {
		return e.Code
	}
	return api.CodeInternal
}
