package bundles

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/server/guard"
	"hydrofoil.dev/foil/internal/server/login"
	"hydrofoil.dev/foil/internal/server/tcp"
)

// Warming up asks nobody who they are: a worker does it before it has anything to pull. Where the server is not open
// each address has so many bytes of it, and more a second.
const (
	warmBurst   = 4 * bundle.MaxWarm
	warmRate    = 1 << 20
	warmClients = 4096
)

// warm answers bundle.WarmPath.
func (h *Handler) warm(w http.ResponseWriter, r *http.Request) {
	b, err := h.body(w, r, 1<<10)
	var ask bundle.Warm
	if err == nil && (json.Unmarshal(b, &ask) != nil || ask.Bytes < 0 || ask.Bytes > bundle.MaxWarm) {
		err = &bundle.Error{Code: bundle.CodeInvalid, Message: fmt.Sprintf("want a JSON object with bytes, 0 to %d", bundle.MaxWarm)}
	}
	if err == nil && h.o.Guard != nil {
		if ok, after := h.warmed.Take(login.Network(guard.Address(r.Context())), int(ask.Bytes)); !ok {
			bundle.SetRetryAfter(w.Header(), after)
			http.Error(w, "this address has warmed up its connections often: pulls go on without that", http.StatusTooManyRequests)
			return
		}
	}
	if err != nil {
		writeError(w, h.log, err, "")
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.FormatInt(ask.Bytes, 10))
	slow := tcp.NewPatient(w, h.o.Patience)
	defer slow.End()
	for zeros := make([]byte, 64<<10); ask.Bytes > 0; {
		n, err := slow.Write(zeros[:min(ask.Bytes, int64(len(zeros)))])
		if err != nil {
			return // the client went away
		}
		ask.Bytes -= int64(n)
	}
}
