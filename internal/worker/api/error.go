package api

// The values of Error.Code.
const (
	CodeNotFound     = "not_found"    // no such image, container or repository
	CodeInvalid      = "invalid"      // the request makes no sense as it stands
	CodeUnauthorized = "unauthorized" // the registry refuses
	CodeConflict     = "conflict"     // in use, or exists already
	CodeUnavailable  = "unavailable"  // the server, or the daemon, cannot be reached
	CodeCorrupt      = "corrupt"      // bytes do not match their digest
	CodeNoSpace      = "no_space"     // the worker's disk is full
	CodeUnsupported  = "unsupported"  // this kernel or host cannot do it
	CodeInternal     = "internal"     // a bug, or an error nobody expected
)
