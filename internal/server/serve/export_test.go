package serve

import (
	"context"
	"time"
)

// Retain applies the rules of retention as if it were another time.
func (s *Server) Retain(ctx context.Context, now time.Time) error { return s.retainer.apply(ctx, now) }

// EndDrain closes the server's connections, which ends Close's waiting.
func (s *Server) EndDrain() { _ = s.http.Close() } // Wait says what is wrong
