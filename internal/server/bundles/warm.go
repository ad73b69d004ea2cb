package bundles

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"

	"hydrofoil.dev/foil/internal/format/bundle"
)

// warm answers bundle.WarmPath.
func (h *Handler) warm(w http.ResponseWriter, r *http.Request) {
	b, err := h.body(w, r, 1<<10)
	var ask bundle.Warm
	if err == nil && (json.Unmarshal(b, &ask) != nil || ask.Bytes < 0 || ask.Bytes > bundle.MaxWarm) {
		err = &bundle.Error{Code: bundle.CodeInvalid, Message: fmt.Sprintf("want a JSON object with bytes, 0 to %d", bundle.MaxWarm)}
	}
	if err != nil {
		writeError(w, h.log, err, "")
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.FormatInt(ask.Bytes, 10))
	slow := newPatient(w, h.o.Patience)
	defer slow.end()
	for zeros := make([]byte, 64<<10); ask.Bytes > 0; {
		n, err := slow.Write(zeros[:min(ask.Bytes, int64(len(zeros)))])
		if err != nil {
			return // the client went away
		}
		ask.Bytes -= int64(n)
	}
}
