package node

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/fetch"
)

// answers is of a server that is up and reachable, with TLS or without as it was asked.
const answers = api.ServerAnswers + ", but does not give the image now: its log, or that of a proxy in front of it, says why"

// codeOf is the one table from what can go wrong in a pull to the code that
// clients of the daemon see.
var codeOf = []struct {
	is   func(error) bool
	code string
	todo string // what to do about it, for people
}{
	{isAny(syscall.ENOSPC, syscall.EDQUOT), api.CodeNoSpace, "free space on the filesystem of the root, or remove images with `foil rm`, and pull again"},
	{isBundle(bundle.CodeNotFound), api.CodeNotFound, ""},
	{isOlder, api.CodeUnsupported, "the server is older than this foil and does not understand what it asks: upgrade the server first"},
	{isBundle(bundle.CodeInvalid), api.CodeInvalid, ""},
	{isBundle(bundle.CodeUnauthorized), api.CodeUnauthorized, ""},
	{isBundle(bundle.CodeUnsupported), api.CodeUnsupported, ""},
	{isBundle(bundle.CodeUnavailable), api.CodeUnavailable, answers},
	{isBundle(bundle.CodeCorrupt), api.CodeCorrupt, ""},
	{isStatus(http.StatusNotFound, http.StatusMethodNotAllowed), api.CodeUnsupported, "the server is no Hydrofoil server"},
	{isStatus(http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect), api.CodeUnsupported,
		"the server sends its clients elsewhere: name that host in the image's name, or in a hosts.toml (foil node --hosts-dir)"},
	{isAny(bundle.ErrForeign), api.CodeUnsupported, "the server is no Hydrofoil server"},
	{isStatus(http.StatusUnauthorized, http.StatusForbidden), api.CodeUnauthorized, ""},
	{isAny(bundle.ErrCorrupt, fetch.ErrDamaged), api.CodeCorrupt, ""},
	{isAnswered, api.CodeUnavailable, answers},
	{isAny(fetch.ErrUnreachable), api.CodeUnavailable, ""},
	{isAny(syscall.EPERM, syscall.EACCES), api.CodeUnauthorized, ""},
	{isAny(fetch.ErrStopped, context.Canceled, context.DeadlineExceeded), api.CodeUnavailable, ""},
}

// asError gives an error the code of the table, if it has none of its own.
func asError(err error) *api.Error {
	if _, ok := errors.AsType[*api.Error](err); ok {
		return api.AsError(err)
	}
	for _, c := range codeOf {
		if c.is(err) {
			e := &api.Error{Code: c.code, Message: err.Error()}
			if c.todo != "" {
				e.Message += ": " + c.todo
			}
			return e
		}
	}
	return api.AsError(err)
}

// newerError says that an earlier daemon of this root was a newer foil. Nothing
// of it is touched.
type newerError struct {
	path           string
	version, reads int
}

func (e *newerError) Error() string {
	return fmt.Sprintf("%s was written by a newer foil (version %d, this one reads up to %d): start that foil again, or give this one another --root and pull the images there", e.path, e.version, e.reads)
}

// checkVersion fails unless a record of a version can be read here. Records of
// older versions are brought up to date by who reads them.
func checkVersion(path string, version, reads int) error {
	switch {
	case version > reads:
		return &newerError{path, version, reads}
	case version < 1:
		return fmt.Errorf("version %d, this foil reads 1 to %d", version, reads)
	}
	return nil
}

// gateError says of an error that there is no gate what that means.
func gateError(err error) error {
	if !lacking(err) {
		return err
	}
	return errorf(api.CodeUnsupported, "this kernel, %s, cannot hold back reads of what is not here (fanotify pre-content events need Linux 6.14): %w; `foil doctor` says what this host lacks", kernelRelease(), err)
}

// mountError does the same for one that a rootfs cannot be mounted.
func mountError(err error) error {
	if !lacking(err) {
		return err
	}
	return errorf(api.CodeUnsupported, "%w; this kernel, %s, does not mount EROFS images from files (that needs Linux 6.12 with CONFIG_EROFS_FS and CONFIG_EROFS_FS_BACKED_BY_FILE): `foil doctor` says what this host lacks", err, kernelRelease())
}

// lacking reports whether err is what kernels say to what they do not know.
func lacking(err error) bool {
	return isAny(syscall.EINVAL, syscall.ENOSYS, syscall.ENODEV, syscall.ENOTBLK, syscall.EOPNOTSUPP)(err)
}

func kernelRelease() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "of unknown version"
	}
	return "Linux " + unix.ByteSliceToString(u.Release[:])
}

func isAny(targets ...error) func(error) bool {
	return func(err error) bool {
		for _, t := range targets {
			if errors.Is(err, t) {
				return true
			}
		}
		return false
	}
}

func isBundle(code string) func(error) bool {
	return func(err error) bool {
		e, ok := errors.AsType[*bundle.Error](err)
		return ok && e.Code == code
	}
}

// isOlder reports whether a server refused a request for a field that it does not
// know, as servers did before they left such fields out.
func isOlder(err error) bool {
	e, ok := errors.AsType[*fetch.StatusError](err)
	return ok && e.Status == http.StatusBadRequest && strings.Contains(e.Message, "unknown field")
}

// isAnswered reports whether a server was given up that did answer, with a status.
func isAnswered(err error) bool {
	return errors.Is(err, fetch.ErrUnreachable) && errors.As(err, new(*fetch.StatusError))
}

func isStatus(codes ...int) func(error) bool {
	return func(err error) bool {
		e, ok := errors.AsType[*fetch.StatusError](err)
		if !ok {
			return false
		}
		for _, c := range codes {
			if e.Status == c {
				return true
			}
		}
		return false
	}
}
